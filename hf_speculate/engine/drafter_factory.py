"""Drafter factory: makes the drafter of a planned call."""

import importlib
from collections.abc import Callable
from functools import partial

from hf_speculate.draft.base import DraftCompilation, Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.custom import CustomDrafter
from hf_speculate.draft.from_candidate_generator import CandidateGeneratorDrafter
from hf_speculate.draft.hybrid import HybridDrafter
from hf_speculate.draft.model import ModelDrafter, TranslatedDrafter
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.draft.vocab_mapping import TranslatedLanguageModel
from hf_speculate.engine.call import Call
from hf_speculate.engine.model_plan import ModelPlan
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.row_lists import find_row_lists
from hf_speculate.engine.runners import draft_lens
from hf_speculate.models.context import context_of
from hf_speculate.models.inferencer import Inferencer, draft_chunk_size
from hf_speculate.models.language_model import LanguageModel, vocab_size_of
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.per_row import PerRow
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.transfers import upload
from hf_speculate.triton_kernels.backends import runs_kernels
from hf_speculate.types import DraftOut
from hf_speculate.verify.base import traits_of

_FUSED_WARPERS = "hf_speculate.options.cuda.fused_warpers"  # imported where a draft model samples with kernels


def make_custom_drafter(call: Call, on_failure: Callable[[str, str], None]) -> Drafter | None:
    """The user's own drafter, or an adapter of a candidate generator; None if the call has neither."""
    if call.config.drafter is not None:
        return CustomDrafter(call.config.drafter, _setup(call, on_failure))
    return None if call.generator is None else CandidateGeneratorDrafter(call.generator)


class NoDrafter(PerRow, Drafter):
    """The drafter of a call that decodes token by token."""

    max_draft_tokens = 0
    can_join = True

    def draft(self, request: DraftRequest) -> DraftOut:
        raise NotImplementedError


def make_drafter(plan: Plan, on_failure: Callable[[str, str], None], meet: Callable[[], None]) -> Drafter:
    """The drafter of a plan, unless it is a custom one; with synced ranks, `meet` is called before its forwards."""
    config, device = plan.call.config, plan.target.device
    model = None if plan.draft is None else _model_drafter(plan, plan.draft, on_failure, meet)
    if config.prompt_lookup_num_tokens is None:
        return model or NoDrafter()
    settings = SuffixSettings(
        max_draft_tokens=config.prompt_lookup_num_tokens,
        max_match_len=config.max_matching_ngram_size,
        eos_token_ids=plan.call.criteria.eos_token_ids or frozenset(),
        vocab_size=vocab_size_of(plan.target.model),
        store=config.suffix_store,
        num_pads=plan.call.num_pads,
    )
    if model is None:
        return SuffixDrafter(settings, device)
    return HybridDrafter(model, settings, config.max_model_tokens, device)


def _setup(call: Call, on_failure: Callable[[str, str], None]) -> DrafterSetup:
    config, traits, compilation = call.config, traits_of(call.config), None
    settings = call.static.settings.get("target")
    if settings is not None:
        compilation = DraftCompilation(settings, draft_lens(config), CompiledUnits(), partial(on_failure, "draft"))
    return DrafterSetup(
        target=call.target,
        batch_size=call.batch_size,
        num_pads=tuple(call.num_pads),
        max_length=call.max_length,
        max_draft_tokens=config.max_draft_tokens,
        vocab_size=vocab_size_of(call.target),
        eos_token_ids=call.criteria.eos_token_ids or frozenset(),
        device=call.input_ids.device,
        processors=call.processors.for_draft(),
        stream=traits.draft_stream,
        keeps_logits=traits.reads_draft_logits,
        confidence_threshold=config.assistant_confidence_threshold or 0.0,
        backend=config.verifier_backend,
        compilation=compilation,
    )


def _model_drafter(
    plan: Plan, draft: ModelPlan, on_failure: Callable[[str, str], None], meet: Callable[[], None]
) -> ModelDrafter:
    call, config, device = plan.call, plan.call.config, draft.device
    context = context_of(draft.model, call.input_ids.shape[1] - min(call.num_pads))
    max_position = call.max_position if context is None else min(call.max_position, context.num_tokens - 1)
    if context is not None and context.num_tokens >= call.max_length and not call.ranks.is_synced:
        context = None  # out of reach; another rank's rows may be longer
    num_query = call.prefill_chunk_size or call.query_ids.shape[1]
    chunk_size = None if call.ranks.is_synced else draft_chunk_size(plan.target.model, draft.model, num_query)
    eos, processors = call.criteria.eos_token_ids, call.processors.for_draft()
    if device.type == "cuda" and runs_kernels(config.verifier_backend, device):
        fused = importlib.import_module(_FUSED_WARPERS).fuse_warpers(processors, config.verifier_backend)
        processors = BlockLogitsProcessorList(fused)
    of_rows = find_row_lists(call.rows_leave).processors(processors, call.batch_size)
    traits = traits_of(config)
    settings = DraftSettings(
        eos_token_ids=None if eos is None else upload(sorted(eos), device),
        confidence_threshold=config.assistant_confidence_threshold or 0.0,
        keeps_logits=traits.reads_draft_logits,
        stream=traits.draft_stream,
        backend=config.verifier_backend,
    )
    drafter = plan.runners.model_drafter(draft, max_position, on_failure, chunk_size, processors, settings, context)
    if drafter is not None:
        return drafter
    arguments = draft.model, max_position, call.ranks.is_distributed, draft.inputs
    rest = chunk_size, not call.ranks.is_distributed, meet if call.ranks.is_synced else None
    if call.vocabulary is None:
        return ModelDrafter(Inferencer(LanguageModel(*arguments), *rest), of_rows, settings, context)
    translated = TranslatedLanguageModel(call.vocabulary, *arguments)
    inferencer, out_device = Inferencer(translated, *rest), plan.target.device
    return TranslatedDrafter(inferencer, translated, of_rows, settings, context, out_device)
