"""Fixed tensors, which one graph writes and others read, always at the same address."""

from collections.abc import MutableMapping
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Owner:
    """Owner of fixed tensors, which lives as long as the graph that writes them."""


OwnerRef = ref[Owner]
_OWNERS: MutableMapping[Tensor, OwnerRef] = WeakIdKeyDictionary()


def fix(tensor: Tensor, owner: Owner) -> None:
    """Register a tensor that graphs read in place, unlike other inputs, which they copy.

    A tensor is recognised by identity, so its views are not recognised. Code that runs with one
    tensor of an owner may write to all tensors of this owner.
    """
    _OWNERS[tensor] = ref(owner)


def owner_of(tensor: Tensor) -> OwnerRef | None:
    """Return a reference to the owner of a fixed tensor; None for any other tensor."""
    return _OWNERS.get(tensor)
