"""Assistant resolution: which model drafts, and how its vocabulary maps to the target's."""

import functools
import warnings
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.draft.acceptance_tallies import AcceptanceBound
from hf_speculate.draft.early_exit import early_exit_model
from hf_speculate.draft.vocab_intersection import are_equal, intersect_vocabularies
from hf_speculate.draft.vocab_mapping import MAX_PADDING, VocabMapping, padding_mapping
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.language_model import vocab_size_of

# With another tokenizer, one token in hundreds is accepted by coincidence; a poor draft of the same one has a tenth.
# Of these, 1 in 100 looks so bad by then.
VERIFIED_TOKENS_BOUND = AcceptanceBound(least_rate=0.02, num_drafted=64)


class ResolvedAssistant(NamedTuple):
    """The model that drafts, and its vocabulary."""

    model: PreTrainedModel | None  # None if no model drafts
    vocabulary: VocabMapping | None = None  # maps the target's ids to the draft's; None if they are the same
    is_vocabulary_assumed: bool = False  # that they are the same, because the tokenizers were not compared
    eager_reason: str = ""  # why it is never compiled; empty if it may be
    early_exit: int | None = None  # layers of the target that it is made of; None if it is another model


def resolve_assistant(
    target: PreTrainedModel,
    assistant: PreTrainedModel | None,
    early_exit: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> ResolvedAssistant:
    """The model that drafts: the assistant, or the first `early_exit` layers of the target; tokenizers may be None."""
    if assistant is None:
        if early_exit is None:
            return ResolvedAssistant(None)
        short = early_exit_model(target, early_exit)
        reason = "a model's first layers are a new draft in every call"
        return ResolvedAssistant(short, eager_reason=reason, early_exit=early_exit)
    vocabulary = map_vocabularies(target, assistant, tokenizer, assistant_tokenizer)
    if vocabulary is not None:
        return ResolvedAssistant(assistant, vocabulary, eager_reason="its ids are mapped to the target's")
    return ResolvedAssistant(assistant, is_vocabulary_assumed=tokenizer is None or assistant_tokenizer is None)


def map_vocabularies(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> VocabMapping | None:
    """How the draft's ids stand to the target's; None if they are the same.

    Equal sizes count as equal vocabularies unless both tokenizers say otherwise. If sizes differ and a tokenizer is not
    given, it is looked up in local files under its model's `name_or_path`.
    """
    num_target, num_draft = (vocab_size_of(model) for model in (target, draft))
    are_given = tokenizer is not None and assistant_tokenizer is not None
    num_read, num_scored = table_sizes(draft)
    if num_target == num_draft and not are_given:
        # ids that the draft has no embedding for, or scores past its vocabulary, must not reach either model
        fits = num_read >= num_draft and num_scored <= num_draft
        return None if fits else padding_mapping(num_target, min(num_read, num_draft))
    ours = find_tokenizer(str(target.name_or_path)) if tokenizer is None else tokenizer
    theirs = find_tokenizer(str(draft.name_or_path)) if assistant_tokenizer is None else assistant_tokenizer
    if ours is not None and theirs is not None:
        if are_equal(ours, theirs):
            return None if num_target == num_draft else padding_mapping(num_target, num_draft)
        if are_given:
            return intersect_vocabularies(ours, theirs, num_target, num_draft)
        why = "their tokenizers differ"
    elif abs(num_target - num_draft) <= MAX_PADDING and _eos_ids(target) == _eos_ids(draft):
        warnings.warn(
            f"the target has {num_target} ids and the draft {num_draft}; their tokenizers were not found, so ids are "
            "taken to be the same but for padding; pass tokenizer= and assistant_tokenizer= to make sure",
            stacklevel=6,
        )
        return padding_mapping(num_target, num_draft)
    else:
        why = "their tokenizers were not found"
    raise UnsupportedModelError(
        f"assistant_model must have the target's vocabulary of {num_target} tokens, or the tokenizers must be given, "
        f"got {num_draft} tokens and {why}; pass tokenizer= and assistant_tokenizer= to generate()"
    )


def table_sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Ids that a model has embeddings for, and ids that it scores; those of its config if a table does not tell."""
    size = vocab_size_of(model)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return int(getattr(embeddings, "num_embeddings", size)), int(getattr(head, "out_features", size))


def warn_of_low_acceptance(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Warn that next to none of a draft's tokens were accepted; equal sizes of different vocabularies do this."""
    names = [str(model.name_or_path) or type(model).__name__ for model in (target, draft)]
    warnings.warn(
        f"fewer than {VERIFIED_TOKENS_BOUND.least_rate:.0%} of the draft tokens were accepted; the vocabularies of "
        f"{names[0]} and {names[1]} have the same size but may differ: pass tokenizer= and assistant_tokenizer= if "
        "they do",
        stacklevel=4,
    )


def _eos_ids(model: PreTrainedModel) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, list) else {eos}


def find_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model in local files; None where there is none that loads."""
    try:
        return _load_tokenizer(name) if name else None
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):  # what transformers may raise
        return None


@functools.lru_cache(maxsize=8)  # loading takes up to seconds; what was not found is looked for again
def _load_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
