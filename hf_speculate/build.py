"""Puts a decoder together from a call's settings and its models."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
)

from hf_speculate.batch import Batch, DecoderSettings
from hf_speculate.call import Call
from hf_speculate.carrying import home_choice, make_carrier
from hf_speculate.compiling import Compiler, draft_lens
from hf_speculate.config import DEFAULT_ASSISTANT_TOKENS, SpeculationConfig
from hf_speculate.decoder import SpeculativeDecoder
from hf_speculate.draft.foreign import samples_its_law
from hf_speculate.drafting import DraftPlan, build_drafter, min_draft_query, reads_hidden_states, within_drafter
from hf_speculate.hidden_states import HiddenStates
from hf_speculate.infer.chunks import draft_chunk_size
from hf_speculate.infer.homes import Home
from hf_speculate.infer.language_model import counts_columns, device_of
from hf_speculate.judge import Judge, LockStepJudge, RaggedJudge
from hf_speculate.outputs import OutputRecorder
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.schedule import AdaptiveSchedule, ConstantSchedule, HeuristicSchedule, Schedule
from hf_speculate.sequences import TokenBuffer
from hf_speculate.stats import SpeculationStats
from hf_speculate.stopping import BlockStoppingCriteria
from hf_speculate.triton_kernels.backends import check_backend
from hf_speculate.types import SampleStrategy
from hf_speculate.verify.base import make_verifier

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
    is_lookup = config.prompt_lookup_num_tokens is not None
    if is_lookup:
        draft, config = _with_lookup(target, draft, config, stats)
    block_processors = BlockLogitsProcessorList(call.processors)
    stopping = BlockStoppingCriteria(call.criteria)
    has_eos = stopping.eos_token_ids is not None
    goes_on = not has_eos and call.input_ids.shape[0] > 1
    foreign = [*block_processors.foreign_names, *stopping.foreign_names]
    reason = _lock_step_reason(call, foreign, goes_on, [target] if draft is None else [target, draft])
    if reason:
        stats.lock_step = True
        stats.add_fallback(reason)
    strategy = _draft_strategy(draft, config, call)
    config = _without_idle_block(config, strategy, bool(reason), stats)
    stats.verifier = config.verifier or ""
    is_own = config.drafter is not None
    drafts = is_own or is_lookup or draft is not None or call.generator is not None
    compiler = Compiler(call.static, draft_lens(config) if drafts else (), stats, call.peers is not None)
    batch = _build_batch(target, draft, config, call, compiler)
    stats.cache = batch.target_cache.kind
    offset = call.cache.get_seq_length() + call.query_ids.shape[1] - call.input_ids.shape[1]
    max_position = max(call.max_length + offset - 2, 0)
    target_model = compiler.target(
        target, max_position, batch.target_cache, call.target_context, keeps_states=call.is_cache_kept
    )
    num_query = call.prefill_chunk_size or call.query_ids.shape[1]
    plan = DraftPlan(
        config,
        draft,
        block_processors.for_draft(),
        stopping.eos_token_ids,
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
    drafter = build_drafter(plan, batch)
    text_only = call.draft_context.is_empty
    carrier = make_carrier(config.draft_state, draft, call.vocabulary, call.text_mask) if text_only else None
    if carrier is not None:
        carrier.recall(batch, drafter)
    if reads_hidden_states(drafter):
        batch.states = HiddenStates()
        compiler.run_target_eagerly("eager forwards of the target, whose hidden states the drafter reads")
    config = within_drafter(config, drafter)
    settings = DecoderSettings(
        draft_strategy=strategy,
        max_length=call.max_length,
        pad_token_id=None if goes_on else (call.pad_token_id or 0),
        keeps_rows=call.keeps_rows or call.is_cache_kept or bool(reason) or bool(stats.compiled) or carrier is not None,
        is_lock_step=bool(reason),
        prefill_chunk_size=call.prefill_chunk_size,
        min_draft_query=min_draft_query(drafter),
        drafts_on_host=is_lookup,
        drafts_freely=is_lookup or is_own,
        draws=call.do_sample,
    )
    verifier = make_verifier(config)
    judge: Judge = RaggedJudge(verifier, block_processors, stopping, stats)
    if settings.is_lock_step:
        pad = settings.pad_token_id if has_eos else None
        judge = LockStepJudge(verifier, call.processors, call.criteria, pad, call.recorded.scores, stats)
    decoder = SpeculativeDecoder(
        target=target_model,
        drafter=drafter,
        judge=judge,
        schedule=ConstantSchedule(0) if drafter is None else build_schedule(target, draft, config),
        settings=settings,
        recorder=OutputRecorder(call.input_ids.shape[0], call.recorded),
        stats=stats,
        on_tokens=call.on_tokens,
        carrier=carrier,
        peers=call.peers,
    )
    return decoder, batch


def _with_lookup(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: SpeculationConfig, stats: SpeculationStats
) -> tuple[PreTrainedModel | None, SpeculationConfig]:
    """The draft model that goes beside prompt lookup, if it may gain anything there, and the settings for that."""
    if draft is not None and config.schedule == "adaptive" and _cost_ratio(target, draft) >= 1:
        stats.add_fallback("prompt lookup alone, for a draft model as large as its target gains nothing")
        draft = None
    return draft, config.for_lookup_alone() if draft is None else config


def _lock_step_reason(call: Call, foreign: Sequence[str], goes_on: bool, models: Sequence[PreTrainedModel]) -> str:
    """Why all rows must advance together; empty where they need not.

    Args:
        call: the prepared call.
        foreign: class names of processors and criteria that are not known to be pure and row-wise.
        goes_on: whether ended rows go on until all have ended.
        models: the target and its draft.
    """
    if foreign:
        return f"lock step, for {', '.join(foreign)}; declare pure ones with register_row_wise"
    ends_apart = any(type(criterion) not in (MaxLengthCriteria, MaxTimeCriteria) for criterion in call.criteria)
    has_windows = any(call.cache.is_sliding)
    if goes_on and ends_apart and call.is_cache_kept and has_windows:
        return "lock step, because rows without EOS are cut back to one length, past what window layers can restore"
    counting = sorted({type(model).__name__ for model in models if counts_columns(model)})
    if counting and call.input_ids.shape[0] > 1:
        return f"lock step, for {', '.join(counting)} takes no positions but counts columns"
    return ""


def _without_idle_block(
    config: SpeculationConfig, strategy: SampleStrategy, is_lock_step: bool, stats: SpeculationStats
) -> SpeculationConfig:
    """The settings, with rejection in place of block where that gains nothing; the statistics say so."""
    if config.verifier != "block":
        return config
    if is_lock_step:
        stats.add_fallback("rejection in place of block, for rows in lock step are judged token by token")
    elif strategy is SampleStrategy.GREEDY:
        stats.add_fallback("rejection in place of block, which is the same where the draft takes its argmax")
    else:
        return config
    return replace(config, verifier="rejection")


def _draft_strategy(draft: PreTrainedModel | None, config: SpeculationConfig, call: Call) -> SampleStrategy:
    drafts_itself = draft is not None or config.drafter is not None
    samples = drafts_itself and call.do_sample and config.draft_sampling == "sample"
    if call.generator is not None:
        samples = call.do_sample and samples_its_law(call.generator)
    return SampleStrategy.RANDOM if samples else SampleStrategy.GREEDY


def build_schedule(target: PreTrainedModel, draft: PreTrainedModel | None, config: SpeculationConfig) -> Schedule:
    """The schedule that the settings name.

    Args:
        target: the model that is sped up.
        draft: the draft model; None: drafts cost next to nothing.
        config: resolved settings.
    """
    match config.schedule:
        case "adaptive":
            ratio = 0.0 if draft is None else _cost_ratio(target, draft)
            return AdaptiveSchedule(config.max_draft_tokens, ratio)
        case "heuristic" | "heuristic_transient":
            return HeuristicSchedule(config.num_assistant_tokens or DEFAULT_ASSISTANT_TOKENS)
        case _:
            return ConstantSchedule(config.max_draft_tokens)


def _cost_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    return _num_bytes(draft) / max(_num_bytes(target), 1)


def _num_bytes(model: PreTrainedModel) -> int:
    """Of the parameters that a decoding step reads, once each: an encoder's are not among them."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    return sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())


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
    num_prompt_tokens = [num_masked] * batch_size if mask is None else mask.sum(1).tolist()
    return Batch(
        tokens=TokenBuffer(call.input_ids, capacity=min(call.max_length, prompt_len + _FIRST_CAPACITY)),
        query_ids=call.query_ids,
        target_cache=target_cache,
        draft_cache=draft_cache,
        seeds=config.row_seeds(batch_size, call.do_sample).to(device),
        num_prompt_tokens=num_prompt_tokens,
        num_pads=call.num_pads,
    )
