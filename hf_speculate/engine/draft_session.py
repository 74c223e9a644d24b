"""Draft session: the drafter, its KV cache, and its progress in each row of the batch.

The drafter serves some or all rows of the batch. The remaining rows have no room for drafts: either
they have joined and the drafter has not read their prompts yet, or they have left the drafter.
After a drafter error, no row is left, and the call uses plain decoding.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.view import CacheView
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.no_drafts import NoDrafter
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.plan import Plan
from hf_speculate.models.quirks import token_without_position
from hf_speculate.models.recurrent_layers import reads_prompts_otherwise
from hf_speculate.rows.per_row import PerRow, RowIndices
from hf_speculate.rows.row_lens import RowLens
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.schedule import Choice
from hf_speculate.transfers import upload
from hf_speculate.types import (
    CachedDraft,
    DraftOut,
    Kept,
    NoiseKeys,
    SampleStrategy,
    Scored,
    Trimmed,
)

# imported if a call keeps the KV states of its draft model
_REUSE = "hf_speculate.options.draft_state.reuse"
RunTarget = Callable[[Tensor], Tensor]
_NO_END = 1 << 30  # a column past the end of any row
# Rounds without an accepted token before a row's logits are checked. The check is repeated after
# 16, 32, ... rounds.
_FIRST_LOOK = 8
_MOST_DROPPED = 16  # maximum tokens that a joining row rereads to save other rows a forward


class TargetStates(Protocol):
    """The target's hidden states per row that the drafter has not read yet.

    Most drafters read no hidden states.
    """

    capture: Any  # see `LanguageModel`
    wanted: bool | list[int]  # value of `output_hidden_states` for the target's forward

    @property
    def counts(self) -> list[int]:
        """[B] number of states for each row; empty if there are none."""

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Append the states of a prompt chunk.

        Args:
            output: Output of the target for the chunk.
            num_tokens: [B] number of real tokens in each prompt. States of earlier columns are
                skipped.
            num_ahead: Number of columns from the start of the chunk to the end of the prompt.
        """

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        """Append the states of a round in which each row emitted `counts` [B] tokens."""

    def take(self, device: torch.device, counts: Sequence[int] | None = None) -> Tensor:
        """Remove the first states of each row and return them.

        Args:
            device: Device of the result.
            counts: [B] number of states to remove from each row. None for all.

        Returns:
            [B, N, D], undefined past the count of a row.
        """


class DraftReuse(Protocol):
    """Reuse of the draft cache across calls."""

    def recall(self, batch: Batch) -> int:
        """Fill the empty draft cache from an earlier call and return its number of columns."""

    def note(self, batch: Batch, certain: Sequence[int]) -> None:
        """Record how many of the `certain` [B] columns the draft cache still holds."""

    def remember(self, batch: Batch) -> None:
        """Store the states of the rows' tokens for a later call."""


@dataclass
class DraftRow:
    """A row that the drafter serves."""

    index: int  # index of the row in the batch
    end: int  # column after the last possible drafted token
    num_seen: int = 0  # number of columns that the drafter has read, including its own drafts
    num_looked_up: int = 0  # number of columns read for free proposals
    num_missed: int = 0  # number of rounds since the last accepted token
    is_lost: bool = False  # whether the drafter computes NaN or infinity for this row


class RowProgress(NamedTuple):
    """The drafter's progress in one row, in columns.

    After a round, the drafter lags behind by the same number of tokens in every row. The next query
    has Q tokens per row, and the cache drops their states. For a row with too few tokens, the cache
    keeps more:

    | row                                       | the cache keeps                           |
    |-------------------------------------------|-------------------------------------------|
    | live                                      | all but the last Q tokens                 |
    | finished, with fewer than Q new tokens    | its prompt; later tokens are fed again    |
    | with fewer than Q tokens after its pads   | its padding, partly read as text later    |
    """

    length: int  # number of columns in the row
    num_seen: int  # number of columns that the drafter has read
    prompt_len: int
    is_finished: bool

    def num_kept(self, num_query: int) -> int:
        """Return the number of cached columns to keep before a query, ignoring padding."""
        num_columns = self.length - num_query
        return (
            max(num_columns, min(self.num_seen, self.prompt_len))
            if self.is_finished
            else num_columns
        )

    def num_kept_with_padding(self, num_query: int, num_real: int) -> int:
        """Return the number of cached columns to keep if `num_real` columns are not padding."""
        return max(self.num_kept(num_query), self.num_seen - num_real)


