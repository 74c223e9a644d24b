"""A read-only view of a KV cache, through which a drafter attends to the target's states."""

from collections.abc import Sequence

from torch import Tensor

from hf_speculate.cache.base import KVCache, LayerView
from hf_speculate.rows.per_row import RowIndices


class CacheView:
    """What some rows of a KV cache hold after the last rollback, to be read and never changed.

    Columns behind the end of a row, whose states were rejected, are hidden, and so is padding.
    """

    def __init__(self, kv_cache: KVCache, row_indices: Sequence[int] | None = None):  # None for all rows
        self._kv_cache = kv_cache
        self._kept = None if row_indices is None else RowIndices(row_indices)

    def layer(self, index: int, window: int | None = None) -> LayerView:
        """The states of a layer, see `KVCache.view`."""
        keys, values, hidden = self._kv_cache.view(index, window)
        if self._kept is None:
            return LayerView(keys, values, hidden)
        hidden = hidden if hidden is None else self._of_rows(hidden)
        return LayerView(self._kept.select(keys), self._kept.select(values), hidden)

    def last_positions(self) -> Tensor:
        """[B or 1, 1] int64: the position id of each row's last token."""
        return self._of_rows(self._kv_cache.last_positions())

    def _of_rows(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor [B or 1, ...] whose single row stands for all."""
        return tensor if self._kept is None or tensor.shape[0] == 1 else self._kept.select(tensor)
