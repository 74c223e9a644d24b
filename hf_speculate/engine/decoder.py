"""The loop: draft, score, verify, trim, crop, until every row has stopped."""

import time
from collections.abc import Callable

import torch

from hf_speculate.cache.layers import windows_of
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.batch import Batch, DecoderSettings
from hf_speculate.engine.distributed import Peers
from hf_speculate.engine.draft_cache_reuse import Carrier
from hf_speculate.engine.draft_session import Follower
from hf_speculate.engine.error_context import Place, Stage
from hf_speculate.engine.outputs import OutputRecorder
from hf_speculate.engine.round_record import outcome_of, report_of
from hf_speculate.engine.verification import Judge, Round, Trimmed, Verified
from hf_speculate.errors import BadLogitsError
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.schedule import Schedule
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import DraftOut, RoundReport, Scored
from hf_speculate.verify.bad_logits import LAWLESS, fault_of


class SpeculativeDecoder:
    """Decodes a batch with a drafter, a target and a judge between them.

    Args:
        target: scores the drafts.
        drafter: proposes; None where nothing is drafted.
        judge: verifies and trims.
        schedule: how many tokens to draft.
        settings: see `DecoderSettings`.
        recorder: collects the output.
        stats: counts and times the work.
        on_tokens: called with the ids of row 0 after each trim, for streamers.
        clock: seconds.
        carrier: takes what the draft model has read along to the next call; None: nothing is taken.
        peers: ranks that must run as many forwards as this one; None: there are none.
        on_round: told of every round when it is over; None: nobody asks.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        judge: Judge,
        schedule: Schedule,
        settings: DecoderSettings,
        recorder: OutputRecorder,
        stats: SpeculationStats,
        on_tokens: Callable[[list[int]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        carrier: Carrier | None = None,
        peers: Peers | None = None,
        on_round: Callable[[RoundReport], object] | None = None,
    ):
        self.target = target
        self.follower = Follower(drafter, settings)
        self.judge = judge
        self.schedule = schedule
        self.settings = settings
        self.recorder = recorder
        self.stats = stats
        self.on_tokens = on_tokens
        self.carrier = carrier
        self.peers = peers
        self.on_round = on_round
        self._clock = clock
        self.place = Place()
        self._began = self._since = 0.0
        self._prompt_len = 0
        self._stop_lens: list[int | None] = [None] * len(recorder.new_ids)  # by output row, where a criterion fired
        self._faults: list[tuple[int, BadLogitsError]] = []  # past a row's stop, by the tokens before it
        recorded = recorder.recorded
        self._options: dict[str, bool | list[int]] = {
            name: True
            for name, wanted in (
                ("output_hidden_states", recorded.hidden_states),
                ("output_attentions", recorded.attentions),
            )
            if wanted
        }

    def decode(self, batch: Batch, place: Place | None = None) -> None:
        """Run to the end; the recorder then holds the output, and the target's cache all but its last token.

        Args:
            batch: the rows.
            place: told what comes next, for a note on an error; None: nobody will ask.
        """
        self.place = place or Place()
        self.place.enter(Stage.PREFILL, 0)
        self._began = self._since = self._clock()
        self._prompt_len = batch.prompt_len
        if batch.states is not None:
            self._options["output_hidden_states"] = batch.states.wanted
        self._prefill(batch)
        while (num_draft_tokens := self._num_draft_tokens(batch)) is not None:
            if all(batch.is_finished):
                self._idle(batch, num_draft_tokens)
                continue
            batch.num_rounds += 1
            keys = batch.keys()
            other_s = self._lap("bookkeeping_s")
            num_fed = self.follower.num_unseen(batch) if num_draft_tokens else 0
            self.place.enter(Stage.DRAFT, batch.num_rounds)
            draft = self.follower.draft(batch, num_draft_tokens, num_fed, keys)  # 1. the drafter proposes
            draft_s = self._lap("draft_s")
            output = self._score(batch, draft)  # 2. the target scores all proposals at once
            score_s = self._lap("score_s")
            round_ = Round(batch.tokens, batch.host_tokens, output.logits, draft, keys)
            verified = self._verify(round_)  # 3. the verifier keeps a prefix
            other_s += self._lap("verify_s")
            trimmed = self._trim(batch, round_, verified)  # 4. what follows a stop goes
            if self.settings.drafts_freely:
                num_draft_tokens = draft.token_ids.shape[1]
            outcome = outcome_of(batch, self.settings, num_draft_tokens, num_fed, verified, trimmed)
            report = None if self.on_round is None else report_of(batch, verified, trimmed)
            self._record(batch, round_, verified, trimmed, output)
            self._crop(batch, draft, verified, trimmed)  # 5. the caches forget what was not kept
            other_s += self._lap("bookkeeping_s")
            self.schedule.update(outcome._replace(draft_s=draft_s, score_s=score_s, other_s=other_s))
            if not draft.token_ids.shape[1]:
                self.stats.add_plain_step(draft_s + score_s + other_s)
            if report is not None:
                self._tell(report._replace(draft_s=draft_s, score_s=score_s, other_s=other_s))
        self._finish(batch)
        if self.carrier is not None:
            self.carrier.remember(batch)

    def _tell(self, report: RoundReport) -> None:
        if self.on_round is not None:
            self.place.enter(Stage.REPORT)
            self.on_round(report._replace(total_s=self._since - self._began))
            self.place.enter(Stage.CROP)  # what may come without another round belongs to that stage

    def _prefill(self, batch: Batch) -> None:
        """Feed the prompt and emit the token after it."""
        num_ahead = batch.query_ids.shape[1]
        size = self.settings.prefill_chunk_size or num_ahead
        num_told = [min(num, self._prompt_len + 1) for num in batch.num_prompt_tokens]  # embeddings may be without ids
        for chunk in batch.query_ids.split(size, dim=1):
            output = self.target.run(chunk, batch.target_cache, logits_to_keep=1, **self._options)
            if batch.states is not None:
                batch.states.add_prompt(output, num_told, num_ahead)
            num_ahead -= chunk.shape[1]
        batch.target_cache.begin_recording()
        prompt_s = self._lap("prefill_s")
        num_left = self.settings.max_length - self._prompt_len - 1
        num_read = batch.query_ids.shape[1]
        num_unread = min(max(self._prompt_len - batch.num_held[0], 0), num_read)  # by the drafter, with carried states
        self.schedule.begin(prompt_s * num_unread / num_read, num_unread, num_left)
        keys = batch.keys()
        round_ = Round(batch.tokens, batch.host_tokens, output.logits[:, -1:], batch.no_draft(), keys)
        verified = self._verify(round_)
        trimmed = self._trim(batch, round_, verified)
        self.recorder.add_prompt_states(output)
        self._emit(batch, round_, verified, trimmed)
        self._compact(batch)
        self._lap("bookkeeping_s")

    def _num_draft_tokens(self, batch: Batch) -> int | None:
        """K: what the schedule says, but not past the last row's end; 0 when one token is left, None at the end.

        With peers, what the one says that drafts most.
        """
        lens = [length for length, done in zip(batch.tokens.lens, batch.is_finished, strict=True) if not done]
        num = None
        if lens:
            num = max(min(self.schedule.num_draft_tokens, self.settings.max_length - min(lens) - 1), 0)
        return num if self.peers is None else self.peers.agree(num)

    def _idle(self, batch: Batch, num_draft_tokens: int) -> None:
        """Run a round's forwards for the sake of the peers that go on, and drop what they give."""
        draft = batch.no_draft()
        if batch.draft_cache is not None:
            draft = self.follower.draft(batch, num_draft_tokens, self.follower.num_unseen(batch), batch.keys())
        self._score(batch, draft)
        batch.target_cache.crop(draft.token_ids.shape[1] + 1)
        self.follower.undo(batch, draft)

    def _score(self, batch: Batch, draft: DraftOut) -> Scored:
        self.place.enter(Stage.SCORE)
        query = torch.cat([batch.tokens.last(1), draft.token_ids.clamp_min(0)], dim=1)  # [B, K+1]
        return self.target.run(query, batch.target_cache, logits_to_keep=query.shape[1], **self._options)

    def _verify(self, round_: Round) -> Verified:
        self.place.enter(Stage.VERIFY)
        return self.judge.verify(round_)

    def _trim(self, batch: Batch, round_: Round, verified: Verified) -> Trimmed:
        self.place.enter(Stage.TRIM)
        trimmed = self.judge.trim(round_, verified)
        goes_on = self.settings.pad_token_id is None or self.settings.is_lock_step
        num_emitted = []
        for row, (num, is_stopped) in enumerate(zip(*trimmed, strict=True)):
            place = batch.row_ids[row]
            if is_stopped and self._stop_lens[place] is None:
                self._stop_lens[place] = len(self.recorder.new_ids[place]) + num
            if batch.is_finished[row] and not self.settings.is_lock_step:
                num = 0
            elif goes_on:
                num = len(verified.new_ids[row])
            num_emitted.append(num)
        return Trimmed(num_emitted, trimmed.is_stopped)

    def _check_laws(self, batch: Batch, verified: Verified, trimmed: Trimmed) -> None:
        """Let no token be drawn where the target's logits hold no law, as in plain `generate`."""
        if not self.settings.draws or not verified.status & LAWLESS:
            return
        self.place.enter(Stage.VERIFY)
        for row, (ids, num) in enumerate(zip(verified.new_ids, trimmed.num_emitted, strict=True)):
            if num and num == len(ids) and not batch.is_finished[row]:
                place = batch.row_ids[row]
                num_new = len(self.recorder.new_ids[place]) + num - 1
                fault, stop = fault_of(verified.scores[row, num - 1], place, num_new), self._stop_lens[place]
                if fault is not None and (stop is None or num_new < stop):
                    raise fault
                if fault is not None:
                    self._faults.append((num_new, fault))  # plain `generate` may have ended by then

    def _emit(self, batch: Batch, round_: Round, verified: Verified, trimmed: Trimmed) -> None:
        """Write the kept tokens to the rows and to the output, and see which rows are finished."""
        self.stats.status |= verified.status
        self._check_laws(batch, verified, trimmed)
        self.place.enter(Stage.EMIT)
        batch.tokens.append(verified.token_ids, trimmed.num_emitted)
        batch.note(verified.new_ids, trimmed.num_emitted)
        if batch.host_tokens is not batch.tokens:
            width = verified.token_ids.shape[1]
            ids = [row + [0] * (width - len(row)) for row in verified.new_ids]
            batch.host_tokens.append(torch.tensor(ids), trimmed.num_emitted)
        recorded = self.recorder.recorded
        for row, num in enumerate(trimmed.num_emitted):
            self.recorder.add_row(
                batch.row_ids[row],
                verified.new_ids[row][:num],
                verified.scores[row] if recorded.scores and not batch.is_finished[row] else None,
                round_.logits[row] if recorded.logits and not batch.is_finished[row] else None,
            )
        if self.on_tokens is not None:
            self.on_tokens(verified.new_ids[0][: trimmed.num_emitted[0]])
            self.stats.num_user_host_syncs += 1
        batch.is_finished = self._finished(batch.row_ids)

    def _finished(self, places: list[int]) -> list[bool]:
        """Which of the output's rows `places` need no further token."""
        if self.settings.pad_token_id is not None:
            return [self._stop_lens[place] is not None for place in places]
        stops = [stop for stop in self._stop_lens if stop is not None]
        end = self.settings.max_length - self._prompt_len
        if len(stops) == len(self._stop_lens):
            end = min(end, max(stops))  # rows without EOS go on until the last one has stopped
        return [len(self.recorder.new_ids[place]) >= end for place in places]

    def _record(self, batch: Batch, round_: Round, verified: Verified, trimmed: Trimmed, output: Scored) -> None:
        live = [row for row, done in enumerate(batch.is_finished) if not done]
        self.stats.num_batch_rounds += 1
        self.stats.add_draft_len(round_.draft.token_ids.shape[1])
        for row in live:
            num_drafted, num_emitted = verified.num_drafted[row], trimmed.num_emitted[row]
            num_accepted = min(verified.num_accepted[row], num_emitted)  # a criterion may stop before the last of them
            num_verified = min(verified.num_accepted[row] + 1, num_drafted, len(verified.new_ids[row]), num_emitted)
            self.stats.add_row(num_drafted, num_accepted, num_emitted, num_verified)
        if self.recorder.recorded.hidden_states or self.recorder.recorded.attentions:
            config = self.target.model.config.get_text_config(decoder=True)
            windows = windows_of(config, batch.target_cache.cache)
            num_query = round_.draft.token_ids.shape[1] + 1
            self.recorder.add_states(output, trimmed.num_emitted[0], num_query, windows)
        if batch.states is not None:
            batch.states.add(output, trimmed.num_emitted)
        self._emit(batch, round_, verified, trimmed)

    def _crop(self, batch: Batch, draft: DraftOut, verified: Verified, trimmed: Trimmed) -> None:
        """Roll both caches and the judge back to the kept tokens; the newest one is in none of them."""
        self.place.enter(Stage.CROP)
        num_query = draft.token_ids.shape[1] + 1
        num_dropped = [num_query - num for num in trimmed.num_emitted]
        batch.target_cache.crop(num_dropped)
        self.judge.crop(num_dropped)
        self.follower.crop(batch, draft, verified, trimmed)
        self._compact(batch)

    def _compact(self, batch: Batch) -> None:
        """Let finished rows leave the work."""
        if self.settings.keeps_rows or not any(batch.is_finished) or all(batch.is_finished):
            return
        live = [row for row, done in enumerate(batch.is_finished) if not done]
        batch.rows(live)
        self.target.rows(live)
        self.follower.rows(live)
        self.judge.rows(live)

    def _finish(self, batch: Batch) -> None:
        """Cut what was decoded past the last stop, where rows go on without EOS."""
        self.stats.num_longest += max(map(len, self.recorder.new_ids)) - 1
        end = max(stop for stop in self._stop_lens if stop is not None)
        fault = next((fault for num_new, fault in self._faults if num_new < end), None)
        if fault is not None:
            raise fault
        surplus = [max(len(row) - end, 0) for row in self.recorder.new_ids]
        if any(surplus):
            self.recorder.truncate(end)
            batch.target_cache.crop([surplus[place] for place in batch.row_ids])

    def _lap(self, stage: str) -> float:
        """Book the seconds since the last lap on a stage."""
        now = self._clock()
        spent = now - self._since
        setattr(self.stats, stage, getattr(self.stats, stage) + spent)
        self._since = now
        return spent
