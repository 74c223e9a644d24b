"""Decides which model drafts in which vocabulary."""

import functools
import threading
import warnings
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.draft.early_exit import early_exit_model
from hf_speculate.draft.vocab_intersection import shared_vocabulary
from hf_speculate.draft.vocab_mapping import Vocabulary, padded_vocabulary
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.stats import SpeculationStats

# Tables are padded to multiples of 64 to 1,024 rows, for the sake of matrix kernels.
MAX_PADDING = 1024

# Another tokenizer's tokens are kept by chance only, one in hundreds; a poor draft of the same tokenizer keeps a tenth.
_LEAST_ACCEPTANCE = 0.02
# In all calls, for in one a schedule stops drafting before. Of drafts that keep a tenth, 1 in 100 looks so bad by then.
_NUM_JUDGED = 64


class Drafting(NamedTuple):
    """The model that drafts."""

    assistant: PreTrainedModel | None  # None: no model does
    vocabulary: Vocabulary | None = None  # how its ids stand to the target's; None: they are the same
    is_guess: bool = False  # that they are the same, for nobody compared the tokenizers
    why_eager: str = ""  # why it is never compiled; empty where it may be


@dataclass
class _Tally:
    """What became of a pair's draft tokens in all calls so far."""

    num_verified: int = 0  # where a long draft is refused at once, its other tokens were never looked at
    num_accepted: int = 0
    has_warned: bool = False

    def warns(self, stats: SpeculationStats) -> bool:
        """Count a call; whether it is the one after which to warn."""
        self.num_verified += stats.num_verified
        self.num_accepted += stats.num_accepted
        is_low = self.num_verified >= _NUM_JUDGED and self.num_accepted < _LEAST_ACCEPTANCE * self.num_verified
        is_first = is_low and not self.has_warned
        self.has_warned |= is_low
        return is_first


_lock = threading.Lock()
# By target and draft; held weakly, so that a tally goes with either model.
_tallies: "WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, _Tally]]" = WeakKeyDictionary()


def choose_draft(
    target: PreTrainedModel,
    assistant: PreTrainedModel | None,
    early_exit: int | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Drafting:
    """The model that drafts.

    Args:
        target: the target.
        assistant: the draft model, or None.
        early_exit: where there is none, the number of the target's own layers that draft, or None.
        tokenizer: the target's, or None.
        assistant_tokenizer: the draft's, or None.

    Raises:
        ConfigError: the target has no more layers than that.
        UnsupportedModelError: nobody can say how the ids stand to each other, too few tokens are shared, or the layers
            cannot be told apart.
    """
    if assistant is None:
        if early_exit is None:
            return Drafting(None)
        short = early_exit_model(target, early_exit)
        return Drafting(short, why_eager="a model's first layers are a new draft in every call")
    vocabulary = match_vocabularies(target, assistant, tokenizer, assistant_tokenizer)
    if vocabulary is not None:
        return Drafting(assistant, vocabulary, why_eager="its ids are translated to the target's")
    return Drafting(assistant, is_guess=tokenizer is None or assistant_tokenizer is None)


def match_vocabularies(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Vocabulary | None:
    """How the draft's ids stand to the target's; None where they are the same.

    Equal sizes count as equal vocabularies unless both tokenizers say otherwise. Where sizes differ and a tokenizer is
    not given, it is looked up in local files under its model's `name_or_path`.

    Args:
        target: the target.
        draft: the draft model.
        tokenizer: the target's, or None.
        assistant_tokenizer: the draft's, or None.

    Raises:
        UnsupportedModelError: nobody can say how the ids stand to each other, or too few tokens are shared.
    """
    num_target, num_draft = (_num_ids(model) for model in (target, draft))
    if tokenizer is not None and assistant_tokenizer is not None:
        if tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
            return shared_vocabulary(tokenizer, assistant_tokenizer, num_target, num_draft)
        return None if num_target == num_draft else padded_vocabulary(num_target, num_draft)
    if num_target == num_draft:
        return None
    found = [
        _find_tokenizer(str(model.name_or_path)) if given is None else given
        for model, given in ((target, tokenizer), (draft, assistant_tokenizer))
    ]
    if found[0] is not None and found[1] is not None:
        if found[0].get_vocab() == found[1].get_vocab():
            return padded_vocabulary(num_target, num_draft)
        why = "their tokenizers differ"
    elif abs(num_target - num_draft) <= MAX_PADDING and _eos_ids(target) == _eos_ids(draft):
        warnings.warn(
            f"the target has {num_target} ids and the draft {num_draft}; their tokenizers were not found, so ids are "
            "taken to be the same but for padding; pass tokenizer= and assistant_tokenizer= to make sure",
            stacklevel=5,
        )
        return padded_vocabulary(num_target, num_draft)
    else:
        why = "their tokenizers were not found"
    raise UnsupportedModelError(
        f"assistant_model must have the target's vocabulary of {num_target} tokens, or the tokenizers must be given, "
        f"got {num_draft} tokens and {why}; pass tokenizer= and assistant_tokenizer= to generate()"
    )


def warn_of_low_acceptance(target: PreTrainedModel, draft: PreTrainedModel, stats: SpeculationStats) -> None:
    """Say so, once for a pair, where next to nothing that was drafted in all its calls was kept.

    So it is with equal sizes of different vocabularies.

    Args:
        target: the target.
        draft: a draft whose ids were taken to be the target's.
        stats: of the whole call, which is counted; no call's twice.
    """
    with _lock:
        tally = _tallies.setdefault(target, WeakKeyDictionary()).setdefault(draft, _Tally())
        if not tally.warns(stats):
            return
    names = [str(model.name_or_path) or type(model).__name__ for model in (target, draft)]
    warnings.warn(
        f"fewer than {_LEAST_ACCEPTANCE:.0%} of the draft tokens were kept; the vocabularies of {names[0]} and "
        f"{names[1]} are of one size but may differ: pass tokenizer= and assistant_tokenizer= if they do",
        stacklevel=4,
    )


def _num_ids(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


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
def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        name, local_files_only=True, trust_remote_code=False
    )
    return tokenizer
