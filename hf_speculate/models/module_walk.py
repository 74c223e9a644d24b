"""Module walk: find modules, parameters, forward hooks and compiled forwards in one plain loop.

torch's `modules()` and `parameters()` also build names, with one generator per level. They take
four to eight times as long, which is noticeable in each call with a deep model.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

_OWN = __name__.partition(".")[0]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return the module and its descendants, each once and level by level."""
    seen: dict[nn.Module, None] = {module: None}
    walk = [module]
    for parent in walk:
        for child in vars(parent)["_modules"].values():
            if child is not None and child not in seen:
                seen[child] = None
                walk.append(child)
    return walk


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module and its descendants, each once."""
    parameters: Any = [
        parameter for part in modules_of(module) for parameter in vars(part)["_parameters"].values()
    ]
    return list(
        {id(parameter): parameter for parameter in parameters if parameter is not None}.values()
    )


def weight_bytes(weight: Tensor) -> int:
    """Return the storage size of a weight in bytes.

    A packed weight reports the shape and dtype of the unpacked weight, so its inner tensors are
    counted instead.
    """
    if not hasattr(weight, "__tensor_flatten__") or hasattr(weight, "device_mesh"):
        return weight.numel() * weight.element_size()
    return sum(weight_bytes(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])


def is_compiled(model: nn.Module) -> bool:
    """Return whether the user compiled the forward of the model or of one of its modules."""
    for attributes in map(vars, modules_of(model)):
        is_wrapped = hasattr(attributes.get("forward"), "_torchdynamo_orig_callable")
        has_compiled_call = attributes.get("_compiled_call_impl") is not None
        if is_wrapped or has_compiled_call or "_orig_mod" in attributes["_modules"]:
            return True
    return False


def adapters_by_row(model: nn.Module) -> bool:
    """Return whether PEFT hooks give each row of the batch its own adapter."""
    hooks = (
        hook for module in modules_of(model) for hook in list(module._forward_pre_hooks.values())
    )
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)


def forward_hook_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the ids of the forward hooks in the model; ids are unique within a process.

    Our hooks are left out: they are there during a forward, and act in its thread alone.
    """
    return tuple(hook_id for hook_id, package in _forward_hooks(model) if package != _OWN)


def has_hooks_of_others(model: nn.Module) -> bool:
    """Return whether the model has forward hooks besides ours and transformers' recorders."""
    return any(package not in (_OWN, "transformers") for _, package in _forward_hooks(model))


def _forward_hooks(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the id of each forward hook, with the name of its package.

    The tables are copied, because other threads may add and remove hooks.
    """
    for module in modules_of(model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook_id, hook in list(hooks.items()):
                function: Any = hook
                while isinstance(function, partial):
                    function = function.func
                name = getattr(function, "__module__", None) or ""
                yield hook_id, name.partition(".")[0]
