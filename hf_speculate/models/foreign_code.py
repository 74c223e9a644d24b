"""Foreign code in a model: hooks, replaced forwards and modules from unknown packages.

Verification reads several tokens in one forward and rolls some of them back. User code may count
forwards, change the last token of each forward, or edit the cache. Only a comparison with plain
decoding reveals this. Known packages treat every token independently.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from hf_speculate.models.module_walk import modules_of

_KNOWN_NAMES = """
accelerate aqlm auto_round awq bitsandbytes compressed_tensors deepspeed eetq fbgemm_gpu fla
gptqmodel hf_speculate hqq kernels liger_kernel optimum peft quark torch torchao transformer_engine
transformers
"""
# top-level packages of frameworks, adapters, quantisers and kernels
KNOWN_PACKAGES = set(_KNOWN_NAMES.split())
# The output of these adapters depends on the other tokens of a forward.
_UNKNOWN_PARTS = ("peft.tuners.adaption_prompt", "peft.tuners.shadow", "peft.tuners.xlora")
_ALL_MODULES = "every module"


class _Identity:
    """A weakly referenced object, compared by identity."""

    def __init__(self, thing: object):
        self._id = id(thing)
        try:
            self._find: Callable[[], object] = weakref.ref(thing)
        except TypeError:  # a few callables do not support weak references
            self._find = lambda: thing

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        thing = self._find()
        return isinstance(other, _Identity) and thing is not None and other._find() is thing


class ForeignCode(NamedTuple):
    """A hook, a replaced forward or a module from an unknown package."""

    module_name: str  # empty for the model itself
    kind: str  # "forward hook", "forward pre-hook", "replaced forward" or "module"
    name: str  # name of the function or class
    identity: tuple[_Identity, ...]  # identity of the function

    def __str__(self) -> str:
        return f"the {self.kind} {self.name} of {self.module_name or 'the model'}"


def foreign_code(model: PreTrainedModel) -> tuple[ForeignCode, ...]:
    """Return the foreign code in a model.

    Entries from two calls are equal if their module and function are the same.
    Tables of hooks are copied, because other threads may add and remove hooks.
    """
    tables = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    hook_kinds = "forward pre-hook", "forward hook"
    entries: list[ForeignCode] = [
        _entry(_ALL_MODULES, kind, hook)
        for kind, table in zip(hook_kinds, tables, strict=True)
        for hook in list(table.values())
        if _is_foreign(hook)
    ]
    packages = {_package(cls.__module__) for cls in type(model).__mro__} - {"builtins"}
    modules: dict[type, list[nn.Module]] = {}
    touched: list[nn.Module] = []
    for module in modules_of(model):
        modules.setdefault(type(module), []).append(module)
        state = vars(module)
        if state["_forward_pre_hooks"] or state["_forward_hooks"] or "forward" in state:
            touched.append(module)
    classes = {cls: code for cls in modules if (code := _foreign_class(cls, packages)) is not None}
    if not touched and not classes:
        return tuple(entries)
    parts: list[tuple[nn.Module, str, Any]] = []
    is_foreign: dict[int, bool] = {}  # by id of the hook; many layers may share one
    for module in touched:
        for kind, table in (
            (hook_kinds[0], module._forward_pre_hooks),
            (hook_kinds[1], module._forward_hooks),
        ):
            for hook in list(table.values()):
                if id(hook) not in is_foreign:
                    is_foreign[id(hook)] = _is_foreign(hook)
                if is_foreign[id(hook)]:
                    parts.append((module, kind, hook))
        if "forward" in vars(module) and _is_foreign_forward(module, packages):
            parts.append((module, "replaced forward", vars(module)["forward"]))
    parts += [
        (module, kind, function)
        for cls, (kind, function) in classes.items()
        for module in modules[cls]
    ]
    names = {id(module): name for name, module in model.named_modules()} if parts else {}
    return tuple(
        entries
        + [_entry(names.get(id(module), ""), kind, function) for module, kind, function in parts]
    )


def described(code: Sequence[ForeignCode]) -> str:
    """Describe the first three entries of foreign code and count the rest."""
    more = f" and {len(code) - 3} more" if len(code) > 3 else ""
    return ", ".join(map(str, code[:3])) + more


def has_activated_adapters(model: nn.Module) -> bool:
    """Return whether any row uses activated LoRA (aLoRA), which PEFT sets up with hooks."""
    modules = [module for module in modules_of(model) if module._forward_pre_hooks]
    hooks = [
        hook
        for module in modules
        if not getattr(module, "disable_adapters", False)
        for hook in list(module._forward_pre_hooks.values())
    ]
    offsets = [getattr(hook, "keywords", {}).get("alora_offsets") or () for hook in hooks]
    return any(offset is not None for row_offsets in offsets for offset in row_offsets)


def _entry(module_name: str, kind: str, function: Any) -> ForeignCode:
    parts = (
        [function] if not hasattr(function, "__func__") else [function.__self__, function.__func__]
    )
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return ForeignCode(module_name, kind, named.__qualname__, tuple(map(_Identity, parts)))


def _foreign_class(cls: type, packages: set[str]) -> tuple[str, Any] | None:
    """Return the kind and object of foreign code in a class; None if the class has none.

    The object is the class itself or a replaced forward.
    """
    if not _is_known(cls.__module__) and _package(cls.__module__) not in packages:
        return "module", cls
    forward: Any = cls.forward  # type: ignore[attr-defined]
    origins = [name for name in _origins(forward) if _package(name) not in packages]
    return None if all(map(_is_known, origins)) else ("replaced forward", forward)


def _is_foreign_forward(module: nn.Module, packages: set[str]) -> bool:
    """Return whether a forward set on the module itself is foreign.

    accelerate's forwards may run user-written hooks.
    """
    if hasattr(type(module), "kernel_layer_name"):  # a kernel from the Hub replaces the forward
        return False
    hook = vars(module).get("_hf_hook")
    hooks = [] if hook is None else [hook, *getattr(hook, "hooks", ())]
    if not all(_is_known(type(single_hook).__module__) for single_hook in hooks):
        return True
    forward = vars(module)["forward"]
    return any(
        not _is_known(name) and _package(name) not in packages for name in _origins(forward, module)
    )


def _is_foreign(hook: Any) -> bool:
    return not all(map(_is_known, _origins(hook)))


def _origins(function: Any, module: nn.Module | None = None) -> Iterator[str]:
    """Yield the Python module names of a function, its wrapped functions and its owner."""
    waiting, seen = [function], set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        wrapped = [getattr(function, name, None) for name in ("__func__", "__wrapped__")]
        wrapped += [function.func] if isinstance(function, partial) else []
        waiting += [inner for inner in wrapped if inner is not None]
        owner = getattr(function, "__self__", None)
        if owner is not None and owner is not module and hasattr(function, "__func__"):
            yield type(owner).__module__
        if hasattr(function, "__globals__"):
            yield function.__globals__.get("__name__") or ""
        elif not isinstance(function, partial) and not hasattr(function, "__func__"):
            yield (function if isinstance(function, type) else type(function)).__module__


def _is_known(name: str) -> bool:
    return _package(name) in KNOWN_PACKAGES and not name.startswith(_UNKNOWN_PARTS)


def _package(name: str) -> str:
    return name.partition(".")[0]
