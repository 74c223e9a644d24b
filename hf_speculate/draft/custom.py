"""Drafts with a drafter that the caller of `generate()` brings."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.base import Drafter, DrafterRequest, check_request
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy

DrafterFactory = Callable[[DrafterRequest], Drafter]


class OwnDrafter:
    """A `Drafter` around the caller's own, whose proposals are checked where they come in.

    Args:
        factory: makes the caller's drafter.
        request: what it is told.

    Raises:
        ConfigError: what was made is no drafter, or names a wrong number of tokens.
    """

    def __init__(self, factory: DrafterFactory, request: DrafterRequest):
        drafter = factory(request)
        if isinstance(drafter, type) or not all(callable(getattr(drafter, name, None)) for name in ("draft", "rows")):
            raise ConfigError(
                f"drafter must make an object with draft() and rows(), got {_name(drafter)}; "
                "return an instance of a class that fulfils hf_speculate.Drafter"
            )
        most = getattr(drafter, "max_draft_tokens", None)
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise ConfigError(
                f"max_draft_tokens of a drafter must be an int of at least 1, got {most!r}; leave it out for any number"
            )
        self.drafter = drafter
        self.reads_hidden_states = bool(getattr(drafter, "reads_hidden_states", False))
        self.max_draft_tokens: int | None = most
        self._vocab_size = request.vocab_size

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
        """See `Drafter.draft`; ids outside the vocabulary become -1, which no verifier keeps.

        Raises:
            ShapeError: the proposal's shapes, dtypes or device do not fit.
        """
        check_request(query_token_ids, num_draft_tokens, sample_strategy, keys)
        draft = self.drafter.draft(query_token_ids, kv_cache, num_draft_tokens, sample_strategy, keys=keys, kept=kept)
        self._check(draft, query_token_ids, num_draft_tokens)
        ids = draft.token_ids
        ids = ids.masked_fill((ids < 0) | (ids >= self._vocab_size), -1)  # [B, K]
        lens = draft.lens.to(torch.int32).clamp(0, ids.shape[1])
        logits, sums = draft.token_logits, draft.logsumexp
        if sample_strategy is SampleStrategy.GREEDY or logits is None:
            return DraftOut(ids, lens, None, None)
        return DraftOut(ids, lens, logits, logits.float().logsumexp(-1) if sums is None else sums)

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`."""
        self.drafter.rows(indices)

    def _check(self, draft: DraftOut, query: Tensor, num_draft_tokens: int) -> None:
        if not isinstance(draft, DraftOut):
            raise ShapeError(f"a drafter must return a DraftOut, got {_name(draft)}; see hf_speculate.types")
        ids, num_rows = draft.token_ids, query.shape[0]
        if ids.ndim != 2 or ids.shape[0] != num_rows or ids.shape[1] > num_draft_tokens or ids.dtype != torch.int64:
            raise ShapeError(
                f"token_ids of a draft must be [B, K] int64 with B = {num_rows} and K of at most {num_draft_tokens}, "
                f"got {list(ids.shape)} {_dtype(ids)}; return fewer tokens where no more are known, never more"
            )
        if tuple(draft.lens.shape) != (num_rows,) or draft.lens.dtype not in (torch.int32, torch.int64):
            raise ShapeError(
                f"lens of a draft must be [B] int32 with B = {num_rows}, got {list(draft.lens.shape)} "
                f"{_dtype(draft.lens)}; say how many tokens of each row count"
            )
        if ids.device != query.device:
            raise ShapeError(f"token_ids of a draft must be on {query.device}, like the query, got {ids.device}")
        shape = [*ids.shape, self._vocab_size]
        if draft.token_logits is not None and list(draft.token_logits.shape) != shape:
            raise ShapeError(
                f"token_logits of a draft must be [B, K, V] = {shape}, got {list(draft.token_logits.shape)}; "
                "return None for a point mass"
            )


def _name(made: object) -> str:
    return made.__name__ if isinstance(made, type) else type(made).__name__


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
