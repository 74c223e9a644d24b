"""Makes the drafter that a call's settings name."""

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import Drafter, DrafterRequest
from hf_speculate.draft.compiled import UNIT_QUERY_LEN, CompiledDrafter
from hf_speculate.draft.custom import OwnDrafter
from hf_speculate.draft.from_candidate_generator import ForeignDrafter, layers_read
from hf_speculate.draft.from_state_reading_generator import StateReadingDrafter
from hf_speculate.draft.hybrid import HybridDrafter
from hf_speculate.draft.model import DraftSettings, ModelDrafter
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings
from hf_speculate.draft.vocab_mapping import TranslatedLanguageModel, Vocabulary
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.compile_plan import Compiler
from hf_speculate.engine.hidden_states import HiddenStates
from hf_speculate.models.compiled import CompiledLanguageModel
from hf_speculate.models.extra_inputs import Context
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import device_of, last_position
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.verify.base import draft_stream, reads_draft_logits


@dataclass(frozen=True)
class DraftPlan:
    """What a drafter is made of.

    Args:
        config: resolved settings.
        draft: the draft model; None: there is none.
        processors: row-wise ones, applied to the draft's logits; see `for_draft`.
        eos_token_ids: ids after which a row needs no further token; None: none.
        max_position: upper bound of position ids; the draft's own table may bound them further.
        compiler: decides whether the draft model runs compiled.
        num_pads: [B] tokens of padding before each prompt; None: none.
        vocab_size: the target's V.
        context: what the draft model reads besides the text.
        target: the model that judges.
        max_length: columns of the output at most.
        chunk_size: tokens of each row per forward of the draft at most, where a prompt is fed; None: all at once.
        vocabulary: how the draft's ids stand to the target's; None: they are the same.
        generator: what drafts in place of a model; None: a model does, or nothing.
    """

    config: SpeculationConfig
    draft: PreTrainedModel | None
    processors: BlockLogitsProcessorList
    eos_token_ids: frozenset[int] | None
    max_position: int
    compiler: Compiler
    num_pads: list[int] | None
    vocab_size: int
    context: Context
    target: PreTrainedModel
    max_length: int
    chunk_size: int | None = None
    vocabulary: Vocabulary | None = None
    generator: CandidateGenerator | None = None


def build_drafter(plan: DraftPlan, batch: Batch) -> Drafter | None:
    """The drafter, or None where nothing is drafted.

    Args:
        plan: see `DraftPlan`.
        batch: the rows, with their caches.
    """
    config, device = plan.config, batch.tokens.token_ids.device
    if config.drafter is not None:
        return OwnDrafter(config.drafter, _request(plan, batch))
    match (plan.draft, config.prompt_lookup_num_tokens, plan.generator):
        case None, None, CandidateGenerator() as generator:
            layers = layers_read(generator)
            return ForeignDrafter(generator) if layers is None else StateReadingDrafter(generator, layers)
        case None, int(num), None:
            return SuffixDrafter(_suffix_settings(plan, num), device)
        case PreTrainedModel() as draft, None, None:
            return _model_drafter(plan, draft, batch)
        case PreTrainedModel() as draft, int(num), None:
            model = _model_drafter(plan, draft, batch)
            return HybridDrafter(model, _suffix_settings(plan, num), config.max_model_tokens, device)
    return None


def hidden_states_for(drafter: Drafter | None) -> HiddenStates | None:
    """Where the target's hidden states wait for a drafter; None: it reads none."""
    if isinstance(drafter, OwnDrafter) and drafter.reads_hidden_states:
        return HiddenStates()
    return HiddenStates(drafter.layers) if isinstance(drafter, StateReadingDrafter) else None


def within_drafter(config: SpeculationConfig, drafter: Drafter | None) -> SpeculationConfig:
    """The settings of the schedule, which asks a drafter for no more tokens than it proposes."""
    most = drafter.max_draft_tokens if isinstance(drafter, OwnDrafter) else None
    if most is None or most >= config.max_draft_tokens:
        return config
    return replace(config, num_assistant_tokens=most, num_assistant_tokens_schedule=config.schedule)


def min_draft_query(drafter: Drafter | None) -> int:
    """Tokens of each row that a drafter is fed at least."""
    model = drafter.model if isinstance(drafter, HybridDrafter) else drafter
    return UNIT_QUERY_LEN if isinstance(model, CompiledDrafter) else 1


def _request(plan: DraftPlan, batch: Batch) -> DrafterRequest:
    config, batch_size = plan.config, len(batch.row_ids)
    return DrafterRequest(
        target=plan.target,
        batch_size=batch_size,
        num_pads=tuple(plan.num_pads or [0] * batch_size),
        max_length=plan.max_length,
        max_draft_tokens=config.max_draft_tokens,
        vocab_size=plan.vocab_size,
        eos_token_ids=plan.eos_token_ids or frozenset(),
        device=batch.tokens.token_ids.device,
        processors=plan.processors,
        stream=draft_stream(config),
    )


def _suffix_settings(plan: DraftPlan, num: int) -> SuffixSettings:
    config = plan.config
    return SuffixSettings(
        max_draft_tokens=num,
        max_match_len=config.max_matching_ngram_size,
        eos_token_ids=plan.eos_token_ids or frozenset(),
        vocab_size=plan.vocab_size,
        store=config.suffix_store,
        num_pads=plan.num_pads,
    )


def _model_drafter(plan: DraftPlan, draft: PreTrainedModel, batch: Batch) -> ModelDrafter:
    config, is_synced = plan.config, plan.compiler.is_synced
    last = last_position(draft)
    max_position = plan.max_position if last is None else min(plan.max_position, last)
    eos = None if plan.eos_token_ids is None else torch.tensor(sorted(plan.eos_token_ids), device=device_of(draft))
    settings = DraftSettings(
        eos_token_ids=eos,
        confidence_threshold=config.assistant_confidence_threshold or 0.0,
        keeps_logits=reads_draft_logits(config),
        stream=draft_stream(config),
        backend=config.verifier_backend,
    )
    if plan.vocabulary is not None:
        translated = TranslatedLanguageModel(draft, plan.vocabulary, max_position, plan.context, is_synced)
        inferencer = Inferencer(translated, chunk_size=plan.chunk_size, stops_early=not is_synced)
        return ModelDrafter(inferencer, plan.processors, settings)
    is_unrolled = not len(plan.processors) and not settings.confidence_threshold
    language_model = plan.compiler.draft(draft, max_position, batch.draft_cache, plan.context, is_unrolled=is_unrolled)
    if isinstance(language_model, CompiledLanguageModel):
        return CompiledDrafter(language_model, plan.compiler.lens, plan.processors, settings, plan.chunk_size)
    inferencer = Inferencer(language_model, chunk_size=plan.chunk_size, stops_early=not is_synced)
    return ModelDrafter(inferencer, plan.processors, settings)
