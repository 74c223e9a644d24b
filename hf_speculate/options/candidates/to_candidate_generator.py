"""A `Drafter` as a `CandidateGenerator` for transformers' own assisted loop."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.errors import ShapeError, UnsupportedModelError
from hf_speculate.kernels.noise import row_seeds
from hf_speculate.models.cache_kinds import CacheRequest, find_kind
from hf_speculate.models.recurrent_layers import recurrent_cache, rollback_obstacle
from hf_speculate.types import Kept, NoiseKeys, SampleStrategy


class DraftModelCandidateGenerator(CandidateGenerator):
    """A candidate generator over a `Drafter`.

    It drafts one row, without the nested `generate()` of transformers' own generator. A greedy
    drafter returns no logits. In that case, transformers compares its own sample with the draft,
    and samples keep the target's distribution.

    Args:
        drafter: proposes the tokens. A drafter with a `draft_model` gets a suitable KV cache, even
            if the model has recurrent layers.
        num_draft_tokens: K, >= 1.
        sample_strategy: argmax or sampling.
        max_length: no token is drafted at or past this length.
        seed: row seed for the noise of the drafts.
        device: device of the draft model.

    Raises:
        UnsupportedModelError: the draft model cannot roll back.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_draft_tokens: int,
        sample_strategy: SampleStrategy,
        max_length: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.sample_strategy = sample_strategy
        self.max_length = max_length
        self._kv_cache = _new_cache(drafter, torch.device(device))
        self._seeds = row_seeds(seed, 1)
        self._num_rounds = 0
        self._shown: Tensor | None = None  # [1, T] the prefix of the previous round
        self._seen: Tensor | None = None  # [1, T'] tokens in the draft cache

    # transformers' own generators also return None for logits..
    def get_candidates(  # type: ignore[override]
        self, input_ids: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Propose a continuation.

        Args:
            input_ids: [1, T] int64, prompt and text so far.
            **kwargs: arguments of transformers with the target's outputs; ignored.

        Returns:
            [1, T+K] prefix and proposal, and [1, K, V] logits for sampling, or None for a point
            mass.

        Raises:
            ShapeError: there is more than one row.
        """
        if input_ids.shape[0] != 1:
            raise ShapeError(
                "input_ids must be [1, T] in transformers' assisted loop, got "
                f"{list(input_ids.shape)}"
            )
        length = input_ids.shape[1]
        num_draft_tokens = min(self.num_draft_tokens, self.max_length - length - 1)
        if num_draft_tokens < 1:
            return input_ids, None
        query, kept = input_ids[:, self._roll_back(input_ids) :], None
        keys = NoiseKeys(self._seeds, *torch.tensor([[self._num_rounds], [length]], device="cpu"))
        if self._shown is not None:
            new_ids = input_ids[:, self._shown.shape[1] :]
            kept = Kept(new_ids, torch.tensor([new_ids.shape[1]], dtype=torch.int32, device="cpu"))
        request = DraftRequest(
            query, self._kv_cache, num_draft_tokens, self.sample_strategy, keys, kept
        )
        try:
            draft = self.drafter.draft(request)
        finally:
            self._kv_cache.release()
        count = int(draft.lens[0])
        candidates = torch.cat([input_ids, draft.token_ids[:, :count]], dim=1)  # [1, T+K]
        self._seen = torch.cat([input_ids, draft.token_ids[:, :-1]], dim=1)
        self._shown = input_ids
        self._num_rounds += 1
        return candidates, None if draft.token_logits is None else draft.token_logits[:, :count]

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Do nothing: the draft length is constant."""

    def _roll_back(self, input_ids: Tensor) -> int:
        """Drop the states of rejected tokens; return the number of tokens left in the cache."""
        if self._seen is None:
            return 0
        num_common = min(self._seen.shape[1], input_ids.shape[1] - 1)
        differs = (self._seen[0, :num_common] != input_ids[0, :num_common]).nonzero()
        num_valid = int(differs[0]) if len(differs) else num_common
        self._kv_cache.crop(self._seen.shape[1] - num_valid)
        return num_valid


def _new_cache(drafter: Drafter, device: torch.device) -> KVCache:
    model: PreTrainedModel | None = getattr(drafter, "draft_model", None)
    obstacle = "" if model is None else rollback_obstacle(model)
    if obstacle:
        raise UnsupportedModelError(
            f"speculative decoding rolls back rejected tokens, but {type(model).__name__} has "
            "recurrent state "
            f"{obstacle}; use another draft model"
        )
    if model is None or recurrent_cache(model) is None:
        return DynamicKVCache(DynamicCache(), 1, device=device)
    return find_kind("hybrid").make(CacheRequest(model, None, None, device), 1)
