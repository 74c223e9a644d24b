"""Draft guard: the decoder's way to a draft session, whose end leaves the text to plain decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.view import CacheView
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.draft_session import DraftSession
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.engine.target_states import TargetStates
from hf_speculate.per_row import RowIndices
from hf_speculate.schedule import Choice
from hf_speculate.stats import SpeculationStats
from hf_speculate.transfers import upload
from hf_speculate.types import DraftOut, NoiseKeys, Scored, Trimmed

T = TypeVar("T")
_NO_END = 1 << 30  # a column that no row reaches
_FIRST_LOOK = 8  # rounds without an accepted token after which a row's logits are looked at; again after 16, 32, ...


@dataclass
class _Row:
    """A row that the session serves."""

    index: int  # row of the batch
    end: int  # the column behind the last token that may be drafted
    num_missed: int = 0  # rounds without an accepted token since the last one with some
    is_lost: bool = False  # whether the drafter computes NaN or infinity for it


class _Waiting(NamedTuple):
    """Rows that have joined the batch, and whose prompts the drafter reads when it drafts next."""

    session: DraftSession
    rows: list[_Row]
    chunk_size: int | None  # prompt tokens of each row that are read in a round; None for all

    def num_unread(self, batch: Batch) -> int:
        """Return the tokens of each row that the drafter has yet to read."""
        return self.session.num_unread([batch.tokens.lens[row.index] for row in self.rows])


class DraftGuard:
    """Calls a draft session for the rows that it serves; the other rows of the batch get no drafts.

    After an error, no row is served any more, see `DraftFaults`. A row past the drafter's context, or with logits that
    are not finite, stays in the session without drafts. It leaves the session if its columns would count for the other
    rows, see `Drafter.shares_columns`.
    """

    def __init__(
        self,
        session: DraftSession,
        faults: DraftFaults,
        num_pads: Sequence[int],  # [B] columns of padding before each row of the batch
        rows_may_leave: bool = True,  # whether the session can do without a row before the batch does
        ranks: Ranks = ONE_PROCESS,
    ):
        self._session: DraftSession | None = session
        self._faults, self._ranks, self._rows_may_leave = faults, ranks, rows_may_leave
        self._served = [_Row(index, _end(session.drafter, num)) for index, num in enumerate(num_pads)]
        self._look: tuple[list[_Row], Tensor] | None = None  # rows, and whether their logits are numbers, on its way
        self._waiting: list[_Waiting] = []
        self._chunk_size: int | None = None  # prompt tokens of each row that are read in a round; None for all
        self._own: DraftOut | None = None  # the session's draft of the round, if it serves a part of the batch
        self.num_fed = 0  # tokens of each row that the drafter read in the round
        self.is_served = [False] * len(num_pads)  # [B] rows that had room for drafts in the round

    @classmethod
    def of(cls, plan: Plan, drafter: Drafter, states: TargetStates | None, faults: DraftFaults) -> "DraftGuard":
        """The guard of a planned call's session, see `DraftSession.of`."""
        session = DraftSession.of(plan, drafter, states)
        call, is_fixed = plan.call, plan.is_lock_step or "draft" in plan.runners.parts
        rows_may_leave = not is_fixed and session.reuse is None and not call.ranks.is_synced
        return cls(session, faults, call.prompts.num_pads, rows_may_leave, call.ranks)

    @property
    def kv_cache(self) -> KVCache | None:
        """The draft model's."""
        return None if self._session is None else self._session.kv_cache

    @property
    def can_join(self) -> bool:
        """Whether rows may join; see `DraftSession.can_join`."""
        return self._session is None or self._session.can_join

    def report_to(self, stats: SpeculationStats) -> None:
        """Record fallbacks in other statistics from now on."""
        self._faults.stats = stats

    def begin(self, batch: Batch) -> None:
        self._call(lambda session: session.begin(batch))

    def num_unread(self, batch: Batch) -> int:
        """Return the tokens of each row that the drafter reads in its next call."""
        if self._session is None:
            return 0
        lens = batch.tokens.lens
        own_lens = [lens[row.index] for row in self._served]
        num_unread = self._call(lambda session: session.num_unread(own_lens)) or 0
        num_waiting = 0
        for group in self._waiting:
            num_left = group.num_unread(batch)
            num_waiting += len(group.rows) * min(num_left, group.chunk_size or num_left)
        return num_unread + num_waiting // batch.num_rows

    def read_prompt(self, batch: Batch, scored: Scored, num_ahead: int) -> None:
        self._call(lambda session: session.read_prompt(batch, scored, num_ahead))

    def read_ahead(self, batch: Batch, max_tokens: int | None) -> bool:
        """Prepare the rows to join others; see `DraftSession.read_ahead`."""
        if self._session is not None and self._session.reads_late:
            self._chunk_size = max_tokens
            self._call(lambda session: session.show_prompts(self._view(batch)))
            return False
        return bool(self._call(lambda session: session.read_ahead(self._view(batch), max_tokens)))

    def look_up(self, batch: Batch) -> list[list[float]]:
        """Return [B][N] probabilities of the tokens that the drafter proposes at no cost."""
        proposed: list[list[float]] = [[] for _ in range(batch.num_rows)]
        if self._session is None or not self._session.drafter.proposes or all(batch.is_finished):
            return proposed
        view = self._view(batch)
        found = self._call(lambda session: session.look_up(view))
        for row, probabilities in zip(self._served, found or (), strict=False):
            proposed[row.index] = probabilities
        return proposed

    def room(self, batch: Batch) -> list[int]:
        """[B] tokens that may be drafted in each row in the next round."""
        room, lens = [0] * batch.num_rows, batch.tokens.lens
        has_end = self._session is not None and not self._session.drafter.drafts_past_context
        waiting = [row for group in self._waiting for row in group.rows]
        for row in [*self._served, *waiting]:
            room[row.index] = max(row.end - lens[row.index], 0) if has_end else _NO_END
        if self._is_joint:
            room = [self._ranks.min(min(room))] * batch.num_rows
        for row in self._served:
            room[row.index] *= not row.is_lost
        self.is_served = [num > 0 for num in room]
        self._end_full_rows(batch)
        return room

    def propose(
        self,
        batch: Batch,
        choice: Choice,
        keys: NoiseKeys,
        room: Sequence[int],
        target_cache: KVCache,
    ) -> DraftOut:
        """Draft what was chosen, and no more than `room` [B] tokens of each row."""
        self.num_fed, self._own = 0, None
        num_draft_tokens = choice.num_draft_tokens
        num_read = self._admit_waiting(batch) if choice.num_model_tokens else 0
        if num_draft_tokens and not self._is_joint:
            self._make_room(batch, num_draft_tokens, room)
        if not num_draft_tokens or self._session is None:
            return batch.no_draft()
        view, row_indices, meet = self._view(batch), [row.index for row in self._served], self._faults.meet
        own_keys, own_room = keys if view is batch else view.keys(), [room[index] for index in row_indices]
        seen = CacheView(target_cache, None if view is batch else row_indices)
        draft = self._call(lambda session: session.propose(view, choice, own_keys, own_room, meet, seen))
        if self._faults.is_pending:
            meet()
        if draft is None or self._session is None:
            return batch.no_draft()
        self.num_fed = self._session.num_fed and self._session.num_fed + num_read // batch.num_rows
        if view is batch:
            return draft
        self._own = draft
        return _spread(draft, row_indices, batch.num_rows)

    def commit(self, batch: Batch, draft: DraftOut, scored: Scored, trimmed: Trimmed) -> None:
        """Roll back the session; see `DraftSession.commit`."""
        if self._session is None:
            return
        if not draft.token_ids.shape[1] and self._session.hidden_states is None:
            return
        view = self._view(batch)
        if view is not batch:
            draft = view.no_draft() if self._own is None else self._own
            trimmed = Trimmed(*([part[row.index] for row in self._served] for part in trimmed))  # type: ignore[arg-type]
            scored = _of_rows(scored, [row.index for row in self._served])
        self._call(lambda session: session.commit(view, draft, scored, trimmed))
        if draft.token_ids.shape[1]:
            self._look_at_numbers(trimmed.num_emitted)

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices` of the batch, in that order."""
        self.is_served = [self.is_served[row] for row in indices]
        present = {row.index: number for number, row in enumerate(self._served)}
        kept = [(index, present[old]) for index, old in enumerate(indices) if old in present]
        self._select([number for _, number in kept])
        served, self._served = self._served, []
        for index, number in kept if served else ():
            served[number].index = index
            self._served.append(served[number])
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            self._keep_waiting(group, indices)

    def _keep_waiting(self, group: _Waiting, indices: Sequence[int]) -> None:
        """Keep those of a group's rows that the batch keeps."""
        session, rows = group.session, group.rows
        numbers = {row.index: number for number, row in enumerate(rows)}
        kept = [(index, numbers[old]) for index, old in enumerate(indices) if old in numbers]
        if not kept:
            if session.kv_cache is not None:
                session.kv_cache.release()
            return
        with self._faults:
            session.rows([number for _, number in kept])
            for index, number in kept:
                rows[number].index = index
            kept_rows = [rows[number] for _, number in kept]
            if self._session is None:
                self._session, self._served = session, kept_rows
            else:
                self._waiting.append(group._replace(rows=kept_rows))

    def join(self, other: "DraftGuard", batch: Batch) -> None:
        """Add the rows of `other`, which have been read ahead, behind those of the batch, which are all live."""
        theirs, joining = other._session, other._served
        self.is_served = self.is_served + other.is_served
        for row in joining:
            row.index += batch.num_rows
        if theirs is None:
            return
        if self._session is None:
            self._session, self._served = theirs, joining
            self._faults = replace(other._faults, stats=self._faults.stats)
        elif theirs.reads_late:
            self._waiting.append(_Waiting(theirs, joining, other._chunk_size))
        else:
            self._call(lambda session: session.catch_up_and_join(theirs, self._view(batch)))
            self._served = self._served + joining if self._session is not None else []

    def _admit_waiting(self, batch: Batch) -> int:
        """Let the drafter read prompts of rows that have joined; rows that it has read are served.

        Returns the tokens of all rows that were read.
        """
        num_read = 0
        while self._waiting:
            group = self._waiting[0]
            num_left = group.num_unread(batch)
            num_read += len(group.rows) * min(num_left, group.chunk_size or num_left)
            is_read = self._call(partial(self._admit, batch, group))
            if self._session is None or not is_read:  # the next chunk is read in the next round
                break
            self._waiting.pop(0)
            self._served = self._served + group.rows
        for row in [row for group in self._waiting for row in group.rows]:
            self.is_served[row.index] = False
        return num_read

    def _admit(self, batch: Batch, group: _Waiting, session: DraftSession) -> bool:
        """Read a chunk of a group's prompts; return whether that was the last, and the rows joined."""
        view = batch.selected([row.index for row in group.rows])
        if group.session.read_ahead(view, group.chunk_size):
            return False
        session.catch_up_and_join(group.session, self._view(batch))
        return True

    def end(self, batch: Batch) -> None:
        self._call(lambda session: session.end(batch))
        self._faults.meet()

    def _call(self, act: Callable[[DraftSession], T]) -> T | None:
        """What `act` does with the session: the only place where errors of a drafter pass; None after an error."""
        if self._session is None or self._faults.is_pending:
            return None
        with self._faults:
            return act(self._session)
        if not self._faults.is_pending:  # then it is raised in all processes
            self._close()
            for group in self._waiting:
                if group.session.kv_cache is not None:
                    group.session.kv_cache.release()
            self._waiting = []
        return None

    def _close(self) -> None:
        """Draft no more."""
        cache, self._session, self._served = self.kv_cache, None, []
        self.is_served = [False] * len(self.is_served)
        if cache is not None:
            cache.release()

    def _view(self, batch: Batch) -> Batch:
        """The served rows of a batch; the batch itself if these are all."""
        row_indices = [row.index for row in self._served]
        return batch if row_indices == list(range(batch.num_rows)) else batch.selected(row_indices)

    @property
    def _is_joint(self) -> bool:
        """Whether the row with the least room bounds the drafts of all rows, past which the drafter would fail."""
        if self._session is None or self._rows_may_leave:
            return False
        return self._session.drafter.shares_columns or self._session.drafter.counts_padding

    def _make_room(self, batch: Batch, num_draft_tokens: int, room: Sequence[int]) -> None:
        """Let rows leave the session whose columns would count for others with room for more drafts."""
        if self._session is None or not self._session.drafter.shares_columns:
            return
        live = [(number, row) for number, row in enumerate(self._served) if not batch.is_finished[row.index]]
        kept = [(number, row) for number, row in live if room[row.index] >= num_draft_tokens]
        if len(kept) < len(live):
            self._report_context()
        if len(kept) < len(self._served):
            self._select([number for number, _ in kept])
            self._served = [row for _, row in kept if self._session is not None]
            row_indices = {row.index for row in self._served}
            self.is_served = [index in row_indices for index in range(batch.num_rows)]

    def _select(self, numbers: Sequence[int]) -> None:
        """Keep these of the served rows in the session, which has no more to do without any."""
        if numbers:
            self._call(lambda session: session.rows(numbers))
        elif self._session is not None:
            self._close()

    def _end_full_rows(self, batch: Batch) -> None:
        """Say that rows are past the context, and draft no more if no row can be drafted for."""
        if self._session is None:
            return
        lens, num_left = batch.tokens.lens, batch.num_left
        live = {index for index, is_finished in enumerate(batch.is_finished) if not is_finished and num_left[index] > 1}
        present = [row for row in self._served if row.index in live and not row.is_lost]
        if any(row.end <= lens[row.index] or not self.is_served[row.index] for row in present):
            self._report_context()
        # other ranks, and a later call with the same draft state, need the session
        is_needed = self._ranks.is_synced or self._session.reuse is not None
        if live and not any(self.is_served[index] for index in live) and not is_needed:
            self._close()

    def _report_context(self) -> None:
        if self._session is None:
            return
        drafter, what = self._session.drafter, "plain decoding of rows"
        if drafter.drafts_past_context:
            what = "prompt lookup alone for rows"
        elif self._is_joint:
            what = "plain decoding of all rows, for one is"
        self._faults.report(f"{what} past the context of {self._faults.name}, {drafter.context_len} tokens")

    def _look_at_numbers(self, num_emitted: Sequence[int]) -> None:
        """Let rows go on without drafts if these are chosen from NaN or infinity; the host reads a look a round later.

        The wait of a round's verification comes after the copy, so that no other wait is needed.
        """
        if self._look is not None:
            rows, are_numbers = self._look
            lost = [row for row, is_number in zip(rows, are_numbers.tolist(), strict=False) if not is_number]
            self._look = None
            for row in lost:
                row.is_lost = row.num_missed >= _FIRST_LOOK
                if row.is_lost:
                    self._faults.report(f"plain decoding of rows in which {self._faults.name} computes NaN or infinity")
        is_due = False
        for row, num in zip(self._served, num_emitted, strict=False):
            row.num_missed = row.num_missed + 1 if num == 1 else 0
            is_due |= row.num_missed >= _FIRST_LOOK and row.num_missed.bit_count() == 1 and not row.is_lost
        if self._session is None or not is_due:
            return
        has_numbers = self._call(lambda session: session.drafter.has_numbers())
        if self._ranks.is_group and not self._ranks.is_synced:
            self._faults.meet(is_last=False)  # or the others would wait for a rank with an error in the broadcast
        if has_numbers is not None:
            self._look = list(self._served), self._ranks.broadcast(has_numbers).to("cpu", non_blocking=True)


def _end(drafter: Drafter, num_pads: int) -> int:
    """The column behind the last token that may be drafted in a row: the drafter reads no more than its context."""
    if drafter.context_len is None:
        return _NO_END
    return drafter.context_len + 1 + (0 if drafter.counts_padding else num_pads)


def _of_rows(scored: Scored, row_indices: Sequence[int]) -> Scored:
    """The hidden states of some rows of the batch; a session reads nothing else of the target's output."""
    kept = RowIndices(row_indices)
    return Scored(scored.logits, *(tree_map_only(Tensor, kept.select, part) for part in scored[1:]))


def _spread(draft: DraftOut, row_indices: Sequence[int], num_rows: int) -> DraftOut:
    """A draft of some rows as one of all `num_rows` rows of the batch, of which the others have no tokens."""
    index = upload(row_indices, draft.token_ids.device)

    def spread(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.new_zeros(num_rows, *part.shape[1:]).index_copy_(0, index, part)

    cached = draft.cached
    if cached is not None:
        is_own = [False] * num_rows
        for row, own in zip(row_indices, cached.is_own, strict=True):
            is_own[row] = own
        cached = cached._replace(is_own=is_own)
    ids, lens = spread(draft.token_ids), spread(draft.lens)
    logits, logsumexp = spread(draft.token_logits), spread(draft.logsumexp)
    return DraftOut(ids, lens, logits, logsumexp, cached)  # type: ignore[arg-type]  # ids and lens are there
