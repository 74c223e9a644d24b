"""The schedule of a call: which one it is, and what it knows before the first round."""

from dataclasses import replace

import torch

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.plan import Plan
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
    return build_schedule(config, prior, history_of(plan, config), num_rows, plan.steps_have_all_rows)


def build_schedule(
    config: SpeculationConfig, prior: DraftPrior, history: ScheduleHistory, batch_size: int, keeps_rows: bool
) -> Schedule:
    """The schedule that the settings name; the adaptive one starts from the prior, or from earlier calls."""
    match config.schedule:
        case "adaptive":
            return AdaptiveSchedule(config.max_draft_tokens, prior, history, batch_size, keeps_rows)
        case "heuristic":
            return HeuristicSchedule(config.first_tokens)
        case _:
            return ConstantSchedule(config.max_draft_tokens)


def history_of(plan: Plan, config: SpeculationConfig) -> ScheduleHistory:
    """The history of earlier calls of the same type; `config` has the draft length of the call's drafter."""
    call, target, key = plan.call, plan.target, plan.call.source.history_key()
    call_type = (
        *(key.name, target.model.device, target.model.dtype, torch.get_num_threads()),
        *(config.verifier, target.cache.kind, *plan.runners.settings, plan.runners.graphed),
        *(plan.is_lock_step, config.max_draft_tokens),
        call.max_length.bit_length(),  # within a factor of two a forward's time changes little
    )
    return ScheduleHistory(HistoryStore.of(target.model), key.draft, call_type)
