"""Draft session: the drafter, its KV cache, and what both have seen of each row."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.row_lens import RowLens
from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.cache.view import CacheView
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.engine.row_progress import RowProgress
from hf_speculate.engine.target_states import TargetStates
from hf_speculate.models.quirks import token_without_position
from hf_speculate.models.recurrent_layers import reads_prompts_otherwise
from hf_speculate.per_row import PerRow
from hf_speculate.schedule import Choice
from hf_speculate.transfers import upload
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Scored, Trimmed

_REUSE = "hf_speculate.options.draft_state.reuse"  # imported if a call keeps the states of its draft model
_MOST_DROPPED = 16  # tokens that a joining row reads again, so that the others need no forward of their own


class DraftReuse(Protocol):
    """Fills a call's draft cache with states of an earlier call, and keeps its own for a later one."""

    def recall(self, batch: Batch) -> int:
        """Fill the empty draft cache; the columns of every row then."""

    def note(self, batch: Batch, certain: Sequence[int]) -> None:
        """Record how much of `certain` [B] columns the draft cache still holds."""

    def remember(self, batch: Batch) -> None:
        """Keep the states of the rows' tokens."""


@dataclass
class DraftSession(PerRow):
    """Feeds the drafter what it has not seen, and rolls its KV cache back to the tokens that were emitted."""

    BY_ROW = ("_num_seen", "_num_looked_up")
    PARTS = ("drafter", "kv_cache", "hidden_states", "_seen_lens")

    drafter: Drafter
    kv_cache: KVCache | None  # KV cache of the draft model
    strategy: SampleStrategy
    padding_id: int | None = None  # drafted for finished rows in lock step
    reuse: DraftReuse | None = None
    # drafts after this id do not count: the target reads other tokens of the same forward at wrong positions
    token_without_position: int | None = None
    hidden_states: TargetStates | None = None
    ranks: Ranks = ONE_PROCESS  # the processes that decode the call together
    reads_prompt_alone: bool = False  # whether tokens that a draft model reads with the prompt get other states
    reads_late: bool = False  # whether rows may join others before the drafter has read their prompts
    num_fed: int = field(default=0, init=False)  # tokens of each row that the drafter read at its last call
    _num_seen: list[int] = field(default_factory=list, init=False)  # tokens of each row that the drafter has seen
    _num_looked_up: list[int] = field(default_factory=list, init=False)  # tokens of each row that `look_up` has seen
    _seen_lens: RowLens | None = field(default=None, init=False)  # each row's length at the drafter's last call

    @classmethod
    def of(cls, plan: Plan, drafter: Drafter, states: TargetStates | None) -> "DraftSession":
        """The session of a planned call; `states` are those of the target that the drafter reads."""
        call, draft, kv_cache, reuse = plan.call, plan.draft, None, None
        if draft is not None:
            kv_cache = draft.cache.make(call.batch_size, plan.runners.buffers(draft))
            if call.config.draft_state is not None:
                reuse = importlib.import_module(_REUSE).make_draft_cache_reuse(call, draft.model, kv_cache)
        padding_id = plan.pad_token_id if plan.is_lock_step else None
        reads_alone = draft is not None and reads_prompts_otherwise(draft.model)
        # with a constant length a row's sample depends on the rounds in which it is drafted for
        is_adaptive = call.config.schedule == "adaptive"
        return cls(
            drafter,
            kv_cache,
            plan.draft_strategy,
            padding_id,
            reuse,
            token_without_position(plan.target.model),
            states,
            call.ranks,
            reads_prompt_alone=reads_alone,
            reads_late=is_adaptive and draft is not None and not (drafter.proposes or reads_alone),
        )

    def begin(self, batch: Batch) -> None:
        """Fill the draft cache from an earlier call."""
        num_columns = 0 if self.reuse is None else self.reuse.recall(batch)
        self._num_seen = [num_columns or self._skip_padding()] * batch.num_rows
        self._num_looked_up = [batch.prompt_len] * batch.num_rows
        if num_columns:
            self._show_prompts(batch)

    def num_unread(self, lens: Sequence[int]) -> int:
        """Return the tokens of each row that the drafter reads in its next call.

        Args:
            lens: [B] columns of each row.
        """
        if self.drafter.is_free or not self.drafter.reads_prompt:
            return 0
        return max(length - num for length, num in zip(lens, self._num_seen, strict=True))

    def look_up(self, batch: Batch) -> list[list[float]]:
        """Return [B][N] probabilities of the tokens that the drafter proposes at no cost."""
        if not self.drafter.proposes:
            return [[]] * batch.num_rows
        if self._seen_lens is None:
            self._show_prompts(batch)
        lens = batch.host_tokens.lens
        spans = list(zip(self._num_looked_up, lens, strict=True))
        first = min((start for start, end in spans if start < end), default=0)  # ended rows gain no tokens
        ids = batch.host_tokens.token_ids[:, first : max(lens)].tolist()
        pairs = zip(ids, spans, strict=True)
        new_ids = [row[max(start - first, 0) : end - first] if start < end else [] for row, (start, end) in pairs]
        self._num_looked_up = list(lens)
        return self.drafter.look_up(new_ids)

    def read_prompt(self, batch: Batch, scored: Scored, num_ahead: int) -> None:
        """Keep the target's hidden states of a part of the prompt, whose last `num_ahead` columns begin with it."""
        if self.hidden_states is not None:
            # a prompt of embeddings may have more tokens than ids
            num_tokens = [batch.prompt_len + min(num, 1) for num in batch.num_hidden]
            self.hidden_states.add_prompt(scored, num_tokens, num_ahead)
        if self.kv_cache is not None and self.drafter.awaits_prompt:  # before any row leaves
            self._show_prompts(batch)
            self.drafter.read(self._tokens(batch).token_ids[:, : batch.prompt_len], self.kv_cache)
            self._num_seen = [batch.prompt_len] * batch.num_rows

    def propose(
        self,
        batch: Batch,
        choice: Choice,
        keys: NoiseKeys,
        room: Sequence[int],
        meet: Callable[[], None],
        target_cache: CacheView | None = None,
    ) -> DraftOut:
        """Draft K >= 1 tokens per row at most, and no more than `room` [B] of each.

        Args:
            batch: the rows.
            choice: K, and whether a model or head is called.
            keys: keys of the round's noise.
            room: [B] tokens that each row may draft.
            meet: called once the drafter is done, before what waits for other processes.
            target_cache: the target's states, which drafters may read.
        """
        self.num_fed = num_read = 0
        if choice.num_model_tokens and self._can_be_even(batch):
            num_read = self._read_prompt_alone(batch) + self._make_even(batch)
            draft = self._draft(batch, choice.num_draft_tokens, keys, target_cache)
            has_cache = self.kv_cache is not None
        else:
            draft = self.drafter.cut_proposal(choice.num_draft_tokens)
            has_cache = False
        meet()
        draft = self.ranks.broadcast_draft(draft, choice.num_draft_tokens, has_cache)
        if self.num_fed:
            self._follow(batch, draft)
            self.num_fed += num_read
        draft = self._before_token_without_position(batch, _within_room(draft, batch, room))
        if self.padding_id is not None and any(batch.is_finished):
            finished = upload(batch.is_finished, draft.token_ids.device, torch.bool)[:, None]
            draft = draft._replace(token_ids=draft.token_ids.masked_fill(finished, self.padding_id))
        return draft

    def _read_prompt_alone(self, batch: Batch) -> int:
        """Read the prompt in a forward of its own where other tokens would get other states with it.

        Returns the tokens of each row that were read.
        """
        cache = self.kv_cache
        if not self.reads_prompt_alone or cache is None or cache.num_columns:
            return 0
        num_seen = self._num_seen[0]
        self.drafter.read(self._tokens(batch).token_ids[:, num_seen : batch.prompt_len], cache)
        self._num_seen = [batch.prompt_len] * batch.num_rows
        return batch.prompt_len - num_seen

    def _draft(
        self,
        batch: Batch,
        num_draft_tokens: int,
        keys: NoiseKeys,
        target_cache: CacheView | None,
    ) -> DraftOut:
        """Feed the drafter what it has not seen, and let it draft."""
        self.num_fed = self._num_unseen(batch)
        tokens = self._tokens(batch)
        kept = self._kept(batch, tokens) if self.drafter.reads_kept else None
        query = tokens.last(self.num_fed)
        request = DraftRequest(query, self.kv_cache, num_draft_tokens, self.strategy, keys, kept, target_cache)
        draft = self.drafter.draft(request)
        self._seen_lens = tokens.row_lens.copy()
        return draft

    def _follow(self, batch: Batch, draft: DraftOut) -> None:
        """Record what the drafter has seen after a draft."""
        num_fed, lens = self.num_fed, batch.tokens.lens
        num_ahead = draft.token_ids.shape[1] - 1 if self.kv_cache is not None else 0
        if draft.cached is not None:
            num_ahead = draft.cached.num_ahead
        # a finished row may lack fewer tokens than were fed
        rows = zip(lens, self._num_seen, strict=True)
        num_known = [max(length - num_fed, seen) for length, seen in rows]
        self._num_seen = [num + num_fed + num_ahead for num in num_known]

    def _lags(self, batch: Batch) -> list[int]:
        """Return [B] tokens of each row that the drafter has not seen."""
        return [row.length - row.num_seen for row in self._progress(batch)]

    def _is_uneven(self, lags: Sequence[int]) -> bool:
        """Return whether proposals have brought rows forward by different numbers of tokens."""
        return self.kv_cache is not None and self.drafter.proposes and len(set(lags)) > 1

    def _can_be_even(self, batch: Batch) -> bool:
        """Return whether every row has as many tokens as the one that is furthest behind lacks.

        All rows are fed the same number of tokens.
        """
        lags = self._lags(batch)
        if not self._is_uneven(lags):
            return True
        num_query = max(lags) - max(min(lags) - self.drafter.min_query_len, 0)
        rows = zip(batch.tokens.lens, batch.num_hidden, strict=True)
        return num_query < min(length + min(num_hidden, 0) for length, num_hidden in rows)

    def _make_even(self, batch: Batch) -> int:
        """Bring the drafter equally far behind in every row; return the tokens of each row that it read.

        All rows read as many tokens as the one with the fewest lacks. Then those that lack less than
        others drop states, to be fed again.
        """
        cache, lags = self.kv_cache, self._lags(batch)
        if cache is None or not self._is_uneven(lags):
            return 0
        num_read = max(min(lags) - self.drafter.min_query_len, 0)
        if num_read:
            tokens = self._tokens(batch)
            columns = RowLens(self._num_seen, tokens.row_lens.aranges).columns(num_read)
            columns = columns.expand(batch.num_rows, -1)  # [B, N]
            self.drafter.read(tokens.token_ids.gather(1, columns), cache)
            self._num_seen = [num + num_read for num in self._num_seen]
        self._crop(batch, list(self._num_seen))
        return num_read

    def commit(self, batch: Batch, draft: DraftOut, scored: Scored, trimmed: Trimmed) -> None:
        """Roll the draft cache back to the emitted tokens, which the batch holds by now."""
        if self.hidden_states is not None:
            self.hidden_states.add(scored, trimmed.num_emitted)
        if not draft.token_ids.shape[1] or not self.num_fed:
            return
        is_own = [True] * batch.num_rows if draft.cached is None else draft.cached.is_own
        rows = zip(self._progress(batch), trimmed.num_emitted, is_own, strict=True)
        ends = [row.num_valid(num_emitted, own) for row, num_emitted, own in rows]
        self._crop(batch, ends)
        if self.reuse is not None:
            self.reuse.note(batch, ends)

    @property
    def can_join(self) -> bool:
        """Whether rows may join: nothing but the drafter and its cache follows them."""
        return self.reuse is None and self.drafter.can_join

    def show_prompts(self, batch: Batch) -> None:
        """Show the drafter the prompts, which it need not read yet."""
        if self._seen_lens is None:
            self._show_prompts(batch)

    def read_ahead(self, batch: Batch, max_tokens: int | None = None) -> bool:
        """Let the drafter read the prompts, so that the rows may join others.

        Returns whether it must be called again.

        Args:
            batch: the rows.
            max_tokens: tokens of each row that are read at most. None for all.
        """
        self.show_prompts(batch)
        if self.hidden_states is None:
            return self._catch_up(batch, max_tokens)
        self._catch_up(batch)
        return self._read_states(batch, self.hidden_states, max_tokens)

    def catch_up_and_join(self, other: "DraftSession", batch: Batch) -> None:
        """Add the rows of `other`, which has read ahead, behind these, which are all live."""
        if not other._fall_behind(self._num_unseen(batch)):
            self._catch_up(batch)
        self.join(other)

    def _tokens(self, batch: Batch) -> TokenBuffer:
        """The rows' tokens where the drafter reads them."""
        return batch.host_tokens if self.drafter.reads_host_tokens else batch.tokens

    def _show_prompts(self, batch: Batch) -> None:
        tokens = self._tokens(batch)
        self.drafter.begin(tokens.token_ids[:, : batch.prompt_len])
        self._seen_lens = RowLens([batch.prompt_len] * batch.num_rows, tokens.row_lens.aranges)

    def _read_states(self, batch: Batch, states: TargetStates, max_tokens: int | None) -> bool:
        """Let the drafter read the hidden states of all tokens but the newest; see `read_ahead`."""
        counts = [min(num - 1, max_tokens or num) for num in states.counts]
        kept = self._kept(batch, self._tokens(batch), counts) if any(counts) else None
        if kept is not None:
            self.drafter.read_kept(kept)
        return max(states.counts) > 1

    def _fall_behind(self, num_unseen: int) -> bool:
        """Leave the drafter `num_unseen` tokens behind after `read_ahead`; False if that saves no forward."""
        if self.kv_cache is None:
            return False
        num_dropped = num_unseen - self.drafter.min_query_len
        if not 0 <= num_dropped < min(_MOST_DROPPED, *self._num_seen):
            return False
        self.kv_cache.crop(num_dropped)
        self._num_seen = [num - num_dropped for num in self._num_seen]
        return True

    def _catch_up(self, batch: Batch, max_tokens: int | None = None) -> bool:
        """Leave the drafter as far behind as its shortest query allows, in every row.

        Reads up to `max_tokens` of each row, None for all; returns whether some are left.
        """
        num_query, num_unseen = self.drafter.min_query_len, self._num_unseen(batch)
        num_wanted = num_read = max(num_unseen - num_query, 0)
        if self.kv_cache is not None and num_wanted:
            num_read = min(num_wanted, max_tokens or num_wanted)
            self.drafter.read(self._tokens(batch).last(num_unseen)[:, :num_read], self.kv_cache)
        self._num_seen = [length - num_unseen + num_read for length in batch.tokens.lens]
        return num_read < num_wanted

    def rows(self, indices: Sequence[int]) -> None:
        super().rows(indices)
        num_skipped = self._skip_padding()
        self._num_seen = [num + num_skipped for num in self._num_seen]

    def end(self, batch: Batch) -> None:
        if self.reuse is not None:
            self.reuse.remember(batch)

    def _skip_padding(self) -> int:
        """Columns of padding before all rows that need not be fed, where they would take the room of tokens."""
        cache = self.kv_cache
        if cache is None or cache.num_columns or not self.drafter.shares_columns:
            return 0
        return cache.skip_padding()

    def _num_unseen(self, batch: Batch) -> int:
        """Tokens at the end of the live rows that the drafter has not seen; the same number for every row."""
        no_live = all(batch.is_finished)  # other ranks take part in the forwards: all rows are fed what they lack
        rows = [row for row in self._progress(batch) if no_live or not row.is_finished]
        num_unseen = max(row.length - row.num_seen for row in rows)
        return max(num_unseen, 1)  # a finished row without a draft gains nothing to read

    def _before_token_without_position(self, batch: Batch, draft: DraftOut) -> DraftOut:
        if self.token_without_position is None:
            return draft
        newest = batch.tokens.last(1).to(draft.token_ids.device)
        has_no_position = torch.cat([newest, draft.token_ids], dim=1) == self.token_without_position  # [B, K+1]
        most = (has_no_position.cumsum(1)[:, :-1] == 0).sum(1).to(draft.lens)
        return draft._replace(lens=torch.minimum(draft.lens, most))

    def _kept(self, batch: Batch, tokens: TokenBuffer, counts: Sequence[int] | None = None) -> Kept | None:
        """The tokens emitted since the drafter's last call, with their hidden states; None if it gets none.

        `counts` are how many of each row, if not all: then there are hidden states.
        """
        lens, seen, states = tokens.row_lens, self._seen_lens, None
        if self.hidden_states is not None:
            seen_lens = [length - num for length, num in zip(tokens.lens, self.hidden_states.counts, strict=True)]
            if seen is None or seen.on_host != seen_lens:
                seen = RowLens(seen_lens, lens.aranges)
            states = self.hidden_states.take(tokens.token_ids.device, counts)
        if seen is None:
            return None
        if counts is None:
            counts = [length - num for length, num in zip(tokens.lens, seen.on_host, strict=True)]
        columns = seen.columns(max(counts)).expand(len(counts), -1)  # [B, N]
        ids = tokens.token_ids.gather(1, columns.clamp_max(tokens.token_ids.shape[1] - 1))  # [B, N]
        num_emitted = torch.tensor(counts, dtype=torch.int32, device="cpu")
        if min(counts) < max(counts):
            ids = ids.masked_fill(columns >= lens.on_device()[:, None], -1)
        return Kept(ids, num_emitted, states)

    def _progress(self, batch: Batch) -> list[RowProgress]:
        rows = zip(batch.tokens.lens, self._num_seen, batch.prompt_lens, batch.is_finished, strict=True)
        return [RowProgress(*row) for row in rows]

    def _crop(self, batch: Batch, num_valid: list[int]) -> None:
        """Leave the drafter, which has seen `num_valid` [B] emitted tokens, equally far behind in every row."""
        rows = self._progress(batch)
        behind = max(row.length - num for row, num in zip(rows, num_valid, strict=True))
        num_query = max(behind, self.drafter.min_query_len)
        keep = [row.num_kept(num_query) for row in rows]
        if self.kv_cache is not None:
            if any(num < row.prompt_len for num, row in zip(keep, rows, strict=True)):
                num_real = self.kv_cache.num_real_tokens
                keep = [row.num_kept_with_padding(num_query, num) for row, num in zip(rows, num_real, strict=True)]
            drops = [row.num_seen - num for row, num in zip(rows, keep, strict=True)]
            self.kv_cache.crop(drops, batch.tokens.row_lens)
        self._num_seen = keep


def _within_room(draft: DraftOut, batch: Batch, room: Sequence[int]) -> DraftOut:
    """Limit drafts to each row's room and limit, so that its sample does not depend on the other rows."""
    limits = [min(limit, most) for limit, most in zip(batch.draft_limits, room, strict=True)]
    most = [max(min(left - 1, limit), 0) for left, limit in zip(batch.num_left, limits, strict=True)]
    lens, num = draft.lens, draft.token_ids.shape[1]
    if min(most) >= num:
        return draft
    row_lens = batch.tokens.row_lens
    is_equal = min(limits) >= num and len(set(batch.max_lengths)) == 1
    if is_equal and row_lens.aranges.device == lens.device:  # nothing is uploaded
        on_device = (batch.max_lengths[0] - 1 - row_lens.on_device()).clamp_min_(0)  # [B]
    else:
        on_device = upload(most, lens.device)
    return draft._replace(lens=torch.minimum(lens, on_device.to(lens.dtype)))
