"""Cache view: read-only access to the target's KV states for a drafter."""

from collections.abc import Sequence

from torch import Tensor

from hf_speculate.cache.base import KVCache, LayerView
from hf_speculate.rows.per_row import RowIndices


class CacheView:
    """Read-only view of some KV cache rows.

    It contains the states after the last rollback. Padding is hidden, and so are the rejected
    states past the end of a row.
    """

    # `row_indices` is None for all rows
    def __init__(self, kv_cache: KVCache, row_indices: Sequence[int] | None = None):
        self._kv_cache = kv_cache
        self._row_indices = None if row_indices is None else RowIndices(row_indices)

    def layer(self, index: int, window: int | None = None) -> LayerView:
        """Return the states of a layer; see `KVCache.view`."""
        keys, values, hidden = self._kv_cache.view(index, window)
        if self._row_indices is None:
            return LayerView(keys, values, hidden)
        hidden = hidden if hidden is None else self._of_rows(hidden)
        return LayerView(self._row_indices.select(keys), self._row_indices.select(values), hidden)

    def last_positions(self) -> Tensor:
        """Return the position id of each row's last token, [B or 1, 1] int64."""
        return self._of_rows(self._kv_cache.last_positions())

    def _of_rows(self, tensor: Tensor) -> Tensor:
        """Select rows of a tensor [B, ...]; a tensor [1, ...] applies to all rows."""
        return (
            tensor
            if self._row_indices is None or tensor.shape[0] == 1
            else self._row_indices.select(tensor)
        )