@dataclass
class DraftSession(PerRow):
    """The drafter of a call with its cache.

    The session feeds unseen tokens to the drafter and rolls its KV cache back to the emitted
    tokens. A drafter error ends drafting; see `DraftFaults`. A row past the drafter's context, or
    without finite logits, has no room for drafts. Such a row leaves the drafter if its columns
    limit the other rows; see `Drafter.shares_columns`.
    """

    BY_ROW = ("_rows",)
    PARTS = ("drafter", "kv_cache", "hidden_states", "_seen_lens")

    drafter: Drafter
    faults: DraftFaults
    num_pads: InitVar[Sequence[int]]  # [B] number of padding columns before each row of the batch
    strategy: SampleStrategy
    kv_cache: KVCache | None = None  # the draft model's KV cache; None without one
    hidden_states: TargetStates | None = None
    reuse: DraftReuse | None = None
    rows_may_leave: bool = True  # whether rows may leave the drafter before they leave the batch
    padding_id: int | None = None  # id drafted for finished rows in lock step; None otherwise
    # Drafts end at this id, because the target would read any later tokens at wrong positions.
    token_without_position: int | None = None
    # whether the prompt is read in a separate forward, because other states depend on it
    reads_prompt_alone: bool = False
    reads_late: bool = False  # whether rows may join before the drafter has read their prompts
    # number of tokens per row that the drafter has read in the round
    num_fed: int = field(default=0, init=False)
    is_served: list[bool] = field(init=False)  # [B] rows with room for drafts in the round
    _rows: list[DraftRow] = field(init=False)  # the drafter's rows, in its order
    # length of each row at the drafter's last call
    _seen_lens: RowLens | None = field(default=None, init=False)
    # Sessions of joined rows, whose prompts the drafter reads before its next draft.
    _waiting: list["DraftSession"] = field(default_factory=list, init=False)
    # number of prompt tokens per row and forward; None for all
    _chunk_size: int | None = field(default=None, init=False)
    # Rows and their flags of finite logits, which are being copied to the host.
    _look: tuple[list[DraftRow], Tensor] | None = field(default=None, init=False)

    def __post_init__(self, num_pads: Sequence[int]) -> None:
        self._rows = [
            DraftRow(index, _end(self.drafter, row_pads)) for index, row_pads in enumerate(num_pads)
        ]
        self.is_served = [False] * len(num_pads)

    @classmethod
    def of(
        cls, plan: Plan, drafter: Drafter, states: TargetStates | None, faults: DraftFaults
    ) -> "DraftSession":
        """Make the session for a planned call; `states` are the hidden states for the drafter."""
        call, draft, kv_cache, reuse = plan.call, plan.draft, None, None
        if draft is not None:
            kv_cache = draft.make_cache(call.batch_size, plan.runners.buffers(draft))
            if plan.config.draft_state is not None:
                reuse = importlib.import_module(_REUSE).make_draft_cache_reuse(
                    plan, draft.model, kv_cache
                )
        reads_alone = draft is not None and reads_prompts_otherwise(draft.model)
        # With a constant draft length, a row's sample depends on its rounds with a draft.
        is_adaptive, is_fixed = (
            plan.config.schedule == "adaptive",
            plan.is_lock_step or "draft" in plan.runners.parts,
        )
        return cls(
            drafter,
            faults,
            call.prompts.num_pads,
            plan.draft_strategy,
            kv_cache=kv_cache,
            hidden_states=states,
            reuse=reuse,
            rows_may_leave=not is_fixed and reuse is None and not call.ranks.is_synced,
            padding_id=plan.pad_token_id if plan.is_lock_step else None,
            token_without_position=token_without_position(plan.target.model),
            reads_prompt_alone=reads_alone,
            reads_late=is_adaptive and draft is not None and not (drafter.proposes or reads_alone),
        )

    @property
    def can_join(self) -> bool:
        """Whether rows may join, because only the drafter and its cache have state per row."""
        return self.reuse is None and self.drafter.can_join

    def begin(self, batch: Batch) -> None:
        """Fill the draft cache from an earlier call."""
        with self._catching():
            num_columns = 0 if self.reuse is None else self.reuse.recall(batch)
            num_seen = num_columns or self._skip_padding()
            for row in self._rows:
                row.num_seen, row.num_looked_up = num_seen, batch.prompt_len
            if num_columns:
                self._show_prompts(batch)

    def read_prompt(self, batch: Batch, scored: Scored, num_ahead: int) -> None:
        """Store the target's hidden states for a prompt chunk, for the drafter.

        Args:
            batch: The rows.
            scored: Output of the target for the chunk.
            num_ahead: Number of columns from the start of the chunk to the end of the prompt.
        """
        if not self._is_drafting:
            return
        with self._catching():
            if self.hidden_states is not None:
                # A prompt given as embeddings may have more tokens than ids.
                num_tokens = [
                    batch.prompt_len + min(num_hidden, 1) for num_hidden in batch.num_hidden
                ]
                self.hidden_states.add_prompt(scored, num_tokens, num_ahead)
            # This comes before any row leaves.
            if self.kv_cache is not None and self.drafter.awaits_prompt:
                self._show_prompts(batch)
                self.drafter.read(
                    self._tokens(batch).token_ids[:, : batch.prompt_len], self.kv_cache
                )
                for row in self._rows:
                    row.num_seen = batch.prompt_len

    def num_unread(self, batch: Batch) -> int:
        """Return the number of tokens per row that the drafter reads in its next call."""
        if not self._is_drafting:
            return 0
        num_unread = 0
        if self.drafter.reads_prompt and not self.drafter.is_free:
            num_unread = max(batch.tokens.lens[row.index] - row.num_seen for row in self._rows)
        return (
            num_unread
            + sum(group._num_in_chunk(batch) for group in self._waiting) // batch.num_rows
        )

    @property
    def reads_forced_text(self) -> bool:
        """Whether `look_up` takes the texts forced by logits processors."""
        return self._is_drafting and self.drafter.reads_forced_text

    def look_up(self, batch: Batch, forced_texts: Sequence[str] = ()) -> list[list[float]]:
        """Return the probabilities [B][N] of the drafter's free proposals.

        Args:
            batch: the rows.
            forced_texts: [B] texts that must come next. Empty unless the drafter reads them.
        """
        proposed: list[list[float]] = [[] for _ in range(batch.num_rows)]
        if not self._is_drafting or not self.drafter.proposes or all(batch.is_finished):
            return proposed
        lens = batch.host_tokens.lens
        spans = [(row.num_looked_up, lens[row.index]) for row in self._rows]
        # finished rows are left out
        first = min((start for start, end in spans if start < end), default=0)
        ids, new_ids = batch.host_tokens.token_ids[:, first : max(lens)].tolist(), []
        for row, (start, end) in zip(self._rows, spans, strict=True):
            new_ids.append(
                ids[row.index][max(start - first, 0) : end - first] if start < end else []
            )
            row.num_looked_up = end
        with self._catching():
            self._show_prompts(batch)
            if forced_texts:
                self.drafter.force([forced_texts[row.index] for row in self._rows])
            for row, probabilities in zip(self._rows, self.drafter.look_up(new_ids), strict=True):
                proposed[row.index] = probabilities
        return proposed

    def room(self, batch: Batch) -> list[int]:
        """Return the maximum number of draft tokens [B] in the next round; 0 for unserved rows."""
        room, lens = [0] * batch.num_rows, batch.tokens.lens
        for row in [row for group in (self, *self._waiting) for row in group._rows]:
            is_endless = self.drafter.drafts_past_context
            room[row.index] = _NO_END if is_endless else max(row.end - lens[row.index], 0)
        if self._is_joint:
            room = [self.faults.ranks.min(min(room))] * batch.num_rows
        for row in self._rows:
            room[row.index] *= not row.is_lost
        self.is_served = [max_tokens > 0 for max_tokens in room]
        self._end_full_rows(batch)
        return room

    def propose(
        self,
        batch: Batch,
        choice: Choice,
        keys: NoiseKeys,
        room: Sequence[int],
        target_cache: KVCache,
        run_target: RunTarget | None = None,
    ) -> DraftOut:
        """Draft up to K tokens per row, within `room` [B].

        Args:
            batch: The rows.
            choice: Number of tokens to draft.
            keys: Noise keys of the round.
            room: [B] maximum number of tokens in each row.
            target_cache: The target's KV cache.
            run_target: See `DraftRequest.run_target`.
        """
        num_draft_tokens, self.num_fed = choice.num_draft_tokens, 0
        num_read = self._admit_waiting(batch) // batch.num_rows if choice.num_model_tokens else 0
        has_room = (
            self._is_joint or not num_draft_tokens or self._make_room(batch, num_draft_tokens, room)
        )
        if not num_draft_tokens or not self._rows or not has_room:
            return batch.no_draft()
        if self.faults.is_pending:
            self.faults.meet()
        view, row_indices = self._view(batch), [row.index for row in self._rows]
        is_part = view is not batch
        with self._catching():
            runs_model = choice.num_model_tokens > 0 and self._can_be_even(view)
            runs_model = runs_model and not self.drafter.serves_all(num_draft_tokens)
            if runs_model:
                num_read += self._read_prompt_alone(view) + self._make_even(view)
                own_keys = view.keys() if is_part else keys
                seen = CacheView(target_cache, row_indices if is_part else None)
                if is_part and run_target is not None:
                    run_target = partial(_run_part, run_target, row_indices, batch.num_rows)
                request = self._request(view, num_draft_tokens, own_keys, seen)
                draft = self.drafter.draft(request._replace(run_target=run_target))
                self._seen_lens = self._tokens(view).row_lens.copy()
            else:
                draft = self.drafter.cut_proposal(num_draft_tokens)
                if choice.num_model_tokens:  # the draft model was not called
                    draft = draft._replace(cached=CachedDraft(0, [False] * view.num_rows))
            self.faults.meet()
            has_cache = runs_model and self.kv_cache is not None
            draft = self.faults.ranks.broadcast_draft(draft, num_draft_tokens, has_cache)
            if self.num_fed:
                self._follow(view, draft)
                self.num_fed += num_read
            draft = self._limited(draft, view, [room[index] for index in row_indices])
            return _spread(draft, row_indices, batch.num_rows) if is_part else draft
        if self.faults.is_pending:
            self.faults.meet()
        self.num_fed = 0
        return batch.no_draft()

    def commit(self, batch: Batch, draft: DraftOut, scored: Scored, trimmed: Trimmed) -> None:
        """Roll the draft cache back to the emitted tokens after `Batch.commit`."""
        has_draft = bool(draft.token_ids.shape[1])
        if not self._is_drafting or not (has_draft or self.hidden_states is not None):
            return
        row_indices = [row.index for row in self._rows]
        num_emitted = [trimmed.num_emitted[index] for index in row_indices]
        with self._catching():
            if self.hidden_states is not None:
                self.hidden_states.add(_of_rows(scored, row_indices, batch.num_rows), num_emitted)
            if has_draft and self.num_fed:
                view, ends = self._view(batch), []
                for row, length, num_new in zip(
                    self._rows, view.tokens.lens, num_emitted, strict=True
                ):
                    is_own = draft.cached is None or draft.cached.is_own[row.index]
                    ends.append(min(row.num_seen, length if is_own else length - num_new))
                self._crop(view, ends)
                if self.reuse is not None:
                    self.reuse.note(view, ends)
        if has_draft:
            self._look_at_numbers(num_emitted)

    def end(self, batch: Batch) -> None:
        """Store states for a later call."""
        if self.reuse is not None and self._is_drafting:
            with self._catching():
                self.reuse.remember(batch)
        self.faults.meet()

    def rows(self, indices: Sequence[int]) -> None:
        """Select the batch rows `indices`, in this order."""
        self.is_served = [self.is_served[row] for row in indices]
        for group in self._waiting:
            group._keep_of(indices)
        self._waiting = [group for group in self._waiting if group._rows]
        self._keep_of(indices)

    def read_ahead(self, batch: Batch, max_tokens: int | None = None) -> bool:
        """Read prompts with the drafter before their rows join, unless the drafter reads late.

        Args:
            batch: The rows.
            max_tokens: Number of tokens to read per prompt. None for all.

        Returns:
            Whether the method must be called again.
        """
        self._chunk_size, is_unread = max_tokens, False
        if self._is_drafting:
            with self._catching():
                self._show_prompts(batch)
                is_unread = not self.reads_late and self._read_chunk(self._view(batch))
        return is_unread

    def admit(self, other: "DraftSession", batch: Batch) -> None:
        """Append the rows of `other` after `read_ahead`; all rows in the batch must be live."""
        self.is_served = self.is_served + other.is_served
        other.faults.stats = self.faults.stats
        for row in other._rows:
            row.index += batch.num_rows
        if not self._rows:
            self._become(other)
        elif other._rows and other.reads_late:
            self._waiting.append(other)
        elif other._rows:
            with self._catching():
                self._catch_up_and_join(other, self._view(batch))

    @property
    def _is_drafting(self) -> bool:
        """Whether the drafter has rows and no error waits for other ranks."""
        return bool(self._rows) and not self.faults.is_pending

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """End drafting after a drafter error in the block; every drafter error is caught here."""
        with self.faults:
            yield
            return
        if not self.faults.is_pending:  # a pending error is raised in all processes later
            self._close()

    def _close(self) -> None:
        """Release the drafter and its cache; all later rounds are plain steps."""
        for session in (self, *self._waiting):
            if session.kv_cache is not None:
                session.kv_cache.release()
        self.drafter, self.kv_cache, self.hidden_states, self.reuse = NoDrafter(), None, None, None
        self._rows, self._seen_lens, self._waiting = [], None, []
        self.is_served = [False] * len(self.is_served)

    def _become(self, other: "DraftSession", *waiting: "DraftSession") -> None:
        """Replace this session, which has no rows left, with `other`, followed by `waiting`."""
        vars(self).update({**vars(other), "is_served": self.is_served, "_waiting": list(waiting)})

    def _keep_of(self, indices: Sequence[int]) -> None:
        """Select the drafter's rows that are among the batch rows `indices`, and renumber them."""
        numbers = {row.index: number for number, row in enumerate(self._rows)}
        pairs = [(index, numbers[old]) for index, old in enumerate(indices) if old in numbers]
        rows = [self._rows[number] for _, number in pairs]
        self._keep([number for _, number in pairs])
        for row, (index, _) in zip(rows, pairs, strict=True):
            row.index = index

    def _keep(self, numbers: Sequence[int]) -> None:
        """Select some of the drafter's rows; if none is left, use waiting rows or close."""
        if not numbers:
            waiting, self._waiting = self._waiting, []
            self._close()
            if waiting:
                self._become(*waiting)
        elif self.faults.is_pending:
            self._rows = [self._rows[number] for number in numbers]
        else:
            with self._catching():
                super().rows(numbers)
                num_skipped = self._skip_padding()
                for row in self._rows:
                    row.num_seen += num_skipped

    def _view(self, batch: Batch) -> Batch:
        """Return the batch of the drafter's rows, in its order; the batch itself if it has all."""
        row_indices = [row.index for row in self._rows]
        return batch if row_indices == list(range(batch.num_rows)) else batch.selected(row_indices)

    @property
    def _is_joint(self) -> bool:
        """Whether the row with the least room limits the drafts of all rows."""
        return not self.rows_may_leave and (
            self.drafter.shares_columns or self.drafter.counts_padding
        )

    def _make_room(self, batch: Batch, num_draft_tokens: int, room: Sequence[int]) -> bool:
        """Drop full rows from the drafter if columns are shared; return whether a row stays.

        If no row stays, waiting rows may take over. They have room from the next round on.
        """
        if not self.drafter.shares_columns:
            return True
        live = [
            (number, row)
            for number, row in enumerate(self._rows)
            if not batch.is_finished[row.index]
        ]
        numbers = [number for number, row in live if room[row.index] >= num_draft_tokens]
        if len(numbers) < len(live):
            self._report_context()
        if len(numbers) < len(self._rows):
            self._keep(numbers)
            row_indices = {row.index for row in self._rows}
            self.is_served = [
                bool(numbers) and index in row_indices for index in range(batch.num_rows)
            ]
        return bool(numbers)

    def _end_full_rows(self, batch: Batch) -> None:
        """Report rows past the context, and close the drafter if it can serve no live row."""
        lens, num_left = batch.tokens.lens, batch.num_left
        live = {
            index
            for index, is_finished in enumerate(batch.is_finished)
            if not is_finished and num_left[index] > 1
        }
        present = [row for row in self._rows if row.index in live and not row.is_lost]
        if any(row.end <= lens[row.index] or not self.is_served[row.index] for row in present):
            self._report_context()
        # Other ranks and a later call with the same draft state still need the drafter.
        is_needed = self.faults.ranks.is_synced or self.reuse is not None
        if (
            self._rows
            and live
            and not any(self.is_served[index] for index in live)
            and not is_needed
        ):
            self._close()

    def _report_context(self) -> None:
        fallback = "plain decoding of rows"
        if self.drafter.drafts_past_context:
            fallback = "prompt lookup alone for rows"
        elif self._is_joint:
            fallback = "plain decoding of all rows, for one is"
        self.faults.report(
            f"{fallback} past the context of {self.faults.name}, {self.drafter.context_len} tokens"
        )

    def _look_at_numbers(self, num_emitted: Sequence[int]) -> None:
        """End drafting for rows whose drafter logits are NaN or infinite.

        The host reads the result of the check one round later. The verification in between already
        synchronizes with the device after the copy, so reading needs no extra synchronization.
        """
        if self._look is not None:
            rows, are_numbers = self._look
            lost = [
                row
                for row, is_number in zip(rows, are_numbers.tolist(), strict=False)
                if not is_number
            ]
            self._look = None
            for row in lost:
                row.is_lost = row.num_missed >= _FIRST_LOOK
                if row.is_lost:
                    self.faults.report(
                        f"plain decoding of rows in which {self.faults.name} computes NaN or "
                        "infinity"
                    )
        is_due, has_numbers, ranks = False, None, self.faults.ranks
        for row, num_new in zip(self._rows, num_emitted, strict=False):
            row.num_missed = row.num_missed + 1 if num_new == 1 else 0
            is_due |= (
                row.num_missed >= _FIRST_LOOK
                and row.num_missed.bit_count() == 1
                and not row.is_lost
            )
        if not is_due:
            return
        if not self.faults.is_pending:
            with self._catching():
                has_numbers = self.drafter.has_numbers()
        if ranks.is_group and not ranks.is_synced:
            # otherwise, the broadcast would wait for a rank that has an error
            self.faults.meet(is_last=False)
        if has_numbers is not None:
            self._look = list(self._rows), ranks.broadcast(has_numbers).to("cpu", non_blocking=True)

    def _admit_waiting(self, batch: Batch) -> int:
        """Read the prompts of joined rows with the drafter; return the total number of tokens."""
        num_read = 0
        while self._waiting:
            group, is_read = self._waiting[0], False
            num_read += group._num_in_chunk(batch)
            with self._catching():
                is_read = not group._read_chunk(batch.selected([row.index for row in group._rows]))
                if is_read:
                    self._catch_up_and_join(group, self._view(batch))
            if not is_read or not self._rows:  # the next chunk is read in the next round
                break
            self._waiting.pop(0)
        for row in [row for group in self._waiting for row in group._rows]:
            self.is_served[row.index] = False
        return num_read

    def _num_in_chunk(self, batch: Batch) -> int:
        """Return the total number of tokens that the next `_read_chunk` reads."""
        num_left = self.num_unread(batch)
        return len(self._rows) * min(num_left, self._chunk_size or num_left)

    def _read_chunk(self, view: Batch) -> bool:
        """Read a chunk of the prompts with the drafter; return whether any tokens are left."""
        if self.hidden_states is None:
            return self._catch_up(view, self._chunk_size)
        self._catch_up(view)
        num_states = self.hidden_states.counts
        # the newest token is left out
        counts = [min(count - 1, self._chunk_size or count) for count in num_states]
        kept = self._kept(view, counts) if any(counts) else None
        if kept is not None:
            self.drafter.read_kept(kept)
        return max(num_states) > 1

    def _catch_up(self, view: Batch, max_tokens: int | None = None) -> bool:
        """Read tokens until the drafter lags behind by its shortest query in every row.

        Args:
            view: The drafter's rows.
            max_tokens: Maximum number of tokens per row. None for all.

        Returns:
            Whether any tokens are left.
        """
        num_unseen = self._num_unseen(view)
        num_wanted = num_read = max(num_unseen - self.drafter.min_query_len, 0)
        if self.kv_cache is not None and num_wanted:
            num_read = min(num_wanted, max_tokens or num_wanted)
            self.drafter.read(self._tokens(view).last(num_unseen)[:, :num_read], self.kv_cache)
        for row, length in zip(self._rows, view.tokens.lens, strict=True):
            row.num_seen = length - num_unseen + num_read
        return num_read < num_wanted

    def _catch_up_and_join(self, other: "DraftSession", view: Batch) -> None:
        """Append the rows of `other` after its read-ahead; all rows here must be live."""
        num_dropped = self._num_unseen(view) - self.drafter.min_query_len
        max_dropped = min(_MOST_DROPPED, *(row.num_seen for row in other._rows))
        # the new rows reread some tokens
        if other.kv_cache is not None and 0 <= num_dropped < max_dropped:
            other.kv_cache.crop(num_dropped)
            for row in other._rows:
                row.num_seen -= num_dropped
        else:
            self._catch_up(view)
        self.join(other)

    def _show_prompts(self, batch: Batch) -> None:
        """Pass the prompts to the drafter, without reading them yet."""
        if self._seen_lens is None:
            view = self._view(batch)
            tokens = self._tokens(view)
            self.drafter.begin(tokens.token_ids[:, : view.prompt_len])
            self._seen_lens = RowLens([view.prompt_len] * view.num_rows, tokens.row_lens.aranges)

    def _read_prompt_alone(self, view: Batch) -> int:
        """Read the prompt in a separate forward if it would change the states of other tokens.

        Returns:
            The number of tokens read per row.
        """
        cache = self.kv_cache
        if not self.reads_prompt_alone or cache is None or cache.num_columns:
            return 0
        num_seen = self._rows[0].num_seen
        self.drafter.read(self._tokens(view).token_ids[:, num_seen : view.prompt_len], cache)
        for row in self._rows:
            row.num_seen = view.prompt_len
        return view.prompt_len - num_seen

    def _request(
        self, view: Batch, num_draft_tokens: int, keys: NoiseKeys, target_cache: CacheView
    ) -> DraftRequest:
        """Make the request for a draft, with the tokens that the drafter has not seen."""
        self.num_fed = self._num_unseen(view)
        return DraftRequest(
            query_token_ids=self._tokens(view).last(self.num_fed),
            kv_cache=self.kv_cache,
            num_draft_tokens=num_draft_tokens,
            sample_strategy=self.strategy,
            keys=keys,
            kept=self._kept(view) if self.drafter.reads_kept else None,
            target_cache=target_cache,
        )

    def _follow(self, view: Batch, draft: DraftOut) -> None:
        """Update the number of seen columns after a draft."""
        num_ahead = draft.token_ids.shape[1] - 1 if self.kv_cache is not None else 0
        if draft.cached is not None:
            num_ahead = draft.cached.num_ahead
        for row, length in zip(self._rows, view.tokens.lens, strict=True):
            # A finished row may have had fewer unseen tokens than were fed.
            row.num_seen = max(length - self.num_fed, row.num_seen) + self.num_fed + num_ahead

    def _limited(self, draft: DraftOut, view: Batch, room: Sequence[int]) -> DraftOut:
        """Limit a draft to each row's room and to the tokens before one without a position."""
        draft = _within_room(draft, view, room)
        if self.token_without_position is not None:
            newest = view.tokens.last(1).to(draft.token_ids.device)
            # [B, K+1]
            has_no_position = (
                torch.cat([newest, draft.token_ids], dim=1) == self.token_without_position
            )
            max_lens = (has_no_position.cumsum(1)[:, :-1] == 0).sum(1).to(draft.lens)  # [B]
            draft = draft._replace(lens=torch.minimum(draft.lens, max_lens))
        if self.padding_id is not None and any(view.is_finished):
            finished = upload(view.is_finished, draft.token_ids.device, torch.bool)[:, None]
            draft = draft._replace(token_ids=draft.token_ids.masked_fill(finished, self.padding_id))
        return draft

    def _uneven_lags(self, view: Batch) -> list[int]:
        """Return the numbers of unseen tokens [B] if rows differ; otherwise, an empty list."""
        if self.kv_cache is None or not self.drafter.proposes:
            return []
        lags = [
            length - row.num_seen for row, length in zip(self._rows, view.tokens.lens, strict=True)
        ]
        return lags if len(set(lags)) > 1 else []

    def _can_be_even(self, view: Batch) -> bool:
        """Return whether every row is long enough for the query of the slowest row.

        All rows are fed the same number of tokens.
        """
        lags = self._uneven_lags(view)
        if not lags:
            return True
        num_query = max(lags) - max(min(lags) - self.drafter.min_query_len, 0)
        rows = zip(view.tokens.lens, view.num_hidden, strict=True)
        return num_query < min(length + min(num_hidden, 0) for length, num_hidden in rows)

    def _make_even(self, view: Batch) -> int:
        """Make the drafter lag behind equally in every row.

        Return the number of tokens read per row. All rows read as many tokens as the most advanced
        row lacks. Rows that are ahead of others then drop states, and their tokens are fed again.
        """
        cache, lags = self.kv_cache, self._uneven_lags(view)
        if cache is None or not lags:
            return 0
        num_read = max(min(lags) - self.drafter.min_query_len, 0)
        if num_read:
            tokens = self._tokens(view)
            columns = RowLens(
                [row.num_seen for row in self._rows], tokens.row_lens.aranges
            ).columns(num_read)
            columns = columns.expand(view.num_rows, -1)  # [B, N]
            self.drafter.read(tokens.token_ids.gather(1, columns), cache)
            for row in self._rows:
                row.num_seen += num_read
        self._crop(view, [row.num_seen for row in self._rows])
        return num_read

    def _crop(self, view: Batch, num_valid: list[int]) -> None:
        """Roll the drafter back to the same lag in every row.

        Args:
            view: The drafter's rows.
            num_valid: [B] number of emitted tokens that the drafter has seen.
        """
        values = zip(view.tokens.lens, self._rows, view.prompt_lens, view.is_finished, strict=True)
        rows = [
            RowProgress(length, row.num_seen, prompt_len, ended)
            for length, row, prompt_len, ended in values
        ]
        lag = max(row.length - num_seen for row, num_seen in zip(rows, num_valid, strict=True))
        num_query = max(lag, self.drafter.min_query_len)
        keep = [row.num_kept(num_query) for row in rows]
        if self.kv_cache is not None:
            if any(num_kept < row.prompt_len for num_kept, row in zip(keep, rows, strict=True)):
                counts = self.kv_cache.num_real_tokens
                keep = [
                    row.num_kept_with_padding(num_query, count)
                    for row, count in zip(rows, counts, strict=True)
                ]
            drops = [row.num_seen - num_kept for row, num_kept in zip(rows, keep, strict=True)]
            self.kv_cache.crop(drops, view.tokens.row_lens)
        for drafted_row, num_kept in zip(self._rows, keep, strict=True):
            drafted_row.num_seen = num_kept

    def _skip_padding(self) -> int:
        """Skip common padding if it takes room from tokens; return its number of columns."""
        cache = self.kv_cache
        if cache is None or cache.num_columns or not self.drafter.shares_columns:
            return 0
        return cache.skip_padding()

    def _num_unseen(self, view: Batch) -> int:
        """Return the number of unseen tokens at the end of live rows, equal for all rows."""
        # If no row is live, forwards run for other ranks, and all rows are fed their unseen tokens.
        no_live = all(view.is_finished)
        rows = zip(self._rows, view.tokens.lens, view.is_finished, strict=True)
        num_unseen = max(
            length - row.num_seen for row, length, is_finished in rows if no_live or not is_finished
        )
        return max(num_unseen, 1)  # a finished row without a draft has no new token

    def _tokens(self, view: Batch) -> TokenBuffer:
        """Return the tokens of the rows on the host or device, wherever the drafter reads them."""
        return view.host_tokens if self.drafter.reads_host_tokens else view.tokens

    def _kept(self, view: Batch, counts: Sequence[int] | None = None) -> Kept | None:
        """Return the tokens emitted since the drafter's last call, with their hidden states.

        Args:
            view: The drafter's rows.
            counts: [B] number of tokens per row if there are hidden states. None for all tokens.

        Returns:
            The feedback; None if the drafter takes none.
        """
        tokens, seen, states = self._tokens(view), self._seen_lens, None
        lens = tokens.row_lens
        if self.hidden_states is not None:
            seen_lens = [
                length - count
                for length, count in zip(tokens.lens, self.hidden_states.counts, strict=True)
            ]
            if seen is None or seen.on_host != seen_lens:
                seen = RowLens(seen_lens, lens.aranges)
            states = self.hidden_states.take(tokens.token_ids.device, counts)
        if seen is None:
            return None
        if counts is None:
            counts = [
                length - seen_len
                for length, seen_len in zip(tokens.lens, seen.on_host, strict=True)
            ]
        columns = seen.columns(max(counts)).expand(len(counts), -1)  # [B, N]
        ids = tokens.token_ids.gather(1, columns.clamp_max(tokens.token_ids.shape[1] - 1))  # [B, N]
        num_emitted = torch.tensor(counts, dtype=torch.int32, device="cpu")
        if min(counts) < max(counts):
            ids = ids.masked_fill(columns >= lens.on_device()[:, None], -1)
        return Kept(ids, num_emitted, states)


