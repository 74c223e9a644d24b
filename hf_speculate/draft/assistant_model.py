"""Draft source for draft models.

It makes a drafter from a smaller model and maps the model's vocabulary to the target's.
"""

import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.draft.acceptance_tallies import AcceptanceBound, AcceptanceTallies, DraftCounts
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.model import ModelDrafter, TranslatedDrafter
from hf_speculate.draft.named import NamedDrafts
from hf_speculate.draft.no_drafts import NoDrafts
from hf_speculate.draft.source import VARIANTS, DraftSource, HistoryKey, hint_of, load_entry
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.draft.vocab_mapping import (
    MAX_PADDING,
    TranslatedLanguageModel,
    VocabMapping,
    padding_mapping,
)
from hf_speculate.errors import UnsupportedModelError, warn_user
from hf_speculate.models.context import context_of
from hf_speculate.models.inferencer import Inferencer, draft_chunk_size
from hf_speculate.models.language_model import LanguageModel, device_of, input_table, vocab_size_of
from hf_speculate.models.recurrent_layers import reads_prompts_in_chunks
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.stats import SpeculationStats
from hf_speculate.transfers import upload

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners

# Imported when two tokenizers are compared.
_VOCABULARIES = "hf_speculate.draft.vocab_intersection"
# From a draft with another tokenizer, one token in hundreds is accepted by coincidence. From a poor
# draft with the same tokenizer, one token in ten is accepted. The bound is wrong for 1 poor draft
# in 100.
VERIFIED_TOKENS_BOUND = AcceptanceBound(least_rate=0.02, num_drafted=64)


class AssistantModel(DraftSource):
    """Draft source for calls with a draft model."""

    argument = "assistant_model"
    hint = hint_of("assistant_model")
    model: PreTrainedModel
    # whether the draft is assumed to have the target's vocabulary, as no tokenizers were compared
    is_vocabulary_assumed = False
    reads_text = True  # whether the draft can read the prompt; otherwise, any draft is poor

    def __init__(self, model: PreTrainedModel, name: str = ""):
        self.model = model
        self.name = name  # folder or repository of the model; empty if the call gave none

    @property
    def generation_config(self) -> GenerationConfig | None:  # type: ignore[override]
        return getattr(self.model, "generation_config", None)

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"model {type(self.model).__name__}"

    def resolve(self, target: PreTrainedModel, arguments: Mapping[str, Any]) -> DraftSource:
        tokenizer, assistant_tokenizer = (
            arguments.get(name) for name in ("tokenizer", "assistant_tokenizer")
        )
        if self.name and tokenizer is not None and assistant_tokenizer is None:
            assistant_tokenizer = find_tokenizer(self.name)
        resolved = copy.copy(self)
        resolved.vocabulary = map_vocabularies(target, self.model, tokenizer, assistant_tokenizer)
        resolved.is_vocabulary_assumed = resolved.vocabulary is None and None in (
            tokenizer,
            assistant_tokenizer,
        )
        resolved.eager_reason = (
            "" if resolved.vocabulary is None else "its ids are mapped to the target's"
        )
        resolved.reads_text = arguments.get("inputs_embeds") is None
        return resolved

    def without_model(self) -> DraftSource:
        return NoDrafts(self.argument, self.hint)

    def history_key(self) -> HistoryKey:
        return HistoryKey(self.model, ("model", False))

    def make_drafter(
        self, setup: DrafterSetup, runners: "Runners", meet: Callable[[], None] | None = None
    ) -> ModelDrafter:
        model, device = self.model, device_of(self.model)
        context, is_synced = context_of(model, setup.prompt_len), meet is not None
        max_position = (
            setup.max_position
            if context is None
            else min(setup.max_position, context.num_tokens - 1)
        )
        # Rows on other ranks and rows that join later may be longer.
        has_others = is_synced or setup.processors.can_join
        if context is not None and context.num_tokens >= setup.max_length and not has_others:
            context = None  # the call cannot reach the limit
        reads_whole = is_synced or setup.inputs.awaits_prompt or not reads_prompts_in_chunks(model)
        chunk_size = None if reads_whole else draft_chunk_size(setup.target, model, setup.num_query)
        settings = DraftSettings(
            eos_token_ids=upload(sorted(setup.eos_token_ids), device)
            if setup.eos_token_ids
            else None,
            confidence_threshold=setup.confidence_threshold,
            keeps_logits=setup.keeps_logits,
            stream=setup.stream,
            backend=setup.backend,
        )
        compiled = runners.model_drafter(model, setup, max_position, chunk_size, settings, context)
        if compiled is not None:
            return compiled
        options: dict[str, Any] = {"max_position": max_position, "extra_inputs": setup.inputs}
        options["keeps_states"] = setup.is_distributed
        vocabulary = self.vocabulary
        translated = (
            None if vocabulary is None else TranslatedLanguageModel(vocabulary, model, **options)
        )
        inferencer = Inferencer(
            LanguageModel(model, **options) if translated is None else translated,
            chunk_size=chunk_size,
            stops_early=not setup.is_distributed,
            meet=meet,
        )
        if translated is None:
            return ModelDrafter(inferencer, setup.processors, settings, context)
        return TranslatedDrafter(
            inferencer, translated, setup.processors, settings, context, setup.device
        )

    def after_call(self, target: PreTrainedModel, stats: SpeculationStats) -> None:
        """Warn once if almost none of the drafted tokens were accepted.

        The likely cause is a different vocabulary of the same size.
        """
        if not (self.is_vocabulary_assumed and self.reads_text):
            return
        verified = DraftCounts(stats.num_verified, stats.num_accepted)
        if AcceptanceTallies.of(target).add(self.model, verified, VERIFIED_TOKENS_BOUND):
            names = [
                str(model.name_or_path) or type(model).__name__ for model in (target, self.model)
            ]
            warn_user(
                f"fewer than {VERIFIED_TOKENS_BOUND.least_rate:.0%} of the draft tokens were "
                "accepted; the "
                f"vocabularies of {names[0]} and {names[1]} have the same size but may differ: "
                "pass tokenizer= and "
                "assistant_tokenizer= if they do"
            )


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> DraftSource:
    """Make the draft source for `assistant_model`.

    The argument is a model, its name or wrapper, or an object that names another source.
    """
    assistant, name = unwrapped(values["assistant_model"], "assistant_model"), ""
    if isinstance(assistant, str | Path):
        name = str(assistant)
        assistant = NamedDrafts.of(target).get(name, target)
    variant = variant_of(assistant)
    if variant is not None:
        source: DraftSource = load_entry(VARIANTS[variant])(
            target, {**values, "assistant_model": assistant}
        )
        return source
    return AssistantModel(assistant, name)


