"""Prefill a prompt or decode token by token with one model."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.row_lens import Ruler
from hf_speculate.errors import ConfigError
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.types import DecodeOutput, PrefillOutput, SampleStrategy

# Shorter forwards save little memory, and read the weights more often.
MIN_CHUNK_TOKENS = 256


class Choice(NamedTuple):
    """One token per row, and what it was chosen from."""

    token_ids: Tensor  # [B] int64
    token_logits: Tensor | None  # [B, V]; None: nobody will read them
    is_done: Tensor | None  # [B] bool, rows that need no further token; None: nothing stops


# Longer queries are prompts; the tokens after them share masks of their own.
MAX_EXPECTED_QUERY = 16

ChooseToken = Callable[[Tensor, int], Choice]
"""Takes the last position's logits [B, V] and the step's number; returns the `Choice`."""


class Inferencer:
    """Runs a `LanguageModel` step by step.

    Where only the last logits are read, a forward takes at most `chunk_size` tokens of each row. Decoding ends once
    every row is done, if `stops_early` and if that can be read for nothing.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        chunk_size: int | None = None,
        stops_early: bool = True,
    ):
        self.language_model = language_model
        self.chunk_size = chunk_size
        self.stops_early = stops_early
        self._counts = Ruler(language_model.device, torch.int32)

    def prefill(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        sample_strategy: SampleStrategy,
        *,
        logits_to_keep: int | None = None,
    ) -> PrefillOutput:
        """Feed a prompt [B, Q] int64 and choose the token after it; `kv_cache` is advanced by Q tokens, in place."""
        logits = self.language_model.forward(query_token_ids, kv_cache, logits_to_keep=logits_to_keep)
        return PrefillOutput(_choice(sample_strategy, logits[:, -1]).token_ids[:, None], logits)

    def feed(self, query_token_ids: Tensor, kv_cache: KVCache) -> Tensor:
        """Logits [B, V] after query tokens [B, Q] int64, in as few chunks of about one length as `chunk_size` takes."""
        num_query = query_token_ids.shape[1]
        num_chunks = 1 if self.chunk_size is None else max(-(-num_query // self.chunk_size), 1)
        for chunk in query_token_ids.tensor_split(num_chunks, dim=1):
            logits = self.language_model.forward(chunk, kv_cache, logits_to_keep=1)
        return logits[:, -1]

    def decode(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        max_new_tokens: int,
        sample_strategy: SampleStrategy,
        *,
        choose: ChooseToken | None = None,
        stop_ids: Tensor | None = None,
    ) -> DecodeOutput:
        """Decode up to `max_new_tokens` tokens; `kv_cache` is advanced by all of them but the last, in place.

        A row is done after its EOS. The loop ends when every row is, where that can be read without waiting. The query
        is [B, Q] int64. `choose` replaces `sample_strategy` and the EOS rule; rows are then done after one of
        `stop_ids` [E] int64 too.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}; ask for a token")
        if choose is None:
            choose = partial(_choice, sample_strategy)
            eos = self.language_model.model.generation_config.eos_token_id
            stop_ids = None if eos is None else torch.tensor(eos, device=self.language_model.device).reshape(-1)
        can_stop = self.stops_early and query_token_ids.device.type == "cpu"  # elsewhere reading would wait
        is_ended = torch.zeros(query_token_ids.shape[0], dtype=torch.bool, device="cpu")
        ids: list[Tensor] = []
        logits: list[Tensor] = []
        are_done: list[Tensor] = []
        query = query_token_ids
        if query.shape[1] <= MAX_EXPECTED_QUERY:
            kv_cache.expect(query.shape[1] + max_new_tokens - 1)
        for step in range(max_new_tokens):
            choice = choose(self.feed(query, kv_cache), step)
            ids.append(choice.token_ids)
            query = choice.token_ids[:, None]
            if choice.token_logits is not None:
                logits.append(choice.token_logits)
            if choice.is_done is not None:
                are_done.append(choice.is_done)
            if step == 0 and query_token_ids.shape[1] > MAX_EXPECTED_QUERY:
                kv_cache.expect(max_new_tokens - 1)
            if can_stop:
                if stop_ids is not None:
                    is_ended = is_ended | (query == stop_ids).any(1)
                if choice.is_done is not None:
                    is_ended = is_ended | choice.is_done
                if bool(is_ended.all()):
                    break
        token_ids, counts = torch.stack(ids, dim=1), self._counts.span(1, len(ids))
        lens = counts[-1:].repeat(token_ids.shape[0]) if stop_ids is None else num_until(token_ids, stop_ids, counts)
        if are_done:
            lens = lens.minimum(torch.where(torch.stack(are_done, dim=1), counts, counts[-1]).amin(1))
        return DecodeOutput(token_ids, torch.stack(logits, dim=1) if logits else None, lens)


def _choice(sample_strategy: SampleStrategy, logits: Tensor, step: int = 0) -> Choice:
    """The argmax of logits [B, V], or a draw of torch's default generator."""
    if sample_strategy is SampleStrategy.GREEDY:
        return Choice(logits.float().argmax(dim=-1), logits, None)
    return Choice(torch.multinomial(logits.float().softmax(dim=-1), 1)[:, 0], logits, None)


def num_until(token_ids: Tensor, stop_ids: Tensor, counts: Tensor) -> Tensor:
    """[B] int32, tokens of each row of [B, N] up to the first of the stop ids [E], itself included; else N."""
    is_single = stop_ids.shape[0] == 1
    goes_on = token_ids != stop_ids if is_single else (token_ids[:, :, None] != stop_ids).all(-1)  # [B, N]
    return torch.where(goes_on, counts[-1], counts).amin(1)


def draft_chunk_size(target: PreTrainedModel, draft: PreTrainedModel, num_query: int) -> int:
    """Tokens of each row per forward of the draft, whose widest activations are then no larger than the target's."""
    draft_bytes = widest_bytes(draft)
    if not draft_bytes:
        return max(num_query, MIN_CHUNK_TOKENS)
    return max(num_query * widest_bytes(target) // draft_bytes, MIN_CHUNK_TOKENS)


def widest_bytes(model: PreTrainedModel) -> int:
    """Bytes of one token's activations behind the widest layer; 0 where layers do not tell. The head is left out."""
    head = model.get_output_embeddings()
    # torch's name in a linear layer, or transformers' in GPT-2's
    widths = [getattr(one, "out_features", None) or getattr(one, "nf", 0) for one in model.modules() if one is not head]
    return max((width for width in widths if isinstance(width, int)), default=0) * model.dtype.itemsize
