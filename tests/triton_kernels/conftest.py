"""Makes Triton's interpreter fast enough for tests of whole operations."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """The interpreter puts its functions into the language at every nested call; once a launch is enough."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        interpreter = None
    if not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    patch_language = interpreter._patch_lang
    launch: list[Any] = []  # the scope of the launch under way
    covered: set[int] = set()  # the modules that it has patched

    def patch_once(function: Any) -> Any:
        language = (interpreter.tl, interpreter.tl.core)
        modules = {id(value) for value in function.__globals__.values() if any(value is one for one in language)}
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

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch_language
