"""Puts a decoder together from a call's settings and its models."""

import torch
from transformers import PreTrainedModel

from hf_speculate.config import DEFAULT_ASSISTANT_TOKENS, SpeculationConfig
from hf_speculate.engine.batch import Batch, DecoderSettings
from hf_speculate.engine.broadcast import (
    BlockStopping,
    Criteria,
    LedDrafter,
    LedSchedule,
    LedVerifier,
    led_criteria,
    led_stopping,
)
from hf_speculate.engine.call import Call
from hf_speculate.engine.compile_plan import Compiler, draft_lens
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.draft_cache_reuse import home_choice, make_carrier
from hf_speculate.engine.drafter_factory import (
    DraftPlan,
    build_drafter,
    hidden_states_for,
    min_draft_query,
    within_drafter,
)
from hf_speculate.engine.model_state import model_state
from hf_speculate.engine.outputs import OutputRecorder
from hf_speculate.engine.plan import Choices, choose, cost_ratio
from hf_speculate.engine.verification import Judge, LockStepJudge, RaggedJudge
from hf_speculate.models.cache_selection import Home
from hf_speculate.models.chunks import draft_chunk_size
from hf_speculate.models.language_model import device_of
from hf_speculate.schedule import AdaptiveSchedule, ConstantSchedule, HeuristicSchedule, Schedule, ScheduleHistory
from hf_speculate.stats import SpeculationStats
from hf_speculate.token_buffer import TokenBuffer
from hf_speculate.triton_kernels.backends import check_backend
from hf_speculate.verify.base import Verifier, make_verifier
from hf_speculate.verify.spans import make_spans

_FIRST_CAPACITY = 1024  # tokens to come for which a row's buffer is made; it grows where that is not enough


def build_decoder(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: SpeculationConfig, call: Call
) -> tuple[SpeculativeDecoder, Batch]:
    """The decoder and the batch it is to decode.

    Args:
        target: scores the drafts.
        draft: proposes; None where nothing is drafted.
        config: resolved settings.
        call: what the call prepared.

    Raises:
        ConfigError: the verifier is unknown, or there is not one seed per row.
        KernelUnavailableError: the backend was asked for by name and cannot run where a model lies.
    """
    for model in (target, draft):
        if model is not None:
            check_backend(config.verifier_backend, device_of(model))
    stats = SpeculationStats() if config.speculation_stats is None else config.speculation_stats
    choices = choose(target, draft, config, call, stats)
    draft, config = choices.draft, choices.config
    is_synced = call.peers is not None or call.shards is not None
    compiler = Compiler(call.static, draft_lens(config) if choices.has_drafts else (), stats, is_synced)
    batch = _build_batch(target, draft, config, call, compiler)
    stats.cache = batch.target_cache.kind
    offset = call.cache.get_seq_length() + call.query_ids.shape[1] - call.input_ids.shape[1]
    max_position = max(call.max_length + offset - 2, 0)
    target_model = compiler.target(
        target, max_position, batch.target_cache, call.target_context, keeps_states=call.is_cache_kept
    )
    drafter = build_drafter(_draft_plan(target, choices, call, compiler, max_position), batch)
    text_only = call.draft_context.is_empty
    carrier = make_carrier(config.draft_state, draft, call.vocabulary, call.text_mask) if text_only else None
    if carrier is not None:
        carrier.recall(batch, drafter)
    batch.states = hidden_states_for(drafter)
    if batch.states is not None:
        compiler.run_target_eagerly("eager forwards of the target, whose hidden states the drafter reads")
    keeps_rows = call.keeps_rows or call.is_cache_kept or bool(stats.compiled) or carrier is not None
    settings = _decoder_settings(choices, call, min_draft_query(drafter), keeps_rows)
    schedule: Schedule = ConstantSchedule(0)
    if drafter is not None:
        schedule_config = within_drafter(config, drafter)
        memory = _round_memory(target, choices, call, stats, schedule_config.max_draft_tokens)
        schedule = build_schedule(target, draft, schedule_config, memory, call.input_ids.shape[0])
        if call.shards is not None:
            drafter = LedDrafter(drafter, call.shards)
            if config.schedule == "adaptive":  # others do not read the clock
                schedule = LedSchedule(schedule, call.shards)
    decoder = SpeculativeDecoder(
        target=target_model,
        drafter=drafter,
        judge=_judge(choices, call, settings, stats),
        schedule=schedule,
        settings=settings,
        recorder=OutputRecorder(call.input_ids.shape[0], call.recorded),
        stats=stats,
        on_tokens=call.on_tokens,
        carrier=carrier,
        peers=call.peers,
        on_round=config.speculation_callback,
    )
    return decoder, batch


def _draft_plan(
    target: PreTrainedModel, choices: Choices, call: Call, compiler: Compiler, max_position: int
) -> DraftPlan:
    draft = choices.draft
    num_query = call.prefill_chunk_size or call.query_ids.shape[1]
    return DraftPlan(
        choices.config,
        draft,
        choices.processors.for_draft(),
        choices.stopping.eos_token_ids,
        max_position,
        compiler,
        num_pads=call.num_pads,
        vocab_size=target.config.get_text_config(decoder=True).vocab_size,
        context=call.draft_context,
        target=target,
        max_length=call.max_length,
        chunk_size=None if draft is None or call.peers else draft_chunk_size(target, draft, num_query),
        vocabulary=call.vocabulary,
        generator=call.generator,
    )


