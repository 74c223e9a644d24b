"""The builder: makes the decoder and the batch of a planned call."""

from typing import NamedTuple

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.draft_length import DraftLength
from hf_speculate.engine.draft_session import DraftSession
from hf_speculate.engine.drafter_setup import find_target_states, make_drafter
from hf_speculate.engine.observers import make_observers
from hf_speculate.engine.outputs import OutputRecorder
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.second_scoring import SecondScoring
from hf_speculate.engine.stage_clock import StageClock
from hf_speculate.engine.stop_tracker import StopTracker
from hf_speculate.engine.target_session import TargetSession
from hf_speculate.engine.verification import Verification
from hf_speculate.stats import SpeculationStats


class Prepared(NamedTuple):
    """A planned call with its decoder; the prompts have not been read yet."""

    decoder: SpeculativeDecoder
    batch: Batch
    plan: Plan
    stats: SpeculationStats


def build_decoder(plan: Plan, stats: SpeculationStats, clock: StageClock) -> Prepared:
    """Make the decoder and the batch of a planned call; each part makes itself from the plan."""
    plan.report_to(stats)
    faults = DraftFaults.of(plan, stats)
    drafter = make_drafter(plan, stats, faults)
    states = find_target_states(plan, drafter)
    target = TargetSession.of(plan, states, stats.add_eager_part)
    verification, stops = Verification.of(plan), StopTracker.of(plan)
    draft_length, output = DraftLength.of(plan, drafter), OutputRecorder.of(plan, target.kv_cache)
    decoder = SpeculativeDecoder(
        target=target,
        drafts=DraftSession.of(plan, drafter, states, faults),
        verification=verification,
        second_scoring=SecondScoring.of(plan, target, verification),
        stops=stops,
        draft_length=draft_length,
        output=output,
        observers=[*make_observers(plan, stats, stops), output, draft_length],
        clock=clock,
        keeps_rows=plan.keeps_rows,
    )
    return Prepared(decoder, Batch.of(plan), plan, stats)