def _end(drafter: Drafter, num_pads: int) -> int:
    """Return the column after the last token that a row can draft within the drafter's context."""
    if drafter.context_len is None:
        return _NO_END
    return drafter.context_len + 1 + (0 if drafter.counts_padding else num_pads)


def _within_room(draft: DraftOut, view: Batch, room: Sequence[int]) -> DraftOut:
    """Limit drafts to each row's room and limit, so that no row depends on other rows."""
    limits = [
        min(limit, max_tokens) for limit, max_tokens in zip(view.draft_limits, room, strict=True)
    ]
    max_lens = [
        max(min(left - 1, limit), 0) for left, limit in zip(view.num_left, limits, strict=True)
    ]
    lens, draft_len = draft.lens, draft.token_ids.shape[1]
    if min(max_lens) >= draft_len:
        return draft
    row_lens = view.tokens.row_lens
    is_equal = min(limits) >= draft_len and len(set(view.max_lengths)) == 1
    if is_equal and row_lens.aranges.device == lens.device:  # nothing is uploaded
        on_device = (view.max_lengths[0] - 1 - row_lens.on_device()).clamp_min_(0)  # [B]
    else:
        on_device = upload(max_lens, lens.device)
    return draft._replace(lens=torch.minimum(lens, on_device.to(lens.dtype)))


