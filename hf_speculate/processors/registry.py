"""Registry of the processors and criteria that fit into a block, and those that do not.

*Pure*: the result depends on the arguments alone, not on earlier calls. *Row-wise*: row b of the result depends on
row b of the arguments alone. Only then may a round ask about many prefixes at once, in any order, and ask again.
Membership goes by exact type: a subclass may do anything. Processors with state fit in too where they can take calls
back, which they show by having the methods of `RollbackProcessor`.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process, stopping_criteria

from hf_speculate.errors import ConfigError

AnyClass = TypeVar("AnyClass", bound=type)


@runtime_checkable
class RollbackProcessor(Protocol):
    """A row-wise logits processor whose state follows the text and can take its last calls back.

    Such a processor runs at all K+1 positions of a round, and on the draft model, so that drafts obey it; rows need not
    move in lock step. Any class with these four methods is one; under plain `generate()` only `__call__` is used,
    in lock step `fork` too. Each call shows every row one token more than the row's call before did:

    - the first call of all shows the prompts, as plain `generate()` does;
    - a round's first call shows each row's newest token, the next K calls its drafted ones, from left to right;
    - `rollback` follows the round and takes back the calls whose newest token was refused. It never asks for more calls
      than there were since the last `rollback`, so nothing older need be kept. If the target's logits are NaN for a
      drafted token, it takes back all calls of the round, which is then shown again;
    - before each draft, `fork` gives the draft model a copy of its own, which is thrown away after it.

    An object serves one call: its rows leave as they finish, and a later call with it is refused.

    A round may show a row a token that the processor has just forbidden, and after it, as after a drafted EOS, ids
    without a meaning; what is returned there is never read, and is taken back. So no call may fail for what it is
    shown, and each counts as one.

    A processor may also have `forced_text(row, input_ids) -> str`, as row-wise ones may. It returns
    the text that must follow `input_ids` [n] int64, the row as the next `__call__` shows it, on the
    host; "" if there is a choice. The row's newest token was not shown before. The method leaves
    the state as it is. `grammar_draft` drafts this text.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores of the token that comes next in each row.

        Args:
            input_ids: [B, n] int64, each row ending in the last column. Rows of different lengths are made equally long
                by repeating their first id in front, which is padding where there is any.
            scores: [B, V] float32, free to be written to; a fork may be shown another V, its draft model's.

        Returns:
            [B, V] float32.
        """

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back each row's last calls.

        Args:
            num_calls: [B] calls of each row, 0 or more.
        """

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`, in that order; finished rows leave the batch in this way."""

    def fork(self) -> "RollbackProcessor":
        """A fork: a copy of the state, which is then independent; it is never rolled back."""


class Reads(Enum):
    """Inputs that a row-wise processor reads besides the scores; processors of all types but the last are pure."""

    NOTHING = "nothing"  # any number of rows in one call
    LENGTH = "length"  # input_ids.shape[-1] only
    PREFIX = "prefix"  # the ids of its row
    ROW = "row"  # what it holds for the row, and perhaps the row's last ids: see `encoder_ids`
    HISTORY = "history"  # what earlier calls showed it; it can take calls back


# RepetitionPenaltyLogitsProcessor may hold one number per row: see rows() in block.py. WatermarkLogitsProcessor seeds
# its generator anew from the prefix before every draw.
_NAMES = {
    Reads.NOTHING: """
        BarkEosPrioritizerLogitsProcessor EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor
        LogitNormalization MinPLogitsWarper SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper
        TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper""",
    Reads.LENGTH: """
        AlternatingCodebooksLogitsProcessor ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor
        ForcedEOSTokenLogitsProcessor MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor
        SuppressTokensAtBeginLogitsProcessor""",
    Reads.PREFIX: """
        NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor
        SequenceBiasLogitsProcessor WatermarkLogitsProcessor WhisperTimeStampLogitsProcessor""",
}
READS: dict[type, Reads] = {
    getattr(logits_process, name): reads for reads, names in _NAMES.items() for name in names.split()
}


class OwnProcessor:
    """A logits processor of this library, which says what it reads; where logits are NaN, so are its scores."""

    reads: ClassVar[Reads]


def _at(length: int, prefix_len: int) -> int:
    """The shortest length that is to `length` as `prefix_len` is: less, equal or greater."""
    return 0 if prefix_len < length else min(prefix_len, length + 1)


# How many of a prefix's last tokens give the same result as the whole prefix; all of them where a class is missing.
# Positions that need equally many share a call, whatever their lengths.
_SEEN_LEN: dict[type, Callable[[Any, int], int]] = {
    logits_process.ExponentialDecayLengthPenalty: lambda p, n: 0 if n <= p.regulation_start else n,
    logits_process.ForcedBOSTokenLogitsProcessor: lambda p, n: _at(1, n),
    logits_process.ForcedEOSTokenLogitsProcessor: lambda p, n: _at(p.max_length - 1, n),
    logits_process.MinLengthLogitsProcessor: lambda p, n: _at(p.min_length, n),
    logits_process.MinNewTokensLengthLogitsProcessor: lambda p, n: _at(p.prompt_length_to_skip + p.min_new_tokens, n),
    logits_process.NoBadWordsLogitsProcessor: lambda p, n: min(n, max(map(len, p.sequence_bias), default=0)),
    logits_process.SequenceBiasLogitsProcessor: lambda p, n: min(n, max(map(len, p.sequence_bias))),
    logits_process.SuppressTokensAtBeginLogitsProcessor: lambda p, n: _at(p.begin_index, n),
    logits_process.WatermarkLogitsProcessor: lambda p, n: min(n, p.context_width),
}

# Those that may hide that logits are NaN, or fail for them. Of classes that are not in `READS` nothing is known.
_LOSES_NAN = (
    *(logits_process.ForcedBOSTokenLogitsProcessor, logits_process.ForcedEOSTokenLogitsProcessor),
    *(logits_process.InfNanRemoveLogitsProcessor, logits_process.EtaLogitsWarper, logits_process.TopHLogitsWarper),
)

# why they must be called as plain `generate()` calls them
NOT_ROW_WISE: dict[type, str] = {
    logits_process.ClassifierFreeGuidanceLogitsProcessor: "it mixes rows: conditional with unconditional ones",
    logits_process.DiaClassifierFreeGuidanceLogitsProcessor: "it mixes rows: conditional with unconditional ones",
    logits_process.DiaEOSChannelFilterLogitsProcessor: "it mixes rows: the audio channels of one sample",
    logits_process.DiaEOSDelayPatternLogitsProcessor: "it counts its calls",
    logits_process.EncoderNoRepeatNGramLogitsProcessor: "it holds the encoder's ids of every row, in batch order",
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: "it holds the encoder's ids of every row, in batch order",
    logits_process.PrefixConstrainedLogitsProcessor: "it tells the user's function the row's place in the batch",
    logits_process.SynthIDTextWatermarkLogitsProcessor: "it keeps a history of contexts from call to call",
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor: "it feeds a cache of its own, one token a call",
    logits_process.WhisperNoSpeechDetection: "it runs the model itself, then keeps the outcome",
    stopping_criteria.ConfidenceCriteria: "it reads the scores of the batch's first row",
}
_REGISTERED: set[type] = set()


def register_row_wise(cls: AnyClass) -> AnyClass:
    """Declares a processor or stopping criterion class pure and row-wise.

    Such a class runs at all positions of a round at once, rows of equal prefix length together; its processors run on
    the draft model too. The declaration covers this very class, not its subclasses. Usable as a decorator.

    Args:
        cls: a subclass of transformers' `LogitsProcessor` or `StoppingCriteria`. Its `__call__` receives
            `input_ids` [N, n] int64 with `scores` [N, V] float32; for a criterion `scores` is None. N is any number
            of rows.

    Returns:
        The class itself, unchanged.

    Raises:
        ConfigError: when `cls` is anything else, or one of transformers' classes that is known not to be row-wise.
    """
    if not (isinstance(cls, type) and issubclass(cls, (LogitsProcessor, StoppingCriteria))):
        raise ConfigError(
            f"cls must be a subclass of LogitsProcessor or StoppingCriteria, got {cls!r}; "
            "register the class, not an instance or a function"
        )
    if cls in NOT_ROW_WISE:
        raise ConfigError(
            f"cls must be pure and row-wise, got {cls.__name__}: {NOT_ROW_WISE[cls]}; "
            "use it unregistered, it is then called token by token as plain generate() would"
        )
    _REGISTERED.add(cls)
    return cls


def is_registered(obj: object) -> bool:
    """Whether the object's exact class was declared with `register_row_wise`."""
    return type(obj) in _REGISTERED


def unfit_reason(foreign: Sequence[object]) -> str:
    """Why processors and criteria that do not fit into a block do not, and what the user can do about it."""
    known = [
        f"{name_of(processor)}: {NOT_ROW_WISE[type(processor)]}"
        for processor in foreign
        if type(processor) in NOT_ROW_WISE
    ]
    others = [name_of(processor) for processor in foreign if type(processor) not in NOT_ROW_WISE]
    if others:
        known.append(f"{', '.join(others)}; declare row-wise classes with register_row_wise")
    return f"because of {'; '.join(known)}"


def find_reads(processor: object) -> Reads | None:
    """Inputs that a processor reads besides the scores; None for one that is not known to fit into a block."""
    if isinstance(processor, OwnProcessor):
        return processor.reads
    reads = READS.get(type(processor)) or (Reads.PREFIX if is_registered(processor) else None)
    return reads or (Reads.HISTORY if isinstance(processor, RollbackProcessor) else None)


def offers_forced_text(processor: object) -> bool:
    """Return whether a processor can tell which text must come next."""
    return callable(getattr(processor, "forced_text", None))


def keeps_nan(processor: object) -> bool:
    """Whether a processor takes logits that are NaN, and gives scores that are."""
    if isinstance(processor, OwnProcessor):
        return True
    return type(processor) in READS and type(processor) not in _LOSES_NAN


def find_context_len(processor: object, prefix_len: int) -> int:
    """How many of the last tokens of a prefix a processor must see, to do what it does for the whole of it."""
    seen_len = _SEEN_LEN.get(type(processor))
    return prefix_len if seen_len is None else seen_len(processor, prefix_len)


def any_ids(num_rows: int, num_ids: int, device: torch.device) -> Tensor:
    """Ids [N, n] for a processor or criterion that reads their number only; they take no memory."""
    return torch.zeros((1, 1), dtype=torch.int64, device=device).expand(num_rows, num_ids)


def name_of(obj: object) -> str:
    """The name of a processor or criterion in messages: its class, or the function's own name."""
    return str(getattr(obj, "__name__", type(obj).__name__))
