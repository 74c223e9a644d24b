"""Fixed tensors: memory written by one graph and read by others, at the same address every time."""

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_OWNERS: MutableMapping[Tensor, int] = WeakIdKeyDictionary()


def fix(tensor: Tensor, owner: int) -> None:
    """Register a tensor: graphs read it in place, while they copy other inputs.

    It is known by its identity, so a view of it is not. Whoever runs with one tensor of an owner
    may write to all of them.
    """
    _OWNERS[tensor] = owner


def owner_of(tensor: Tensor) -> int | None:
    """Return the owner of a fixed tensor; None for other tensors."""
    return _OWNERS.get(tensor)
