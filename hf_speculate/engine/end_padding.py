"""End padding: fills the target's KV cache after finished rows, as plain `generate` does for a cache that is kept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.distributed import SyncedRanks
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.transfers import upload

_NEVER = 1 << 30  # a column that no query has
MAX_PADDING_QUERY = 64  # tokens per row in a forward that reads padding alone, as many as folded attention takes


class EndPadding:
    """Brings the KV cache of finished rows to the length of the longest row.

    Plain `generate` feeds a finished row its last token, then padding, until the longest row is finished. Here such a
    row reads these tokens instead of drafts, in the rounds of the other rows. Tokens that it still lacks after the last
    round are fed in forwards of their own, of `max_query` tokens a row, from which the other rows are rolled back.
    """

    def __init__(self, pad_token_id: int | None, max_query: int, ranks: SyncedRanks | None):
        self._pad_token_id = pad_token_id
        self._max_query = max_query
        self._ranks = ranks
        self._num_fed: list[int] = []  # [B] tokens that the cache holds after all but the last token of each row
        self._was_finished: list[bool] = []  # [B] at the last query
        self._starts: list[int] = []  # [B] column of the query from which a row reads padding
        self._device_starts: Tensor  # the same on the query's device

    def fill(self, batch: Batch, query: Tensor) -> Tensor:
        """The query [B, Q] int64 of a forward, with padding instead of the drafts of finished rows."""
        if self._pad_token_id is None or not any(batch.is_finished):
            self._was_finished = []
            return query
        self._num_fed = self._num_fed or [0] * batch.num_rows
        self._was_finished = list(batch.is_finished)
        rows = zip(batch.is_finished, self._num_fed, strict=True)
        starts = [int(num_fed == 0) if is_finished else _NEVER for is_finished, num_fed in rows]
        if starts != self._starts:
            self._starts, self._device_starts = starts, upload(starts, query.device)[:, None]  # [B, 1]
        columns = torch.arange(query.shape[1], device=query.device)
        is_padding = columns >= self._device_starts  # [B, Q]
        return query.masked_fill(is_padding, self._pad_token_id)

    def num_dropped(self, batch: Batch, num_emitted: Sequence[int], num_query: int) -> list[int]:
        """[B] tokens of the last query, Q of each row, that the KV cache does not keep."""
        kept = list(num_emitted)
        if any(self._was_finished):
            num_lacking = self._num_lacking(batch)
            for row, was_finished in enumerate(self._was_finished):
                if was_finished:
                    kept[row] = min(num_lacking[row], num_query)
                    self._num_fed[row] += kept[row]
        return [num_query - num for num in kept]

    def finish(self, model: LanguageModel, kv_cache: KVCache, batch: Batch) -> None:
        """Feed what finished rows lack after the last round, in which all rows are finished."""
        num_forwards = -(-max(self._num_lacking(batch)) // self._max_query)
        if self._ranks is not None:
            num_forwards = self._ranks.max(num_forwards or None) or 0
        for _ in range(num_forwards):
            num_query = max(min(max(self._num_lacking(batch)), self._max_query), 1)
            query = batch.tokens.last(1).expand(-1, num_query)  # [B, Q]
            model.run(self.fill(batch, query), kv_cache, logits_to_keep=1)
            kv_cache.crop(self.num_dropped(batch, [0] * batch.num_rows, num_query))

    def _num_lacking(self, batch: Batch) -> list[int]:
        """[B] tokens that the KV cache lacks in each row."""
        if self._pad_token_id is None:
            return [0] * batch.num_rows
        longest, num_fed = max(batch.tokens.lens), self._num_fed or [0] * batch.num_rows
        return [longest - length - num for length, num in zip(batch.tokens.lens, num_fed, strict=True)]