def _decoder_settings(choices: Choices, call: Call, min_draft_query: int, keeps_rows: bool) -> DecoderSettings:
    return DecoderSettings(
        draft_strategy=choices.strategy,
        max_length=call.max_length,
        pad_token_id=None if choices.goes_on else (call.pad_token_id or 0),
        keeps_rows=keeps_rows or bool(choices.lock_step),
        is_lock_step=bool(choices.lock_step),
        prefill_chunk_size=call.prefill_chunk_size,
        min_draft_query=min_draft_query,
        drafts_on_host=choices.is_lookup,
        drafts_freely=choices.is_lookup or choices.config.drafter is not None,
        draws=call.do_sample,
    )


def _judge(choices: Choices, call: Call, settings: DecoderSettings, stats: SpeculationStats) -> Judge:
    shards = call.shards

    def led(verifier: Verifier) -> Verifier:
        return verifier if shards is None else LedVerifier(verifier, shards)

    verifier = led(make_verifier(choices.config))
    stopping: BlockStopping = choices.stopping
    criteria: Criteria = call.criteria
    if shards is not None and not choices.stopping.reads_text_alone:
        stopping, criteria = led_stopping(stopping, shards), led_criteria(criteria, shards)
    spans = make_spans(choices.config, call.do_sample, call.num_pads or [0] * call.input_ids.shape[0], led)
    if not settings.is_lock_step:
        return RaggedJudge(verifier, choices.processors, stopping, stats, spans)
    pad = settings.pad_token_id if choices.has_eos else None
    return LockStepJudge(verifier, call.processors, criteria, pad, call.recorded.scores, stats, spans)


def _round_memory(
    target: PreTrainedModel, choices: Choices, call: Call, stats: SpeculationStats, max_draft_tokens: int
) -> ScheduleHistory | None:
    """Where calls like this one leave what they learn; None for drafters of which nothing is known."""
    config, draft = choices.config, choices.draft
    if config.drafter is not None or call.generator is not None:
        return None
    machine = (target.device, target.dtype, torch.get_num_threads())
    way = (config.verifier, stats.cache, tuple(stats.compiled), choices.is_lookup, bool(choices.lock_step))
    length = call.max_length.bit_length()  # within a factor of two a forward's time changes little
    return ScheduleHistory(model_state(target).history, draft, (*machine, *way, length, max_draft_tokens))


def build_schedule(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    config: SpeculationConfig,
    memory: ScheduleHistory | None = None,
    batch_size: int = 1,
) -> Schedule:
    """The schedule that the settings name.

    Args:
        target: the model that is sped up.
        draft: the draft model; None: drafts cost next to nothing.
        config: resolved settings.
        memory: of what rounds cost in earlier calls; None: nothing is kept.
        batch_size: B.
    """
    match config.schedule:
        case "adaptive":
            ratio = 0.0 if draft is None else cost_ratio(target, draft)
            return AdaptiveSchedule(config.max_draft_tokens, ratio, memory, batch_size)
        case "heuristic" | "heuristic_transient":
            return HeuristicSchedule(config.num_assistant_tokens or DEFAULT_ASSISTANT_TOKENS)
        case _:
            return ConstantSchedule(config.max_draft_tokens)


def _build_batch(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: SpeculationConfig, call: Call, compiler: Compiler
) -> Batch:
    batch_size, prompt_len = call.input_ids.shape
    device = call.input_ids.device
    mask = call.attention_mask
    num_masked = call.cache.get_seq_length() + call.query_ids.shape[1]
    max_columns = call.max_length + num_masked - prompt_len
    home = Home(
        config.speculation_cache,
        call.target_attention,
        call.is_cache_passed,
        call.is_cache_kept,
        call.recorded.attentions,
        call.target_context.crosses,
        max_columns=max_columns,
        capacity=compiler.capacity(max_columns),
        is_pooled=compiler.is_compiling,
    )
    target_cache = home.make(target, call.cache, batch_size, mask, device)
    draft_cache = None
    if draft is not None:
        draft_mask = None if call.text_mask is None else call.text_mask.to(device_of(draft))
        home = Home(
            home_choice(config.speculation_cache, None if call.static else config.draft_state, draft),
            call.draft_attention,
            crosses=call.draft_context.crosses,
            max_columns=call.max_length,
            capacity=compiler.capacity(call.max_length),
            is_pooled=compiler.is_compiling,
        )
        draft_cache = home.make(draft, None, batch_size, draft_mask, device_of(draft))
    seeds = config.row_seeds(batch_size, call.do_sample).to(device)
    num_prompt_tokens = [num_masked] * batch_size if mask is None else mask.sum(1).tolist()
    return Batch(
        tokens=TokenBuffer(call.input_ids, capacity=min(call.max_length, prompt_len + _FIRST_CAPACITY)),
        query_ids=call.query_ids,
        target_cache=target_cache,
        draft_cache=draft_cache,
        seeds=seeds if call.shards is None else call.shards.first(seeds),
        num_prompt_tokens=num_prompt_tokens,
        num_pads=call.num_pads,
    )
