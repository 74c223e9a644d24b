"""Make Triton's interpreter fast enough to test whole operations, and correct for bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Patch the language once per launch instead of at every nested call."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        interpreter = None
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "is_quick"):
        yield
        return
    patch_language = interpreter._patch_lang
    launch: list[Any] = []  # scope of the current launch
    covered: set[int] = set()  # modules that the scope has patched

    def patch_once(function: Any) -> Any:
        language = (interpreter.tl, interpreter.tl.core)
        modules = {
            id(value)
            for value in function.__globals__.values()
            if any(value is member for member in language)
        }
        if launch and modules <= covered:
            return launch[0]
        scope = patch_language(function)
        covered.update(modules)
        if not launch:
            launch.append(scope)
            restore = scope.restore

            def end() -> None:
                launch.clear()
                covered.clear()
                restore()

            scope.restore = end
        return scope

    patch_once.is_quick = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
    multiply = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = partialmethod(_multiplied, multiply)
    try:
        yield
    finally:
        interpreter._patch_lang = patch_language
        interpreter.InterpreterBuilder.create_dot = multiply


def _multiplied(builder: Any, multiply: Any, left: Any, right: Any, *others: Any) -> Any:
    """Multiply matrices, including bfloat16 ones, which the interpreter would multiply as bits."""
    if left.dtype.name == "bf16":
        left, right = (
            builder.cast_impl(factor, builder.get_float_ty()) for factor in (left, right)
        )
    return multiply(builder, left, right, *others)
