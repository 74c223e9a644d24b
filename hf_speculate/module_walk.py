"""Module walk: a model's modules and parameters in one plain loop.

torch's `modules()` and `parameters()` make the name of each, in a generator for every level. That takes four to eight
times as long, and shows in each call of a deep model.
"""

from typing import Any

from torch import Tensor, nn


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once, level by level."""
    found: dict[nn.Module, None] = {module: None}
    walk = [module]
    for one in walk:
        for child in vars(one)["_modules"].values():
            if child is not None and child not in found:
                found[child] = None
                walk.append(child)
    return walk


def parameters_of(module: nn.Module) -> list[Tensor]:
    """The parameters of a module and of all below it, each once."""
    held: Any = [one for part in modules_of(module) for one in vars(part)["_parameters"].values()]
    return list({id(one): one for one in held if one is not None}.values())
