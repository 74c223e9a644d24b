"""The inferencer: runs a language model over a prompt, and token by token, as a token choice asks for."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.errors import ConfigError
from hf_speculate.models.language_model import LanguageModel, dtype_of
from hf_speculate.models.module_walk import modules_of
from hf_speculate.rows.row_lens import ArangeCache
from hf_speculate.types import DecodeOutput, PrefillOutput, SampleStrategy

# Shorter forwards save little memory, and read the weights more often.
MIN_CHUNK_TOKENS = 256
# Longer queries count as prompts: draft steps after them get a mask of their own.
MAX_EXPECTED_QUERY = 16


class Chosen(NamedTuple):
    """Tokens of every row, and what they were chosen from."""

    token_ids: Tensor  # [B, N] int64
    token_logits: Tensor | None = None  # [B, N, V]; None if nobody reads them
    logsumexp: Tensor | None = None  # [B, N] float32 of the logits, if the step has computed it


def joined(chosen: Sequence[Chosen]) -> Chosen:
    """Tokens that follow one another."""
    token_ids, logits, sums = zip(*chosen, strict=True)
    return Chosen(torch.cat(token_ids, dim=1), _concatenated(logits), _concatenated(sums))


def _concatenated(columns: Sequence[Tensor | None]) -> Tensor | None:
    """[B, N, ...] from columns [B, n, ...] of one kind; None if there are none."""
    parts = [column for column in columns if column is not None]
    return torch.cat(parts, dim=1) if parts else None


class ChosenTokens:
    """The tokens that are chosen one by one after a query, and where rows end among them."""

    def __init__(
        self,
        stop_ids: Tensor | None,  # [E] int64, ids after which a row needs no further token; None for none
        counts: ArangeCache,  # int32, on the device of the tokens
        num_columns: int = 0,  # tokens of each row that `column` has memory for
    ):
        self.chosen: list[Chosen] = []
        self._num_columns, self._num_in_place = num_columns, 0
        self._columns: Tensor | None = None  # [N, B] int64, the tokens in place
        self._stop_ids = stop_ids
        self._counts = counts
        self._are_last: list[Tensor] = []  # by token, [B] bool: rows that need no other; empty if only ids end rows
        self._is_ended: Tensor | None = None  # [B] bool, of the tokens that `are_enough` has looked at

    def column(self, num_rows: int) -> Tensor | None:
        """[B] int64, memory for the next token of each row, see `add`; None if there is no more."""
        step = len(self.chosen)
        if step >= self._num_columns:
            return None
        if self._columns is None:
            shape = (self._num_columns, num_rows)
            self._columns = torch.empty(shape, dtype=torch.int64, device=self._counts.device)
        return self._columns[step]

    def add(self, chosen: Chosen, are_last: Tensor | None = None, *, is_in_place: bool = False) -> None:
        """Add tokens.

        Args:
            chosen: tokens of every row.
            are_last: [B] bool, rows that need none after a single token, whatever its id; None for no other rows.
            is_in_place: whether the token ids are in `column`.
        """
        self.chosen.append(chosen)
        self._num_in_place += is_in_place
        if are_last is not None:
            self._are_last.append(are_last)

    def joined(self) -> Chosen:
        """Return all tokens."""
        if self._columns is None or self._num_in_place < len(self.chosen):
            return joined(self.chosen)
        token_ids = self._columns[: self._num_in_place].T.contiguous()  # a copy if B > 1
        _, logits, sums = zip(*self.chosen, strict=True)
        return Chosen(token_ids, _concatenated(logits), _concatenated(sums))

    def are_enough(self) -> bool:
        """Whether no row needs another token, asked after each; False where the answer would have to be waited for."""
        newest = self.chosen[-1].token_ids  # [B, 1]
        if newest.device.type != "cpu":
            return False
        ends = self._are_last[-1:]
        if self._stop_ids is not None:
            ends.append((newest == self._stop_ids).any(1))
        if not ends:
            return False
        if self._is_ended is not None:
            ends.append(self._is_ended)
        self._is_ended = reduce(torch.logical_or, ends)
        return bool(self._is_ended.all())

    def lens(self, token_ids: Tensor) -> Tensor:
        """[B] int32: the tokens of each row of [B, N], all that were chosen, up to the first that ends it."""
        counts = self._counts.span(1, token_ids.shape[1])
        go_on = [~torch.stack(self._are_last, dim=1)] if self._are_last else []  # each [B, N]
        stop_ids = self._stop_ids
        if stop_ids is not None:
            is_single = stop_ids.shape[0] == 1
            go_on.append(token_ids != stop_ids if is_single else (token_ids[:, :, None] != stop_ids).all(-1))
        if not go_on:
            return counts[-1:].repeat(token_ids.shape[0])
        return torch.where(reduce(torch.logical_and, go_on), counts[-1], counts).amin(1)


class TokenChoice(Protocol):
    """Chooses the tokens after a query one by one, from the logits of each step."""

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token [B] int64, from logits [B, V]."""

    def are_enough(self) -> bool:
        """Return whether no row needs another token, asked after each."""


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
        """Public reference, not called by the library: feed a prompt [B, Q] int64 and choose the token after it.

        `kv_cache` is advanced by Q tokens, in place. Drafters call `feed`.
        """
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
        """Public reference, not called by the library: decode up to `max_new_tokens` tokens after a query [B, Q] int64.

        A row is done after its EOS. See `extend`, which drafters call, for the end of the loop and the cache.
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
        """Return the choice of tokens whose rows end at the model's EOS ids."""
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
