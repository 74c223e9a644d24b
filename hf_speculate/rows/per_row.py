"""Row lists: objects with an entry for each row of the batch, whose rows are selected and joined here alone."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from hf_speculate.transfers import upload


class RowIndices(list[int]):
    """The rows that are kept, in their new order; each device gets them in one upload for all parts of a batch."""

    def __init__(self, indices: Sequence[int]):
        super().__init__(indices)
        self._on: dict[torch.device, Tensor] = {}

    @classmethod
    def of(cls, indices: Sequence[int]) -> "RowIndices":
        """Return the indices themselves if they are of this class."""
        return indices if isinstance(indices, cls) else cls(indices)

    def on(self, device: torch.device) -> Tensor:
        """[N] int64."""
        if device not in self._on:
            self._on[device] = upload(self, device)
        return self._on[device]

    def select(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the kept rows of a tensor, [N, ...] if rows are its first dimension."""
        return tensor.index_select(dim, self.on(tensor.device))


class PerRow:
    """Writes `rows` and `join` for the members that a class declares by name.

    A member that is None, or a list that is empty, is not filled yet and stays so.
    """

    BY_ROW: ClassVar[tuple[str, ...]] = ()
    """Lists with one entry for each row."""
    TENSORS: ClassVar[tuple[str, ...]] = ()
    """Tensors [B, ...], or lists, tuples and dictionaries of such."""
    PARTS: ClassVar[tuple[str, ...]] = ()
    """Members with `rows` and `join` of their own; one that has two names counts once."""

    REPLACED: ClassVar[tuple[str, ...]] = ()
    """Members whose `rows` returns what takes their place."""

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order."""
        kept = RowIndices.of(indices)
        for name in self.REPLACED:
            setattr(self, name, getattr(self, name).rows(kept))
        for name in self.BY_ROW:
            values = getattr(self, name)
            if values:
                setattr(self, name, [values[row] for row in kept])
        for name in self.TENSORS:
            setattr(self, name, tree_map_only(Tensor, kept.select, getattr(self, name)))
        for name in self._part_names():
            getattr(self, name).rows(kept)
        self.forget()

    def join(self, other: Any) -> None:
        """Add the rows of `other`, which is of the same class and not used after that, behind these."""
        for name in self.BY_ROW:
            values = getattr(self, name)
            if values:
                setattr(self, name, [*values, *getattr(other, name)])
        for name in self.TENSORS:
            setattr(self, name, tree_map(_joined, getattr(self, name), getattr(other, name)))
        for name in (*self.REPLACED, *self._part_names()):
            getattr(self, name).join(getattr(other, name))
        self.forget()

    def forget(self) -> None:
        """Called after the rows have changed: drop what was derived from them."""

    def _part_names(self) -> list[str]:
        first = {id(part): name for name in reversed(self.PARTS) if (part := getattr(self, name)) is not None}
        return [name for name in self.PARTS if name in first.values()]


def _joined(mine: Any, theirs: Any) -> Any:
    return torch.cat([mine, theirs]) if isinstance(mine, Tensor) else mine
