"""Fixed tensors, which one graph writes and others read, always at the same address."""

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_OWNERS: MutableMapping[Tensor, int] = WeakIdKeyDictionary()


def fix(tensor: Tensor, owner: int) -> None:
    """Register a tensor that graphs read in place, unlike other inputs, which they copy.

    A tensor is recognised by identity, so its views are not recognised. Code that runs with one
    tensor of an owner may write to all tensors of this owner.
    """
    _OWNERS[tensor] = owner


def owner_of(tensor: Tensor) -> int | None:
    """Return the owner of a fixed tensor; None for any other tensor."""
    return _OWNERS.get(tensor)
