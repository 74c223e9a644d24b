"""Settles what depends on several of a call's settings at once, before anything is made."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from transformers import MaxLengthCriteria, MaxTimeCriteria, PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.from_candidate_generator import samples_its_law
from hf_speculate.engine.call import Call
from hf_speculate.engine.distributed import num_shards
from hf_speculate.models.language_model import counts_columns
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import SampleStrategy


class Choices(NamedTuple):
    """What a call's settings come to."""

    draft: PreTrainedModel | None
    config: SpeculationConfig
    processors: BlockLogitsProcessorList
    stopping: BlockStoppingCriteria
    strategy: SampleStrategy  # of the drafter
    lock_step: str  # why all rows advance together; empty where they need not
    goes_on: bool  # whether ended rows go on until all have ended

    @property
    def has_eos(self) -> bool:
        """Whether a token ends a row."""
        return self.stopping.eos_token_ids is not None

    @property
    def is_lookup(self) -> bool:
        """Whether rows copy."""
        return self.config.prompt_lookup_num_tokens is not None

    @property
    def has_drafts(self) -> bool:
        """Whether anything drafts."""
        others = self.config.drafter is not None or self.config.candidate_generator is not None
        return self.draft is not None or self.is_lookup or others


def choose(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    config: SpeculationConfig,
    call: Call,
    stats: SpeculationStats,
) -> Choices:
    """What the settings come to; the statistics are told what is otherwise than asked.

    Args:
        target: scores the drafts.
        draft: proposes; None where no model does.
        config: resolved settings.
        call: what the call prepared.
        stats: told of fallbacks.
    """
    if config.prompt_lookup_num_tokens is not None:
        draft, config = _with_lookup(target, draft, config, stats)
    processors = BlockLogitsProcessorList(call.processors)
    stopping = BlockStoppingCriteria(call.criteria)
    goes_on = stopping.eos_token_ids is None and call.input_ids.shape[0] > 1
    foreign = [*processors.foreign_names, *stopping.foreign_names]
    lock_step = _lock_step_reason(call, foreign, goes_on, [target] if draft is None else [target, draft])
    if lock_step:
        stats.lock_step = True
        stats.add_fallback(lock_step)
    strategy = _draft_strategy(draft, config, call)
    config = _without_idle_block(config, strategy, bool(lock_step), stats)
    stats.verifier = config.verifier or ""
    return Choices(draft, config, processors, stopping, strategy, lock_step, goes_on)


def _with_lookup(
    target: PreTrainedModel, draft: PreTrainedModel | None, config: SpeculationConfig, stats: SpeculationStats
) -> tuple[PreTrainedModel | None, SpeculationConfig]:
    """The draft model that goes beside prompt lookup, if it may gain anything there, and the settings for that."""
    if draft is not None and config.schedule == "adaptive" and cost_ratio(target, draft) >= 1:
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
    counting = sorted({type(model).__name__ for place, model in enumerate(models) if counts_columns(model, place > 0)})
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


def cost_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """The draft's parameter bytes in one process over the target's.

    Args:
        target: the model that is sped up.
        draft: the draft model.
    """
    return _num_bytes(draft) / max(_num_bytes(target), 1)


def _num_bytes(model: PreTrainedModel) -> int:
    """Of the parameters that a decoding step reads in one process, once each: an encoder's are not among them."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    num = sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())
    return num // num_shards(model)
