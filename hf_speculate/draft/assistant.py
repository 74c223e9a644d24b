"""Assistant resolution: which model drafts, and how its vocabulary maps to the target's."""

import functools
import threading
import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.draft.early_exit import early_exit_model
from hf_speculate.draft.vocab_intersection import are_equal, intersect_vocabularies
from hf_speculate.draft.vocab_mapping import MAX_PADDING, VocabMapping, padding_mapping
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.stats import SpeculationStats

# With another tokenizer, one token in hundreds is accepted by coincidence; a poor draft of the same one has a tenth.
_LOW_ACCEPTANCE = 0.02
# Over all calls, because a schedule stops drafting early in one. Of drafts with an acceptance rate of a tenth, 1 in 100
# looks so bad by then.
_NUM_VERIFIED = 64


class ResolvedAssistant(NamedTuple):
    """The model that drafts, and its vocabulary."""

    model: PreTrainedModel | None  # None if no model drafts
    vocabulary: VocabMapping | None = None  # maps the target's ids to the draft's; None if they are the same
    is_vocabulary_assumed: bool = False  # that they are the same, because the tokenizers were not compared
    eager_reason: str = ""  # why it is never compiled; empty if it may be


class AcceptanceTallies:
    """Counts of verified and accepted tokens of one target's draft models over all calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_draft: WeakKeyDictionary[PreTrainedModel, tuple[int, int, bool]] = WeakKeyDictionary()

    def add(self, draft: PreTrainedModel, stats: SpeculationStats) -> bool:
        """Count a call; whether next to nothing was accepted in all calls, the first time that this is so."""
        with self._lock:
            num_verified, num_accepted, was_low = self._by_draft.get(draft, (0, 0, False))
            num_verified, num_accepted = num_verified + stats.num_verified, num_accepted + stats.num_accepted
            is_low = num_verified >= _NUM_VERIFIED and num_accepted < _LOW_ACCEPTANCE * num_verified
            self._by_draft[draft] = num_verified, num_accepted, was_low or is_low
            return is_low and not was_low


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
        return ResolvedAssistant(short, eager_reason="a model's first layers are a new draft in every call")
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
    if num_target == num_draft and not are_given:
        return None
    ours = _find_tokenizer(str(target.name_or_path)) if tokenizer is None else tokenizer
    theirs = _find_tokenizer(str(draft.name_or_path)) if assistant_tokenizer is None else assistant_tokenizer
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


def warn_of_low_acceptance(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Warn that next to none of a draft's tokens were accepted; equal sizes of different vocabularies do this."""
    names = [str(model.name_or_path) or type(model).__name__ for model in (target, draft)]
    warnings.warn(
        f"fewer than {_LOW_ACCEPTANCE:.0%} of the draft tokens were accepted; the vocabularies of {names[0]} and "
        f"{names[1]} have the same size but may differ: pass tokenizer= and assistant_tokenizer= if they do",
        stacklevel=4,
    )


def _eos_ids(model: PreTrainedModel) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, list) else {eos}


def _find_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model in local files; None where there is none that loads."""
    try:
        return _load_tokenizer(name) if name else None
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):  # what transformers may raise
        return None


@functools.lru_cache(maxsize=8)  # loading takes up to seconds; what was not found is looked for again
def _load_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
