"""Row lists: select and join rows in objects that hold one entry per row of the batch."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from hf_speculate.transfers import upload


class RowIndices(list[int]):
    """Indices of the selected rows, in their new order.

    All members of a batch share one upload of the indices per device.
    """

    def __init__(self, indices: Sequence[int]):
        super().__init__(indices)
        self._on: dict[torch.device, Tensor] = {}

    @classmethod
    def of(cls, indices: Sequence[int]) -> "RowIndices":
        """Convert indices to `RowIndices` if they are of another type."""
        return indices if isinstance(indices, cls) else cls(indices)

    def on(self, device: torch.device) -> Tensor:
        """Return the indices as a tensor [N] int64 on a device."""
        if device not in self._on:
            self._on[device] = upload(self, device)
        return self._on[device]

    def select(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Select rows of a tensor along `dim`; the result is [N, ...] for the first dimension."""
        return tensor.index_select(dim, self.on(tensor.device))


class PerRow:
    """An object whose members hold one entry per row.

    `rows` and `join` update the members that are declared by name. A member is skipped while it is
    None or an empty list.
    """

    BY_ROW: ClassVar[tuple[str, ...]] = ()
    """Lists with one entry per row."""
    TENSORS: ClassVar[tuple[str, ...]] = ()
    """Tensors [B, ...], or lists, tuples and dictionaries of such tensors."""
    PARTS: ClassVar[tuple[str, ...]] = ()
    """Members with `rows` and `join` methods. An object with two names is updated once."""

    REPLACED: ClassVar[tuple[str, ...]] = ()
    """Members that are replaced with the result of their `rows` method."""

    def rows(self, indices: Sequence[int]) -> None:
        """Select the rows `indices`, in this order."""
        row_indices = RowIndices.of(indices)
        for name in self.REPLACED:
            setattr(self, name, getattr(self, name).rows(row_indices))
        for name in self.BY_ROW:
            values = getattr(self, name)
            if values:
                setattr(self, name, [values[row] for row in row_indices])
        for name in self.TENSORS:
            setattr(self, name, tree_map_only(Tensor, row_indices.select, getattr(self, name)))
        for name in self._part_names():
            getattr(self, name).rows(row_indices)
        self.forget()

    def join(self, other: Any) -> None:
        """Append the rows of `other`, an object of the same class that must not be used again."""
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
        """Drop the values derived from the rows; called after each change to the rows."""

    def _part_names(self) -> list[str]:
        first = {
            id(member): name
            for name in reversed(self.PARTS)
            if (member := getattr(self, name)) is not None
        }
        return [name for name in self.PARTS if name in first.values()]


def _joined(mine: Any, theirs: Any) -> Any:
    return torch.cat([mine, theirs]) if isinstance(mine, Tensor) else mine
