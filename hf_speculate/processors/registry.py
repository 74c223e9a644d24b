"""Registry of processors and criteria that can run on blocks of tokens.

The result of a *pure* class depends only on the arguments, not on earlier calls. In the result of a
*row-wise* class, row b depends only on row b of the arguments. Only pure and row-wise classes can
be called on many prefixes at once, in any order and repeatedly. Membership is decided by exact
type, because a subclass may do anything. Processors with state are also supported if they can take
calls back with the methods of `RollbackProcessor`.
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
    """Row-wise logits processor with state and rollback.

    Its state follows the text. Such a processor runs at all K+1 positions of a round and on the
    draft model, whose drafts then obey it. Rows need not move in lock step. Any class with these
    four methods qualifies. Plain `generate()` uses only `__call__`; decoding in lock step also uses
    `fork`. In each call, every row has one more token than in the previous call:

    - The very first call passes the prompts, as in plain `generate()`.
    - The first call of a round adds each row's newest token. The next K calls add the drafted
      tokens from left to right.
    - After the round, `rollback` takes back the calls whose newest token was rejected. It never
      takes back more calls than were made since the last `rollback`, so no older state needs to be
      kept. If the target's logits are NaN for a drafted token, `rollback` takes back all calls of
      the round, and the calls are repeated.
    - Before each draft, `fork` makes a copy for the draft model. The copy is discarded after the
      draft.

    An object can be used for only one call to `generate()`: its rows leave as they finish, and
    using it again raises an error.

    A round may pass a token that the processor has just forbidden. The ids after this token, and
    the ids after a drafted EOS, are meaningless. Their scores are never read, and these calls are
    taken back. A call must therefore not fail for any ids, and each call counts for `rollback`.

    Like any row-wise processor, the class may also have a method `forced_text(row, input_ids) ->
    str`. It returns the text that must follow `input_ids` [n] int64, or "" if there is a choice.
    The ids are on the host and equal the row's ids in the next `__call__`; the processor has not
    seen the newest of them yet. The method must not change the state. `grammar_draft` drafts the
    returned text.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores of each row's next token.

        Args:
            input_ids: [B, n] int64; each row ends in the last column. Shorter rows are padded on
                the left with their first id, which is the padding id if the row has padding.
            scores: [B, V] float32; may be modified in place. A fork gets the draft model's V.

        Returns:
            [B, V] float32.
        """

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back each row's last calls.

        Args:
            num_calls: [B] number of calls to take back for each row, >= 0.
        """

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices` in this order, and forget the other rows, which are finished."""

    def fork(self) -> "RollbackProcessor":
        """Return a copy with an independent state; the copy is never rolled back."""


class Reads(Enum):
    """Inputs of a row-wise processor other than the scores.

    Processors of all kinds except `HISTORY` are pure.
    """

    NOTHING = "nothing"  # no inputs; a call may have any number of rows
    LENGTH = "length"  # only input_ids.shape[-1]
    PREFIX = "prefix"  # the ids of the row
    ROW = "row"  # stored values of the row, and possibly its last ids; see `encoder_ids`
    HISTORY = "history"  # earlier calls, which the processor can take back


# RepetitionPenaltyLogitsProcessor may hold one number per row; see rows() in block.py.
# WatermarkLogitsProcessor reseeds its generator from the prefix before every draw.
_NAMES = {
    Reads.NOTHING: """
        BarkEosPrioritizerLogitsProcessor EpsilonLogitsWarper EtaLogitsWarper
        InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper
        SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper
        TopPLogitsWarper TypicalLogitsWarper""",
    Reads.LENGTH: """
        AlternatingCodebooksLogitsProcessor ExponentialDecayLengthPenalty
        ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor MinLengthLogitsProcessor
        MinNewTokensLengthLogitsProcessor SuppressTokensAtBeginLogitsProcessor""",
    Reads.PREFIX: """
        NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor
        SequenceBiasLogitsProcessor WatermarkLogitsProcessor WhisperTimeStampLogitsProcessor""",
}
READS: dict[type, Reads] = {
    getattr(logits_process, name): reads
    for reads, names in _NAMES.items()
    for name in names.split()
}


class OwnProcessor:
    """Base class for logits processors of this library.

    `reads` declares its inputs. NaN logits give NaN scores.
    """

    reads: ClassVar[Reads]


def _at(length: int, prefix_len: int) -> int:
    """Return the shortest length that compares to `length` as `prefix_len` does: <, = or >."""
    return 0 if prefix_len < length else min(prefix_len, length + 1)


# Maps a class to a function of the processor and the prefix length. The function returns how many
# last tokens give the same result as the whole prefix. Classes that are not in this table need all
# tokens. Positions with the same number of tokens share a call.
_SEEN_LEN: dict[type, Callable[[Any, int], int]] = {
    logits_process.ExponentialDecayLengthPenalty: lambda p, n: 0 if n <= p.regulation_start else n,
    logits_process.ForcedBOSTokenLogitsProcessor: lambda p, n: _at(1, n),
    logits_process.ForcedEOSTokenLogitsProcessor: lambda p, n: _at(p.max_length - 1, n),
    logits_process.MinLengthLogitsProcessor: lambda p, n: _at(p.min_length, n),
    logits_process.MinNewTokensLengthLogitsProcessor: lambda p, n: _at(
        p.prompt_length_to_skip + p.min_new_tokens, n
    ),
    logits_process.NoBadWordsLogitsProcessor: lambda p, n: min(
        n, max(map(len, p.sequence_bias), default=0)
    ),
    logits_process.SequenceBiasLogitsProcessor: lambda p, n: min(n, max(map(len, p.sequence_bias))),
    logits_process.SuppressTokensAtBeginLogitsProcessor: lambda p, n: _at(p.begin_index, n),
    logits_process.WatermarkLogitsProcessor: lambda p, n: min(n, p.context_width),
}

# These classes may turn NaN logits into numbers or fail on them. Nothing is known about classes
# outside `READS`.
_LOSES_NAN = (
    *(logits_process.ForcedBOSTokenLogitsProcessor, logits_process.ForcedEOSTokenLogitsProcessor),
    *(
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.EtaLogitsWarper,
        logits_process.TopHLogitsWarper,
    ),
)

# Maps a class to the reason why it is called position by position, as plain `generate()` does.
NOT_ROW_WISE: dict[type, str] = {
    logits_process.ClassifierFreeGuidanceLogitsProcessor: (
        "it mixes rows: conditional with unconditional ones"
    ),
    logits_process.DiaClassifierFreeGuidanceLogitsProcessor: (
        "it mixes rows: conditional with unconditional ones"
    ),
    logits_process.DiaEOSChannelFilterLogitsProcessor: (
        "it mixes rows: the audio channels of one sample"
    ),
    logits_process.DiaEOSDelayPatternLogitsProcessor: "it counts its calls",
    logits_process.EncoderNoRepeatNGramLogitsProcessor: (
        "it holds the encoder's ids of every row, in batch order"
    ),
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: (
        "it holds the encoder's ids of every row, in batch order"
    ),
    logits_process.PrefixConstrainedLogitsProcessor: (
        "it tells the user's function the row's place in the batch"
    ),
    logits_process.SynthIDTextWatermarkLogitsProcessor: (
        "it keeps a history of contexts from call to call"
    ),
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor: (
        "it feeds a cache of its own, one token a call"
    ),
    logits_process.WhisperNoSpeechDetection: "it runs the model itself, then keeps the outcome",
    stopping_criteria.ConfidenceCriteria: "it reads the scores of the batch's first row",
}
_REGISTERED: set[type] = set()


def register_row_wise(cls: AnyClass) -> AnyClass:
    """Declare a class of processors or stopping criteria as pure and row-wise.

    Such a class runs at all positions of a round at once, with one call per prefix length.
    Processors of the class also run on the draft model. The declaration covers only the class
    itself, not its subclasses. The function can be used as a decorator.

    Args:
        cls: a subclass of transformers' `LogitsProcessor` or `StoppingCriteria`. Its `__call__`
            receives `input_ids` [N, n] int64 and `scores` [N, V] float32 for any number N of rows.
            A criterion gets None for `scores`.

    Returns:
        The class itself, unchanged.

    Raises:
        ConfigError: `cls` is anything else, or a transformers class known not to be row-wise.
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
    """Return whether the exact class of the object was declared with `register_row_wise`."""
    return type(obj) in _REGISTERED


def unfit_reason(foreign: Sequence[object]) -> str:
    """Explain why processors or criteria cannot run on a block, with a next step for the user."""
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
    """Find the inputs of a processor other than the scores.

    The result is None if the processor is not known to run on blocks.
    """
    if isinstance(processor, OwnProcessor):
        return processor.reads
    reads = READS.get(type(processor)) or (Reads.PREFIX if is_registered(processor) else None)
    return reads or (Reads.HISTORY if isinstance(processor, RollbackProcessor) else None)


def offers_forced_text(processor: object) -> bool:
    """Return whether a processor has a `forced_text` method."""
    return callable(getattr(processor, "forced_text", None))


def keeps_nan(processor: object) -> bool:
    """Return whether a processor accepts NaN logits and returns NaN for them."""
    if isinstance(processor, OwnProcessor):
        return True
    return type(processor) in READS and type(processor) not in _LOSES_NAN


def find_context_len(processor: object, prefix_len: int) -> int:
    """Find how many last tokens give the same result as a whole prefix of `prefix_len` tokens."""
    seen_len = _SEEN_LEN.get(type(processor))
    return prefix_len if seen_len is None else seen_len(processor, prefix_len)


def any_ids(num_rows: int, num_ids: int, device: torch.device) -> Tensor:
    """Make placeholder ids [N, n] that use no memory, for objects that only count ids."""
    return torch.zeros((1, 1), dtype=torch.int64, device=device).expand(num_rows, num_ids)


def name_of(obj: object) -> str:
    """Return the name of a processor or criterion for messages: its class or function name."""
    return str(getattr(obj, "__name__", type(obj).__name__))