def variant_of(assistant: Any) -> str | None:
    """Return the key in `VARIANTS` for an object or its model type; None for other models."""
    model_type = getattr(getattr(assistant, "config", None), "model_type", None)
    variant: str | None = getattr(
        assistant, "draft_source", model_type if model_type in VARIANTS else None
    )
    return variant


def map_vocabularies(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> VocabMapping | None:
    """Return the vocabulary mapping from the draft to the target; None if they share a vocabulary.

    Vocabularies of equal size count as equal unless both tokenizers are given and differ. If the
    sizes differ and a tokenizer is not given, it is looked up in local files under its model's
    `name_or_path`.
    """
    num_target, num_draft = (vocab_size_of(model) for model in (target, draft))
    has_tokenizers = tokenizer is not None and assistant_tokenizer is not None
    num_read, num_scored = table_sizes(draft)
    if num_target == num_draft and not has_tokenizers:
        # Neither model may read ids that have no embedding in the draft or lie past its vocabulary.
        fits = num_read >= num_draft and num_scored <= num_draft
        return None if fits else padding_mapping(num_target, min(num_read, num_draft))
    target_tokenizer = find_tokenizer(str(target.name_or_path)) if tokenizer is None else tokenizer
    draft_tokenizer = (
        find_tokenizer(str(draft.name_or_path))
        if assistant_tokenizer is None
        else assistant_tokenizer
    )
    if target_tokenizer is not None and draft_tokenizer is not None:
        vocabularies = importlib.import_module(_VOCABULARIES)
        if vocabularies.are_equal(target_tokenizer, draft_tokenizer):
            return None if num_target == num_draft else padding_mapping(num_target, num_draft)
        if has_tokenizers:
            common: VocabMapping = vocabularies.intersect_vocabularies(
                target_tokenizer, draft_tokenizer, num_target, num_draft
            )
            return common
        why = "their tokenizers differ"
    elif abs(num_target - num_draft) <= MAX_PADDING and _eos_ids(target) == _eos_ids(draft):
        warn_user(
            f"the target has {num_target} ids and the draft {num_draft}; their tokenizers were not "
            "found, so ids are "
            "taken to be the same but for padding; pass tokenizer= and assistant_tokenizer= to "
            "make sure"
        )
        return padding_mapping(num_target, num_draft)
    else:
        why = "their tokenizers were not found"
    raise UnsupportedModelError(
        f"assistant_model must have the target's vocabulary of {num_target} tokens, or the "
        "tokenizers must be given, "
        f"got {num_draft} tokens and {why}; pass tokenizer= and assistant_tokenizer= to generate()"
    )


def table_sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of ids with an embedding and the number of scored ids.

    The config provides the numbers if a table does not expose its size.
    """
    size = vocab_size_of(model)
    embeddings, head = input_table(model), model.get_output_embeddings()
    return int(getattr(embeddings, "num_embeddings", size)), int(
        getattr(head, "out_features", size)
    )


def _eos_ids(model: PreTrainedModel) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, list) else {eos}


def find_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer stored with a model in local files; None if none can be loaded."""
    try:
        return _load_tokenizer(name) if name else None
    # transformers raises these errors.
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):
        return None


# Loading takes up to several seconds. A missing tokenizer is looked up again.
@functools.lru_cache(maxsize=8)
def _load_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
