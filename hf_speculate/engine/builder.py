"""The builder: makes the decoder and the batch of a planned call."""

import importlib
import logging
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.layers import windows_of
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import Drafter
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.call import Call
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.draft_guard import DraftGuard
from hf_speculate.engine.draft_length import DraftLength
from hf_speculate.engine.draft_prior import draft_prior
from hf_speculate.engine.draft_session import DraftSession, TargetStates
from hf_speculate.engine.drafter_setup import draft_plan, drafter_setup
from hf_speculate.engine.model_plan import ModelPlan
from hf_speculate.engine.observers import BadLogitsObserver, CallbackObserver, Observer, StatsObserver, StreamObserver
from hf_speculate.engine.outputs import OutputRecorder
from hf_speculate.engine.plan import Plan, make_plan
from hf_speculate.engine.ranks import ONE_PROCESS
from hf_speculate.engine.row_lists import find_row_lists
from hf_speculate.engine.second_scoring import SecondScoring
from hf_speculate.engine.stage_clock import StageClock
from hf_speculate.engine.stop_tracker import StopTracker
from hf_speculate.engine.target_session import MAX_PADDING_QUERY, EndPadding, TargetSession
from hf_speculate.engine.verification import LockStepVerification, RowWiseVerification, Verification, find_spans
from hf_speculate.models.context import max_columns
from hf_speculate.models.language_model import LanguageModel, device_of
from hf_speculate.models.quirks import placeless_id
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.schedule import (
    AdaptiveSchedule,
    ConstantSchedule,
    DraftPrior,
    HeuristicSchedule,
    HistoryStore,
    Schedule,
    ScheduleHistory,
)
from hf_speculate.stats import SpeculationStats
from hf_speculate.triton_kernels.backends import check_backend
from hf_speculate.verify.base import depends_on_draft, make_verifier

LOGGER = logging.getLogger("hf_speculate")
_STATES = "hf_speculate.options.heads.hidden_states"  # imported if the drafter reads states of the target
_REUSE = "hf_speculate.options.draft_state.reuse"  # imported if a call keeps the states of its draft model
_WITHOUT_FAILED_KERNELS = (
    "hf_speculate.options.verdicts.kernel_choice:without_failed_kernels"  # imported on CUDA devices
)


class Prepared(NamedTuple):
    """A call up to its decoder, which has not read the prompts."""

    decoder: SpeculativeDecoder
    batch: Batch
    plan: Plan
    stats: SpeculationStats


def build_decoder(
    call: Call, stats: SpeculationStats, clock: StageClock, prepared: Mapping[str, Any] | None = None
) -> Prepared:
    """Plan a call, and make its decoder and batch; `prepared` is what transformers hands to candidate generators."""
    for model in call.models:
        check_backend(call.config.verifier_backend, device_of(model))
    if call.config.verifier_backend != "torch" and any(device_of(model).type == "cuda" for model in call.models):
        call = pkgutil.resolve_name(_WITHOUT_FAILED_KERNELS)(call, stats)

    def forget_compiled(part: str, reason: str) -> None:
        for parts in (stats.compiled, stats.graphed):
            if part in parts:
                parts.remove(part)
        stats.add_fallback(f"{part}: {reason}")

    source = call.source.begin(drafter_setup(call, forget_compiled), prepared or {})
    plan = make_plan(replace(call, source=source))
    call = plan.call
    _report_plan(plan, stats)
    batch = _make_batch(plan)
    target_cache = _make_cache(plan.target, plan)
    states = None if plan.hidden_layers is None else importlib.import_module(_STATES)
    capture = None if states is None else states.make_capture(plan)
    keeps_states = call.is_cache_kept or call.ranks.is_distributed
    compiled = plan.runners.language_model(plan.target, call.max_position, forget_compiled, capture)
    language_model = compiled or LanguageModel(
        call.target, call.max_position, keeps_states, call.target_inputs, capture=capture
    )
    faults = _make_faults(plan, stats)
    told = draft_plan(plan, forget_compiled, partial(faults.meet, is_last=False))
    drafter = call.source.make_drafter(told)
    faults.is_callers = drafter.is_callers
    hidden_states: TargetStates | None = None
    if states is not None:
        hidden_states = states.HiddenStates(plan.hidden_layers, capture is not None, drafter.project_states)
    schedule = _make_schedule(plan, drafter)
    reads_clock = call.config.schedule == "adaptive" and drafter.max_draft_tokens != 0
    draft_length = DraftLength(
        schedule,
        call.max_new_tokens,
        plan.is_lock_step,
        counts_drafted=drafter.drafts_fewer,
        reads_ahead=call.rows_leave,
        ranks=call.ranks,
        group=call.ranks if reads_clock else ONE_PROCESS,
    )
    criteria = call.ranks.wrap_criteria(call.criteria)
    stopping = find_row_lists(call.rows_leave).criteria(criteria, call.batch_size, call.max_length)
    pads_ended_rows = plan.pad_token_id is not None
    stops = StopTracker(stopping, call.batch_size, call.max_new_tokens, pads_ended_rows, plan.is_lock_step)
    max_query = min(call.prefill_chunk_size or MAX_PADDING_QUERY, plan.runners.max_query or MAX_PADDING_QUERY)
    padding = EndPadding(plan.end_padding_id, max_query, max_columns(call.target), call.batch_size, call.ranks)
    wanted = {
        "output_hidden_states": (hidden_states is not None and hidden_states.wanted) or call.recorded.hidden_states,
        "output_attentions": call.recorded.attentions,
    }
    options = {name: value for name, value in wanted.items() if value}
    text_config = call.target.config.get_text_config(decoder=True)
    output = OutputRecorder(call.row_ids, call.recorded, lambda: windows_of(text_config, target_cache.cache))
    target = TargetSession(language_model, target_cache, call.query_ids, call.prefill_chunk_size, options, padding)
    verification = _make_verification(plan, criteria)
    decoder = SpeculativeDecoder(
        target=target,
        drafts=_make_drafts(plan, drafter, hidden_states, faults),
        verification=verification,
        second_scoring=SecondScoring(target, verification, depends_on_draft(call.config), call.ranks),
        stops=stops,
        draft_length=draft_length,
        output=output,
        observers=[*_make_observers(plan, stats, stops), output, draft_length],
        clock=clock,
        keeps_rows=plan.keeps_rows,
    )
    return Prepared(decoder, batch, plan, stats)


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