def _of_rows(scored: Scored, row_indices: Sequence[int], num_rows: int) -> Scored:
    """Select the hidden states of some rows, the only target outputs that a drafter reads."""
    if list(row_indices) == list(range(num_rows)):
        return scored
    select = RowIndices(row_indices).select
    hidden_states, captured = tree_map_only(Tensor, select, (scored.hidden_states, scored.captured))
    return scored._replace(hidden_states=hidden_states, captured=captured)


def _run_part(
    run_target: RunTarget, row_indices: Sequence[int], num_rows: int, token_ids: Tensor
) -> Tensor:
    """Run the tokens [N, Q] int64 of some rows and return the logits [N, Q, V].

    All other rows read token 0.
    """
    rows = RowIndices(row_indices)
    all_ids = token_ids.new_zeros(num_rows, token_ids.shape[1])
    all_ids.index_copy_(0, rows.on(token_ids.device), token_ids)
    return rows.select(run_target(all_ids))


def _spread(draft: DraftOut, row_indices: Sequence[int], num_rows: int) -> DraftOut:
    """Expand a draft for some rows to all `num_rows` rows; the other rows get no tokens."""
    index = upload(row_indices, draft.token_ids.device)
    fields: dict[str, Any] = {
        name: value for name, value in draft._asdict().items() if isinstance(value, Tensor)
    }
    for name, value in fields.items():
        fields[name] = value.new_zeros(num_rows, *value.shape[1:]).index_copy_(0, index, value)
    if draft.cached is not None:
        is_own = dict(zip(row_indices, draft.cached.is_own, strict=True))
        fields["cached"] = draft.cached._replace(
            is_own=[is_own.get(row, False) for row in range(num_rows)]
        )
    return draft._replace(**fields)
