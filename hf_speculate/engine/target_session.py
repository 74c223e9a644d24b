"""Target session: run the target model and keep its KV cache in step with the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.draft_session import TargetStates
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.ranks import Ranks
from hf_speculate.engine.verification import RowWiseRule
from hf_speculate.models.context import max_columns
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import upload
from hf_speculate.types import DraftOut, Scored, Trimmed, Verified

_NEVER = 1 << 30  # a column past the end of any query
_MAX_PADDING_QUERY = 64  # maximum padding tokens per row and forward, the limit of folded attention


@dataclass
class EndPadding:
    """Padding after finished rows in the KV cache.

    Plain `generate` feeds a finished row its last token, then padding, until the longest row is
    finished. Here, such a row reads these tokens instead of drafts during the rounds of the other
    rows. Tokens that are still missing after the last round are fed in additional forwards of up to
    `max_query` tokens per row, and the other rows are rolled back.
    """

    pad_token_id: int | None  # None if nothing is fed
    max_query: int  # maximum number of padding tokens per row and forward
    max_columns: int | None  # maximum number of columns in the KV cache; None for no limit
    num_rows: InitVar[int]
    ranks: Ranks

    def __post_init__(self, num_rows: int) -> None:
        # number of tokens of each row that are cached past its last token but one
        self._num_fed = [0] * num_rows
        self._was_finished = [False] * num_rows  # whether the row was finished at the last query
        self._starts: list[int] = []  # [B] first column of padding in the query
        self._device_starts: Tensor  # the same on the query's device

    @classmethod
    def of(cls, plan: Plan) -> "EndPadding":
        """Return the end padding for a planned call."""
        call = plan.call
        max_query = min(
            call.prefill_chunk_size or _MAX_PADDING_QUERY,
            plan.runners.max_query or _MAX_PADDING_QUERY,
        )
        return cls(
            plan.end_padding_id, max_query, max_columns(call.target), call.batch_size, call.ranks
        )

    def is_fed(self, batch: Batch) -> bool:
        """Return whether any row reads padding in the next round."""
        return self.pad_token_id is not None and any(batch.is_finished)

    def fill(self, batch: Batch, query: Tensor) -> Tensor:
        """Replace the drafts of finished rows in a query [B, Q] int64 with padding."""
        if self.pad_token_id is None or not any(batch.is_finished):
            return query
        self._was_finished = batch.is_finished
        rows = zip(batch.is_finished, self._num_fed, strict=True)
        starts = [int(num_fed == 0) if is_finished else _NEVER for is_finished, num_fed in rows]
        if starts != self._starts:
            # [B, 1]
            self._starts, self._device_starts = starts, upload(starts, query.device)[:, None]
        columns = torch.arange(query.shape[1], device=query.device)
        return query.masked_fill(columns >= self._device_starts, self.pad_token_id)

    def num_dropped(self, batch: Batch, num_emitted: Sequence[int], num_query: int) -> list[int]:
        """Return how many tokens [B] of the last query must be dropped from the KV cache.

        Args:
            batch: The rows.
            num_emitted: [B] number of tokens that each row emitted.
            num_query: Q, number of query tokens per row.
        """
        num_kept = list(num_emitted)
        if any(self._was_finished):
            for row, num_lacking in enumerate(self._num_lacking(batch)):
                if self._was_finished[row]:
                    num_kept[row] = min(num_lacking, num_query)
                    self._num_fed[row] += num_kept[row]
        return [num_query - count for count in num_kept]

    def finish(self, model: LanguageModel, kv_cache: KVCache, batch: Batch) -> None:
        """Feed the missing tokens after the last round, and roll back the other rows."""
        max_query = self.max_query
        if self.max_columns is not None:  # the longest row must still fit
            max_query = max(min(max_query, self.max_columns - kv_cache.num_columns), 1)
        num_forwards = self.ranks.max(-(-max(self._num_lacking(batch)) // max_query)) or 0
        if num_forwards and kv_cache.holds_rejected:
            kv_cache.clear_rejected()
        for _ in range(num_forwards):
            num_query = max(min(max(self._num_lacking(batch)), max_query), 1)
            query = batch.tokens.last(1).expand(-1, num_query)  # [B, Q]
            model.run(self.fill(batch, query), kv_cache, logits_to_keep=1)
            kv_cache.crop(self.num_dropped(batch, [0] * batch.num_rows, num_query))

    def _num_lacking(self, batch: Batch) -> list[int]:
        """Return the number of tokens [B] that the KV cache lacks."""
        if self.pad_token_id is None:
            return [0] * batch.num_rows
        longest = max(batch.tokens.lens)
        return [
            longest - length - num_fed
            for length, num_fed in zip(batch.tokens.lens, self._num_fed, strict=True)
        ]


class PromptChunk(NamedTuple):
    """Prompt tokens for one forward."""

    token_ids: Tensor  # [B, N] int64
    num_ahead: int  # number of columns from the start of the chunk to the end of the prompt


@dataclass(frozen=True)
class TargetSession(PerRow):
    """The target model with its KV cache.

    The session scores drafts and rolls the KV cache back to the emitted tokens.
    """

    PARTS = ("kv_cache", "model")

    model: LanguageModel
    kv_cache: KVCache
    query_ids: Tensor  # [B, Q] int64, the prompt tokens that are not cached yet
    chunk_size: int | None  # number of prompt tokens per forward; None for all at once
    # further arguments for every forward, for example `output_hidden_states`
    options: Mapping[str, bool | list[int]]
    padding: EndPadding  # padding that fills the cache after finished rows

    @classmethod
    def of(cls, plan: Plan, states: TargetStates | None) -> "TargetSession":
        """Make the session for a planned call; `states` are the hidden states for the drafter."""
        call, runners, capture = plan.call, plan.runners, None if states is None else states.capture
        compiled = runners.language_model(
            "target", call.target, call.target_inputs, call.max_position, capture
        )
        model = compiled or LanguageModel(
            call.target,
            call.max_position,
            call.is_cache_kept or call.ranks.is_distributed,
            call.target_inputs,
            capture=capture,
            is_watched=bool(call.foreign_code),
        )
        wanted = {
            "output_hidden_states": (states is not None and states.wanted)
            or call.recorded.hidden_states,
            "output_attentions": call.recorded.attentions,
        }
        options = {name: value for name, value in wanted.items() if value}
        kv_cache = plan.target.make_cache(call.batch_size, runners.buffers(plan.target))
        return cls(
            model,
            kv_cache,
            call.prompts.query_ids,
            call.prefill_chunk_size,
            options,
            EndPadding.of(plan),
        )

    @property
    def room(self) -> int | None:
        """Maximum number of drafted tokens per row after the newest token; None for no limit."""
        if self.padding.max_columns is None:
            return None
        return self.padding.max_columns - self.kv_cache.num_columns - 1

    def prompt_chunks(self) -> list[PromptChunk]:
        """Split the prompt into chunks of the call's chunk size."""
        num_query = self.query_ids.shape[1]
        chunks = self.query_ids.split(self.chunk_size or num_query, dim=1)
        return [
            PromptChunk(chunk, num_query - index * chunks[0].shape[1])
            for index, chunk in enumerate(chunks)
        ]

    def read(self, chunk: PromptChunk) -> Scored:
        """Read a chunk of the prompt and return the logits [B, 1, V] after its last token."""
        return self.model.run(chunk.token_ids, self.kv_cache, logits_to_keep=1, **self.options)

    def score(self, batch: Batch, draft: DraftOut, rule: RowWiseRule | None = None) -> Scored:
        """Score the newest token and the drafted tokens of each row; return logits [B, K+1, V].

        With a `rule`, the round is also verified if a single launch can do both.
        """
        if rule is not None and not self.options and not self.padding.is_fed(batch):
            rows = batch.round_rows(batch.num_rounds)
            scored = self.model.run_round(rows, draft, self.kv_cache, rule)
            batch.know(None)
            if scored is not None:
                return scored
        query = self.query(batch, draft)
        return self.model.run(query, self.kv_cache, logits_to_keep=query.shape[1], **self.options)

    def run_aside(self, token_ids: Tensor) -> Tensor:
        """Run tokens [B, Q] int64 after the cached tokens eagerly; return logits [B, Q, V].

        The cache then drops their states, even after an error. Its `can_mark` must be true.
        """
        restore = self.kv_cache.mark()
        try:
            return self.model.run_unpadded(
                token_ids, self.kv_cache, logits_to_keep=token_ids.shape[1]
            ).logits
        finally:
            restore()

    def reads_other_tokens(self, draft: DraftOut) -> bool:
        """Return whether `score` reads tokens that are not in the final text and may cause NaN."""
        return (
            bool(draft.token_ids.shape[1])
            or self.kv_cache.holds_rejected
            or self.model.pads_queries
        )

    def query(self, batch: Batch, draft: DraftOut) -> Tensor:
        """Return the newest token and the drafted tokens of each row, [B, K+1] int64."""
        newest = batch.tokens.last(1)
        if draft.token_ids.shape[1]:  # one line would be too long
            query = torch.cat([newest, draft.token_ids.clamp_min(0)], dim=1)  # [B, K+1]
        else:
            query = newest.contiguous()
        return self.padding.fill(batch, query)

    def commit(
        self, batch: Batch, draft: DraftOut, scored: Scored, verified: Verified, trimmed: Trimmed
    ) -> None:
        """Roll the cache back to the emitted tokens without the newest token."""
        num_query = draft.token_ids.shape[1] + 1
        num_dropped = self.padding.num_dropped(batch, trimmed.num_emitted, num_query)
        self.kv_cache.crop(num_dropped, batch.tokens.row_lens)
        if scored.judged is not None:
            rows = batch.round_rows(batch.num_rounds + 1)
            batch.know(self.model.end_round(verified, rows, self.kv_cache))

    def finish(self, batch: Batch, num_surplus: Sequence[int]) -> None:
        """Drop the `num_surplus` [B] tokens past the end of the output, and pad finished rows."""
        if any(num_surplus):
            self.kv_cache.crop(num_surplus)
        self.padding.finish(self.model, self.kv_cache, batch)
