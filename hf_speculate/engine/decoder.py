"""Decoder: the speculative decoding loop, which runs until every row is finished."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from hf_speculate.cache.base import KVCache
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.draft_length import DraftLength
from hf_speculate.engine.draft_session import DraftSession, TargetStates
from hf_speculate.engine.observers import Observer, make_observers
from hf_speculate.engine.outputs import OutputRecorder
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.second_scoring import SecondScoring
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.engine.stop_tracker import StopTracker
from hf_speculate.engine.target_session import PromptChunk, TargetSession
from hf_speculate.engine.verification import Verification
from hf_speculate.schedule import PLAIN_STEP, Choice
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import DraftOut, RoundRecord, Scored, Trimmed, Verified

_STATES = "hf_speculate.options.heads.hidden_states"  # imported if the drafter reads hidden states


@dataclass(frozen=True)
class SpeculativeDecoder:
    """Speculative decoder for one call.

    The drafter proposes tokens, the target scores them, and the verifier accepts a prefix.
    """

    plan: Plan
    target: TargetSession
    drafts: DraftSession
    verification: Verification
    second_scoring: SecondScoring
    stops: StopTracker
    draft_length: DraftLength
    output: OutputRecorder
    # observers of every round, in calling order, including the two fields above
    observers: Sequence[Observer]
    clock: StageClock

    @classmethod
    def of(cls, plan: Plan, stats: SpeculationStats, clock: StageClock) -> "SpeculativeDecoder":
        """Make the decoder for a planned call; each part is made from the plan."""
        plan.report_to(stats)
        faults = DraftFaults.of(plan, stats)
        meet = partial(faults.meet, is_last=False) if plan.call.ranks.is_synced else None
        drafter = plan.source.make_drafter(plan.setup, plan.runners, meet)
        faults.is_callers = drafter.is_callers
        states: TargetStates | None = None
        if plan.hidden_layers is not None:
            states = importlib.import_module(_STATES).make_states(plan, drafter)
        target = TargetSession.of(plan, states)
        verification, stops = Verification.of(plan), StopTracker.of(plan)
        draft_length, output = (
            DraftLength.of(plan, drafter),
            OutputRecorder.of(plan, target.kv_cache),
        )
        return cls(
            plan=plan,
            target=target,
            drafts=DraftSession.of(plan, drafter, states, faults),
            verification=verification,
            second_scoring=SecondScoring.of(plan, target, verification),
            stops=stops,
            draft_length=draft_length,
            output=output,
            observers=[*make_observers(plan, stats, stops), output, draft_length],
            clock=clock,
        )

    def decode(self, batch: Batch) -> None:
        """Decode until all rows are finished.

        Afterwards, `output` holds the tokens, and the target's cache holds the states of all tokens
        but the last.
        """
        self.prefill(batch)
        while self.decode_round(batch):
            pass
        self.clock.enter(Stage.PAD)
        end = self.stops.end
        self.output.truncate(end)
        self.target.finish(batch, self.stops.surplus())
        self.drafts.end(batch)
        seconds = self.clock.lap()
        for observer in self.observers:
            self.clock.enter(observer.stage)
            observer.on_end(end, seconds)

    def decode_round(self, batch: Batch) -> bool:
        """Decode one round; return False if all rows are finished."""
        enter = self.clock.enter
        self.second_scoring.join_others(batch)
        enter(Stage.DRAFT, batch.num_rounds + (not all(batch.is_finished)))
        forced_texts = (
            self.verification.forced_texts(batch) if self.drafts.reads_forced_text else []
        )
        room, proposed = self.drafts.room(batch), self.drafts.look_up(batch, forced_texts)
        num_unread = self.drafts.num_unread(batch)
        choice = self.draft_length.next(batch, room, proposed, num_unread, self.target.room)
        if choice is None:
            return False
        keys = batch.begin_round()
        run_target = self.target.run_aside if self.target.kv_cache.can_mark else None
        draft = self.drafts.propose(  # [B, K]
            batch, choice, keys, room, self.target.kv_cache, run_target
        )
        enter(Stage.SCORE)
        checks_logits, scored_draft = self.target.reads_other_tokens(draft), draft
        rule = self.verification.captured_rule(checks_logits)
        scored = self.target.score(batch, draft, rule)  # logits [B, K+1, V]
        enter(Stage.VERIFY)
        # verification reads the batch but does not write to it
        verified = self.verification.verify(
            batch, scored.logits, draft, keys, checks_logits, scored.judged
        )
        if verified.has_bad_logits:
            enter(Stage.SCORE)
            keys = batch.keys()  # a graph may have overwritten the keys of the round
            scored_draft, scored, verified = self.second_scoring.run(batch, draft, keys, verified)
        if choice.is_trial and batch.tokens.row_lens.is_even:
            verified = verified.of_equal_lengths()
        enter(Stage.TRIM)
        trimmed = self.stops.trim(batch, verified)
        enter(Stage.COMMIT)
        batch.commit(verified, trimmed)
        self.target.commit(batch, scored_draft, scored, verified, trimmed)
        self.verification.commit(scored_draft, trimmed)
        self.drafts.commit(batch, draft, scored, trimmed)
        if verified.is_rescored:
            for kv_cache in self._kv_caches:
                kv_cache.clear_rejected()
        self._observe(batch, choice, draft, scored, verified, trimmed)
        self.drop_finished_rows(batch)
        return True

    @contextmanager
    def caches(self, is_passed: bool) -> Iterator[None]:
        """Release all buffers after the block; after an error, restore a passed target cache."""
        restore = None
        try:
            restore = self.target.kv_cache.snapshot() if is_passed else None
            yield
        except BaseException:
            if restore is not None:
                restore()
            raise
        finally:
            for kv_cache in self._kv_caches:
                kv_cache.release()
            self.plan.runners.end()

    @property
    def _kv_caches(self) -> list[KVCache]:
        return [
            kv_cache
            for kv_cache in (self.target.kv_cache, self.drafts.kv_cache)
            if kv_cache is not None
        ]

    def prefill(self, batch: Batch) -> None:
        """Read the prompt and emit the next token."""
        for chunk in self.begin(batch):
            scored = self.read_chunk(batch, chunk)
        self.emit_first(batch, scored)

    def begin(self, batch: Batch) -> list[PromptChunk]:
        """Begin the call and return the chunks of its prompt."""
        self.clock.start(Stage.PREFILL)
        self.drafts.begin(batch)
        return self.target.prompt_chunks()

    def read_chunk(self, batch: Batch, chunk: PromptChunk) -> Scored:
        """Read a chunk of the prompt."""
        self.clock.enter(Stage.PREFILL)
        scored = self.target.read(chunk)
        self.clock.enter(Stage.DRAFT)
        self.drafts.read_prompt(batch, scored, chunk.num_ahead)
        return scored

    def emit_first(self, batch: Batch, scored: Scored) -> None:
        """Emit the token after the prompt, using the scores of the prompt's last chunk."""
        self.target.kv_cache.begin_recording()
        draft = batch.no_draft()
        self.clock.enter(Stage.VERIFY)
        verified = self.verification.verify(batch, scored.logits, draft, batch.keys())
        self.clock.enter(Stage.TRIM)
        trimmed = self.stops.trim(batch, verified)
        self.clock.enter(Stage.COMMIT)
        batch.commit(verified, trimmed)
        self.draft_length.begin(self.clock.prefill_s, self.target.query_ids.shape[1])
        self._observe(batch, PLAIN_STEP, draft, scored, verified, trimmed)
        self.drop_finished_rows(batch)

    def _observe(
        self,
        batch: Batch,
        choice: Choice,
        draft: DraftOut,
        scored: Scored,
        verified: Verified,
        trimmed: Trimmed,
    ) -> None:
        record = RoundRecord(
            num_round=batch.num_rounds,
            row_ids=batch.row_ids,
            was_live=batch.was_live,
            is_served=self.drafts.is_served,
            num_model_tokens=choice.num_model_tokens,
            num_fed=self.drafts.num_fed,
            num_left=batch.num_left,
            draft=draft,
            scored=scored,
            verified=verified,
            trimmed=trimmed,
            seconds=self.clock.lap(),
            total_s=self.clock.total_s,
            call_s=self.clock.call_s,
            names=self.plan.source.names,
        )
        for observer in self.observers:
            self.clock.enter(observer.stage)
            observer.on_round(record)
        self.clock.enter(Stage.COMMIT)

    def drop_finished_rows(self, batch: Batch) -> None:
        """Drop finished rows from the batch unless the plan keeps them or all rows are finished."""
        if self.plan.keeps_rows or not any(batch.is_finished) or all(batch.is_finished):
            return
        live = [row for row, is_finished in enumerate(batch.is_finished) if not is_finished]
        for per_row in (batch, self.stops, self.target, self.drafts, self.verification):
            per_row.rows(live)
