"""The schedule of a call: which one it is, and what it knows before the first round."""

from dataclasses import replace

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.observers import lacks_plain_step
from hf_speculate.engine.plan import Plan, call_type_of
from hf_speculate.engine.step_weights import draft_prior
from hf_speculate.schedule import (
    AdaptiveSchedule,
    ConstantSchedule,
    DraftPrior,
    HeuristicSchedule,
    HistoryStore,
    Schedule,
    ScheduleHistory,
)


def make_schedule(plan: Plan, drafter: Drafter) -> Schedule:
    """The schedule of a planned call, within what its drafter proposes."""
    config, most = plan.call.config, drafter.max_draft_tokens
    if most == 0:
        return ConstantSchedule(0)
    if most is not None and most < config.max_draft_tokens:  # a round asks for no more than the drafter proposes
        config = replace(config, num_assistant_tokens=most, num_assistant_tokens_schedule=config.schedule)
    prior, num_rows = draft_prior(plan.target.model, plan.call.source), plan.call.batch_size
    history, keeps_rows = history_of(plan, config), plan.steps_have_all_rows
    return build_schedule(config, prior, history, num_rows, keeps_rows, lacks_plain_step(plan))


def build_schedule(
    config: SpeculationConfig,
    prior: DraftPrior,
    history: ScheduleHistory,
    batch_size: int,
    keeps_rows: bool,
    lacks_plain_step: bool = False,
) -> Schedule:
    """The schedule that the settings name; the adaptive one starts from the prior, or from earlier calls."""
    match config.schedule:
        case "adaptive":
            return AdaptiveSchedule(config.max_draft_tokens, prior, history, batch_size, keeps_rows)
        case "heuristic":
            return HeuristicSchedule(config.first_tokens)
        case _:
            return ConstantSchedule(config.max_draft_tokens, lacks_plain_step)


def history_of(plan: Plan, config: SpeculationConfig) -> ScheduleHistory:
    """The history of earlier calls of the same type; `config` has the draft length of the call's drafter."""
    key = plan.call.source.history_key()
    call_type = (key.name, *call_type_of(plan), config.max_draft_tokens)
    return ScheduleHistory(HistoryStore.of(plan.target.model), key.draft, call_type)
