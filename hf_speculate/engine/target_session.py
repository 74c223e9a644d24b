"""Target session: the target model, its KV cache, and how the cache follows the batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.end_padding import EndPadding
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.types import DraftOut, Scored, Trimmed


@dataclass(frozen=True)
class TargetSession:
    """Scores drafts with the target, and rolls its KV cache back to the tokens that were emitted."""

    model: LanguageModel
    kv_cache: KVCache
    query_ids: Tensor  # [B, Q] int64, the prompt tokens that the cache does not hold
    chunk_size: int | None  # prompt tokens per forward; None for all at once
    options: dict[str, bool | list[int]]  # further arguments of every forward, `output_hidden_states` for example
    padding: EndPadding  # fills the cache after finished rows

    def prefill(self, on_chunk: Callable[[Scored, int], None]) -> Scored:
        """Read the prompt in chunks, each passed to `on_chunk` with the columns from its first one on."""
        num_ahead = self.num_read
        for chunk in self.query_ids.split(self.chunk_size or self.num_read, dim=1):
            scored = self.model.run(chunk, self.kv_cache, logits_to_keep=1, **self.options)
            on_chunk(scored, num_ahead)
            num_ahead -= chunk.shape[1]
        self.kv_cache.begin_recording()
        return scored

    def score(self, batch: Batch, draft: DraftOut) -> Scored:
        """Score the newest token of each row and the drafted tokens: logits [B, K+1, V]."""
        query = torch.cat([batch.tokens.last(1), draft.token_ids.clamp_min(0)], dim=1)  # [B, K+1]
        query = self.padding.fill(batch, query)
        return self.model.run(query, self.kv_cache, logits_to_keep=query.shape[1], **self.options)

    @property
    def num_read(self) -> int:
        return self.query_ids.shape[1]

    def commit(self, batch: Batch, draft: DraftOut, trimmed: Trimmed) -> None:
        """Roll the cache back to the emitted tokens; it never holds the newest one."""
        num_query = draft.token_ids.shape[1] + 1
        num_dropped = self.padding.num_dropped(batch, trimmed.num_emitted, num_query)
        self.kv_cache.crop(num_dropped, batch.tokens.row_lens)

    def finish(self, batch: Batch, num_surplus: Sequence[int]) -> None:
        """Drop [B] tokens that were decoded past the end of the output, and fill the cache after finished rows."""
        if any(num_surplus):
            self.kv_cache.crop(num_surplus)
        self.padding.finish(self.model, self.kv_cache, batch)

    def rows(self, indices: Sequence[int]) -> None:
        self.kv_cache.rows(indices)
        self.model.rows(indices)

    def join(self, other: "TargetSession") -> None:
        """Add the rows of `other`, which have read their prompts, behind these."""
        self.kv_cache.join(other.kv_cache)
        self.model.join(other.model)

    @contextmanager
    def restored_on_error(self, is_cache_passed: bool) -> Iterator[None]:
        snapshot = self.kv_cache.snapshot() if is_cache_passed else None
        try:
            yield
        except BaseException:
            if is_cache_passed:
                self.kv_cache.restore(snapshot)
            raise
