"""Fixed tensors: memory written by one graph and read by others, at the same address every time."""

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_FIXED: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()


def fix(tensor: Tensor) -> Tensor:
    """Register and return a tensor: graphs read it in place, while they copy other inputs.

    It is known by its identity, so a view of it is not.
    """
    _FIXED[tensor] = True
    return tensor


def is_fixed(tensor: Tensor) -> bool:
    """Return whether graphs read a tensor in place."""
    return tensor in _FIXED
