"""What every drafter does."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.infer.kv_cache import KVCache
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy


class Drafter(Protocol):
    """Proposes the next tokens of every row."""

    def draft(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | None,
        num_draft_tokens: int,
        sample_strategy: SampleStrategy,
        *,
        keys: NoiseKeys | None = None,
        kept: Kept | None = None,
    ) -> DraftOut:
        """Propose up to `num_draft_tokens` tokens per row.

        Args:
            query_token_ids: [B, Q] int64, the tokens of each row that `kv_cache` does not hold yet, the newest last;
                at the first call the whole text.
            kv_cache: the draft model's states, advanced in place by Q + K - 1 tokens; None for drafters without one.
            num_draft_tokens: K at most, >= 1.
            sample_strategy: GREEDY proposes the argmax, a point mass; RANDOM draws.
            keys: noise of the round; required for RANDOM.
            kept: what was emitted since the last call, in plain steps too; None in the first call.

        Returns:
            The proposal. K may be smaller than asked when every row needs no further token.

        Raises:
            ConfigError: `num_draft_tokens` is below 1, or RANDOM lacks keys.
            ShapeError: the query is empty.
        """

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`, in that order. The caller does the same to `kv_cache`."""


def check_request(
    query_token_ids: Tensor, num_draft_tokens: int, sample_strategy: SampleStrategy, keys: NoiseKeys | None
) -> None:
    """Raise what `Drafter.draft` promises to raise."""
    if num_draft_tokens < 1:
        raise ConfigError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}; skip the drafter for none")
    if query_token_ids.ndim != 2 or query_token_ids.shape[1] < 1:
        raise ShapeError(f"query_token_ids must be [B, Q] with Q >= 1, got {list(query_token_ids.shape)}")
    if sample_strategy is SampleStrategy.RANDOM and keys is None:
        raise ConfigError("keys must be given for SampleStrategy.RANDOM, got None; pass NoiseKeys of the round")