def _report_plan(plan: Plan, stats: SpeculationStats) -> None:
    stats.plan = repr(plan)
    stats.verifier = plan.call.config.verifier or ""
    stats.cache = plan.target.cache.kind
    stats.compiled, stats.graphed = plan.compiled, list(plan.runners.graphed)
    stats.lock_step = plan.is_lock_step
    for reason in plan.fallbacks:
        stats.add_fallback(reason)
    LOGGER.debug("%s", stats.plan)


def _make_cache(one: ModelPlan, plan: Plan) -> KVCache:
    call = plan.call
    mask, cache = (call.attention_mask, call.cache) if one is plan.target else (call.text_mask, None)
    mask = None if mask is None else mask.to(one.device)
    return one.cache.make(one.model, cache, call.batch_size, mask, one.device, plan.runners.buffers(one))


def _make_batch(plan: Plan) -> Batch:
    call, num_rows = plan.call, plan.call.batch_size
    seeds = plan.call.config.row_seeds(num_rows, call.do_sample).to(call.input_ids.device)
    seeds = call.ranks.broadcast(seeds)
    limits = plan.call.config.draft_limits(num_rows)
    return Batch(
        call.input_ids, seeds, call.max_length, call.num_prompt_tokens, plan.reads_keys, call.first_row, limits
    )


def _make_faults(plan: Plan, stats: SpeculationStats) -> DraftFaults:
    call, device = plan.call, (plan.target if plan.draft is None else plan.draft).device
    return DraftFaults(stats, f"the drafter ({call.source.description})", device, lambda error: True, call.ranks)


def _make_drafts(plan: Plan, drafter: Drafter, hidden_states: TargetStates | None, faults: DraftFaults) -> DraftGuard:
    call, kv_cache, reuse = plan.call, None, None
    if plan.draft is not None:
        kv_cache = _make_cache(plan.draft, plan)
        if call.config.draft_state is not None:
            reuse = importlib.import_module(_REUSE).make_draft_cache_reuse(call, plan.draft.model, kv_cache)
    session = DraftSession(
        drafter,
        kv_cache,
        plan.draft_strategy,
        plan.pad_token_id if plan.is_lock_step else None,
        reuse,
        placeless_id(plan.target.model),
        hidden_states,
        call.ranks,
    )
    is_fixed = plan.is_lock_step or "draft" in plan.runners.parts
    rows_may_leave = not is_fixed and reuse is None and not call.ranks.is_synced
    return DraftGuard(session, faults, call.num_pads, rows_may_leave, call.ranks)


def _make_schedule(plan: Plan, drafter: Drafter) -> Schedule:
    call, most = plan.call, drafter.max_draft_tokens
    config, target = call.config, call.target
    if most == 0:
        return ConstantSchedule(0)
    if most is not None and most < config.max_draft_tokens:  # a round asks for no more than the drafter proposes
        config = replace(config, num_assistant_tokens=most, num_assistant_tokens_schedule=config.schedule)
    key = call.source.history_key()
    kind = (
        *(key.name, target.device, target.dtype, torch.get_num_threads()),
        *(config.verifier, plan.target.cache.kind, *plan.runners.settings, plan.runners.graphed),
        *(plan.is_lock_step, config.max_draft_tokens),
        call.max_length.bit_length(),  # within a factor of two a forward's time changes little
    )
    history = ScheduleHistory(HistoryStore.of(target), key.draft, kind)
    prior = draft_prior(target, call.source)
    return build_schedule(config, prior, history, call.batch_size, plan.steps_have_all_rows)


def _make_verification(plan: Plan, criteria: BlockStoppingCriteria) -> Verification:
    call, config = plan.call, plan.call.config
    rule = make_verifier(config), find_spans(config, call.do_sample, call.num_pads), call.ranks
    if not plan.is_lock_step:
        processors = find_row_lists(call.rows_leave).processors(call.processors, call.batch_size)
        return RowWiseVerification(*rule, processors, keeps_padding=plan.end_padding_id is not None)
    pad = plan.pad_token_id if criteria.eos_token_ids is not None else None
    return LockStepVerification(*rule, call.processors, criteria, pad, call.recorded.scores)


def _make_observers(plan: Plan, stats: SpeculationStats, stops: StopTracker) -> list[Observer]:
    call = plan.call
    observers: list[Observer] = [BadLogitsObserver(stops)] if call.do_sample else []
    observers.append(StatsObserver(stats, int(call.streamer is not None), keeps_rows=plan.steps_have_all_rows))
    if call.streamer is not None:
        observers.append(StreamObserver(call.streamer))
    if call.config.speculation_callback is not None:
        observers.append(CallbackObserver(call.config.speculation_callback))
    return observers
