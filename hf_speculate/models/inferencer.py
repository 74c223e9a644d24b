"""Inferencer: run a language model over a prompt, then token by token."""

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

# Shorter forwards save little memory and read the weights more often.
MIN_CHUNK_TOKENS = 256
# Longer queries count as prompts, and the draft steps after a prompt get a separate mask.
MAX_EXPECTED_QUERY = 16


class Chosen(NamedTuple):
    """The tokens chosen for every row, with their logits."""

    token_ids: Tensor  # [B, N] int64
    token_logits: Tensor | None = None  # [B, N, V]; None if nothing reads them
    logsumexp: Tensor | None = None  # [B, N] float32, over the logits; None if not computed


def joined(chosen: Sequence[Chosen]) -> Chosen:
    """Concatenate consecutive tokens."""
    token_ids, logits, sums = zip(*chosen, strict=True)
    return Chosen(torch.cat(token_ids, dim=1), _concatenated(logits), _concatenated(sums))


def _concatenated(columns: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate columns [B, n, ...] of one kind into [B, N, ...]; None if there are none."""
    present = [column for column in columns if column is not None]
    return torch.cat(present, dim=1) if present else None


class ChosenTokens:
    """The tokens chosen step by step after a query.

    The object also tracks where each row ends.
    """

    def __init__(
        self,
        stop_ids: Tensor | None,  # [E] int64, ids that end a row; None for none
        counts: ArangeCache,  # int32, on the device of the tokens
        num_columns: int = 0,  # number of tokens per row in the memory for `column`
    ):
        self.chosen: list[Chosen] = []
        self._num_columns, self._num_in_place = num_columns, 0
        self._columns: Tensor | None = None  # [N, B] int64, tokens written in place
        self._stop_ids = stop_ids
        self._counts = counts
        # by token, [B] bool: rows that end with it; empty if only ids end rows
        self._are_last: list[Tensor] = []
        self._is_ended: Tensor | None = None  # [B] bool, as of the last call to `are_enough`

    def column(self, num_rows: int) -> Tensor | None:
        """Return memory [B] int64 for each row's next token, see `add`; None if it is full."""
        step = len(self.chosen)
        if step >= self._num_columns:
            return None
        if self._columns is None:
            shape = (self._num_columns, num_rows)
            self._columns = torch.empty(shape, dtype=torch.int64, device=self._counts.device)
        return self._columns[step]

    def add(
        self, chosen: Chosen, are_last: Tensor | None = None, *, is_in_place: bool = False
    ) -> None:
        """Append tokens.

        Args:
            chosen: The tokens to append.
            are_last: [B] bool, rows that end with this single token, regardless of its id.
            is_in_place: Whether the token ids were written to the memory from `column`.
        """
        self.chosen.append(chosen)
        self._num_in_place += is_in_place
        if are_last is not None:
            self._are_last.append(are_last)

    def joined(self) -> Chosen:
        """Concatenate all tokens."""
        if self._columns is None or self._num_in_place < len(self.chosen):
            return joined(self.chosen)
        token_ids = self._columns[: self._num_in_place].T.contiguous()  # a copy if B > 1
        _, logits, sums = zip(*self.chosen, strict=True)
        return Chosen(token_ids, _concatenated(logits), _concatenated(sums))

    def are_enough(self) -> bool:
        """Return whether every row has ended; call it after each token.

        The result is always False on an accelerator, to avoid waiting for the device.
        """
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
        """Return the lengths [B] int32 of rows [B, N], including the first token that ends each."""
        counts = self._counts.span(1, token_ids.shape[1])
        go_on = [~torch.stack(self._are_last, dim=1)] if self._are_last else []  # each [B, N]
        stop_ids = self._stop_ids
        if stop_ids is not None:
            is_single = stop_ids.shape[0] == 1
            go_on.append(
                token_ids != stop_ids if is_single else (token_ids[:, :, None] != stop_ids).all(-1)
            )
        if not go_on:
            return counts[-1:].repeat(token_ids.shape[0])
        return torch.where(reduce(torch.logical_and, go_on), counts[-1], counts).amin(1)


class TokenChoice(Protocol):
    """Protocol for choosing tokens step by step."""

    def choose(self, logits: Tensor) -> Tensor:
        """Choose the next tokens [B] int64 from logits [B, V]."""

    def are_enough(self) -> bool:
        """Return whether every row has ended; called after each token."""


class _ModelChoice:
    """Choice by argmax, or by sampling with torch's default generator."""

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
        # maximum number of tokens per row and forward; None for no limit
        chunk_size: int | None = None,
        # whether to stop once all rows have ended, if this is known without waiting for the device
        stops_early: bool = True,
        # called before every forward to wait for other ranks; None for a single rank
        meet: Callable[[], None] | None = None,
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
        """Read a prompt [B, Q] int64 and choose the next token.

        `kv_cache` advances by Q tokens in place. This method is a public reference. The library
        does not call it; drafters call `feed` instead.
        """
        logits = self.language_model.forward(
            query_token_ids, kv_cache, logits_to_keep=logits_to_keep
        )
        token_ids = self._choice(sample_strategy).choose(logits[:, -1])
        return PrefillOutput(token_ids[:, None], logits)

    def feed(self, query_token_ids: Tensor, kv_cache: KVCache) -> Tensor:
        """Read query tokens [B, Q] int64 and return the logits [B, V] after them.

        The query is split into as few chunks as `chunk_size` allows, all of about equal length.
        """
        num_query = query_token_ids.shape[1]
        num_chunks = 1 if self.chunk_size is None else max(-(-num_query // self.chunk_size), 1)
        for chunk in query_token_ids.tensor_split(num_chunks, dim=1):
            if self.meet is not None:
                self.meet()
            scored = self.language_model.run(chunk, kv_cache, logits_to_keep=1)
        return scored.logits[:, -1]

    def decode(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        max_new_tokens: int,
        sample_strategy: SampleStrategy,
    ) -> DecodeOutput:
        """Decode up to `max_new_tokens` tokens after a query [B, Q] int64.

        A row ends with its EOS token. This method is a public reference. The library does not call
        it; drafters call `extend` instead, which runs the same loop and uses the cache in the same
        way.
        """
        if max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens must be at least 1, got {max_new_tokens}; ask for a token"
            )
        choice = self._choice(sample_strategy)
        self.extend(query_token_ids, kv_cache, max_new_tokens, choice)
        token_ids, logits, _ = joined(choice.tokens.chosen)
        return DecodeOutput(token_ids, logits, choice.tokens.lens(token_ids))

    def extend(
        self, query: Tensor, kv_cache: KVCache, max_new_tokens: int, choice: TokenChoice
    ) -> None:
        """Choose up to `max_new_tokens` >= 1 tokens after a query [B, Q] int64.

        `kv_cache` advances by all but the last token in place. The loop stops early if every row
        has ended and the host knows this without waiting for the device.
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
        """Return a token choice that ends rows at the model's EOS ids."""
        model, device = self.language_model.model, self.language_model.device
        eos = model.generation_config.eos_token_id
        stop_ids = None if eos is None else torch.tensor(eos, device=device).reshape(-1)
        return _ModelChoice(
            ChosenTokens(stop_ids, ArangeCache(device, torch.int32)), sample_strategy
        )


def draft_chunk_size(target: PreTrainedModel, draft: PreTrainedModel, num_query: int) -> int:
    """Return how many prompt tokens per row the draft model reads in one forward.

    With this limit, the draft's widest activations take no more memory than the target's for
    `num_query` tokens. In the first round, the draft also reads the tokens after the prompt.
    """
    if num_query <= MIN_CHUNK_TOKENS:
        return MIN_CHUNK_TOKENS
    draft_bytes = widest_bytes(draft)
    num_tokens = num_query * widest_bytes(target) // draft_bytes if draft_bytes else num_query
    return max(num_tokens + MAX_EXPECTED_QUERY, MIN_CHUNK_TOKENS)


def widest_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token's widest activations, excluding the head; 0 if unknown."""
    head = model.get_output_embeddings()
    # Linear layers call their width out_features in torch and nf in transformers' GPT-2.
    attributes = [vars(module) for module in modules_of(model) if module is not head]
    widths = [by_name.get("out_features") or by_name.get("nf", 0) for by_name in attributes]
    return (
        max([width for width in widths if isinstance(width, int)], default=0)
        * dtype_of(model).itemsize
    )
