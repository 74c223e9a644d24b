"""The inferencer: runs a language model over a prompt, and token by token, as a token choice asks for."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.row_lens import ArangeCache
from hf_speculate.errors import ConfigError
from hf_speculate.models.chosen_tokens import Chosen, ChosenTokens, joined
from hf_speculate.models.language_model import LanguageModel, dtype_of
from hf_speculate.models.module_walk import modules_of
from hf_speculate.types import DecodeOutput, PrefillOutput, SampleStrategy

# Shorter forwards save little memory, and read the weights more often.
MIN_CHUNK_TOKENS = 256
# Longer queries count as prompts: draft steps after them get a mask of their own.
MAX_EXPECTED_QUERY = 16


class TokenChoice(Protocol):
    """Chooses the tokens after a query one by one, from the logits of each step."""

    def choose(self, logits: Tensor) -> Tensor:
        """The next token [B] int64, from logits [B, V]."""

    def are_enough(self) -> bool:
        """Whether no row needs another token, asked after each."""


class _ModelChoice:
    """Takes the argmax, or draws from torch's default generator."""

    def __init__(self, tokens: ChosenTokens, sample_strategy: SampleStrategy):
        self.tokens, self._sample_strategy = tokens, sample_strategy
        self.are_enough = tokens.are_enough

    def choose(self, logits: Tensor) -> Tensor:
        if self._sample_strategy is SampleStrategy.GREEDY:
            token_ids = logits.float().argmax(dim=-1)
        else:
            token_ids = torch.multinomial(logits.float().softmax(dim=-1), 1)[:, 0]
        self.tokens.add(Chosen(token_ids[:, None], logits[:, None]))
        return token_ids


class Inferencer:
    """Runs a `LanguageModel` step by step."""

    def __init__(
        self,
        language_model: LanguageModel,
        chunk_size: int | None = None,  # tokens of each row that a forward takes at most
        stops_early: bool = True,  # once every row is done, if that can be read for nothing
        meet: Callable[[], None] | None = None,  # called before every forward, which waits for those of other ranks
    ):
        self.language_model, self.chunk_size = language_model, chunk_size
        self.stops_early, self.meet = stops_early, meet

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
        token_ids = self._choice(sample_strategy).choose(logits[:, -1])
        return PrefillOutput(token_ids[:, None], logits)

    def feed(self, query_token_ids: Tensor, kv_cache: KVCache) -> Tensor:
        """Logits [B, V] after query tokens [B, Q] int64, in as few chunks of about one length as `chunk_size` takes."""
        num_query = query_token_ids.shape[1]
        num_chunks = 1 if self.chunk_size is None else max(-(-num_query // self.chunk_size), 1)
        for chunk in query_token_ids.tensor_split(num_chunks, dim=1):
            if self.meet is not None:
                self.meet()
            scored = self.language_model.run(chunk, kv_cache, logits_to_keep=1)
        return scored.logits[:, -1]

    def decode(
        self, query_token_ids: Tensor, kv_cache: KVCache, max_new_tokens: int, sample_strategy: SampleStrategy
    ) -> DecodeOutput:
        """Decode up to `max_new_tokens` tokens after a query [B, Q] int64; a row is done after its EOS.

        See `extend` for the end of the loop and the cache.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}; ask for a token")
        choice = self._choice(sample_strategy)
        self.extend(query_token_ids, kv_cache, max_new_tokens, choice)
        token_ids, logits, _ = joined(choice.tokens.chosen)
        return DecodeOutput(token_ids, logits, choice.tokens.lens(token_ids))

    def extend(self, query: Tensor, kv_cache: KVCache, max_new_tokens: int, choice: TokenChoice) -> None:
        """Choose up to N >= 1 tokens after a query [B, Q] int64; `kv_cache` is advanced by all but the last, in place.

        The loop ends early when every row is done, if that can be read without waiting.
        """
        num_query = query.shape[1]
        if num_query <= MAX_EXPECTED_QUERY:
            kv_cache.expect(num_query + max_new_tokens - 1)
        for step in range(max_new_tokens):
            query = choice.choose(self.feed(query, kv_cache))[:, None]
            if step == 0 and num_query > MAX_EXPECTED_QUERY:
                kv_cache.expect(max_new_tokens - 1)
            if self.stops_early and choice.are_enough():
                break

    def _choice(self, sample_strategy: SampleStrategy) -> _ModelChoice:
        """The choice of tokens whose rows end at the model's EOS ids."""
        model, device = self.language_model.model, self.language_model.device
        eos = model.generation_config.eos_token_id
        stop_ids = None if eos is None else torch.tensor(eos, device=device).reshape(-1)
        return _ModelChoice(ChosenTokens(stop_ids, ArangeCache(device, torch.int32)), sample_strategy)


def draft_chunk_size(target: PreTrainedModel, draft: PreTrainedModel, num_query: int) -> int:
    """Tokens of each row per forward of the draft, whose widest activations are then no larger than the target's.

    The target reads `num_query` tokens at once, the draft in its first round also those that follow the prompt.
    """
    if num_query <= MIN_CHUNK_TOKENS:
        return MIN_CHUNK_TOKENS
    draft_bytes = widest_bytes(draft)
    num_tokens = num_query * widest_bytes(target) // draft_bytes if draft_bytes else num_query
    return max(num_tokens + MAX_EXPECTED_QUERY, MIN_CHUNK_TOKENS)


def widest_bytes(model: PreTrainedModel) -> int:
    """Bytes of one token's activations behind the widest layer; 0 where layers do not tell. The head is left out."""
    head = model.get_output_embeddings()
    # torch's name in a linear layer, or transformers' in GPT-2's
    parts = [vars(module) for module in modules_of(model) if module is not head]
    widths = [part.get("out_features") or part.get("nf", 0) for part in parts]
    return max([width for width in widths if isinstance(width, int)], default=0) * dtype_of(model).itemsize
