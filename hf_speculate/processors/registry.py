"""Registry of processors and criteria, by their use on blocks of tokens.

*Pure*: the result depends on the arguments alone, not on earlier calls. *Row-wise*: row b of the
result depends on row b of the arguments alone. Only then may a round ask about many prefixes at
once, in any order, and ask again. Membership goes by exact type: a subclass may do anything.
Processors with state fit too if they can take calls back: they have the methods of
`RollbackProcessor`.
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

    Its state follows the text. Such a processor runs at all K+1 positions of a round, and on the
    draft model, whose drafts then obey it; rows need not move in lock step. Any class with these
    four methods is one. Under plain `generate()` only `__call__` is used, in lock step `fork` too.
    Each call shows every row one token more than its previous call:

    - the first call of all shows the prompts, as plain `generate()` does;
    - a round's first call shows each row's newest token, the next K calls its drafted ones, from
      left to right;
    - `rollback` follows the round and takes back the calls with a rejected newest token. It never
      asks for more calls than there were since the last `rollback`, so nothing older need be kept.
      If the target's logits are NaN for a drafted token, it takes back all calls of the round,
      and the round is shown again;
    - before each draft, `fork` gives the draft model a copy. The copy is discarded after the draft.

    An object serves one call: its rows leave as they finish, and a later call with it raises an
    error.

    A round may show a row a token just forbidden by the processor. The ids after it, as after a
    drafted EOS, are meaningless; scores for them are never read, and those calls are taken back. So
    a call must not fail for any ids, and each call counts.

    A processor may also have `forced_text(row, input_ids) -> str`, as row-wise ones may. It returns
    the forced text after `input_ids` [n] int64, "" if there is a choice. The ids are on the host,
    and are those of the row in the next `__call__`. The row's newest token was not shown before.
    The method does not change the state. `grammar_draft` drafts this text.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores of each row's next token.

        Args:
            input_ids: [B, n] int64, each row ending in the last column. Shorter rows are filled up
                on the left with their first id. It is the padding id if the row has padding.
            scores: [B, V] float32; it may be written to. A fork gets the draft model's V.

        Returns:
            [B, V] float32.
        """

    def rollback(self, num_calls: Sequence[int]) -> None:
        """Take back each row's last calls.

        Args:
            num_calls: [B] calls of each row, 0 or more.
        """

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in this order, and forget the others; these are finished."""

    def fork(self) -> "RollbackProcessor":
        """Return an independent copy of the state. It is never rolled back."""


class Reads(Enum):
    """Inputs of a row-wise processor besides the scores.

    Processors of all kinds but the last are pure.
    """

    NOTHING = "nothing"  # any number of rows in one call
    LENGTH = "length"  # input_ids.shape[-1] only
    PREFIX = "prefix"  # the ids of its row
    ROW = "row"  # stored values of the row, and perhaps its last ids: see `encoder_ids`
    HISTORY = "history"  # earlier calls; it can take calls back


# RepetitionPenaltyLogitsProcessor may hold one number per row: see rows() in block.py.
# WatermarkLogitsProcessor seeds its generator anew from the prefix before every draw.
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
    """Base of logits processors of this library.

    `reads` declares its inputs. NaN logits give NaN scores.
    """

    reads: ClassVar[Reads]


def _at(length: int, prefix_len: int) -> int:
    """Return the shortest length with the same order to `length` as `prefix_len`: <, = or >."""
    return 0 if prefix_len < length else min(prefix_len, length + 1)


# Maps a class to a function of processor and prefix length. It returns the number of last tokens
# with the result of the whole prefix. Classes outside of this table need all tokens. Positions with
# equal numbers share a call.
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

# These classes may turn NaN logits into numbers, or fail for them. Nothing is known about classes
# outside `READS`.
_LOSES_NAN = (
    *(logits_process.ForcedBOSTokenLogitsProcessor, logits_process.ForcedEOSTokenLogitsProcessor),
    *(
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.EtaLogitsWarper,
        logits_process.TopHLogitsWarper,
    ),
)

# Maps a class to the reason for calling it position by position, as plain `generate()` does.
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
    """Declare a class of processors or stopping criteria pure and row-wise.

    Such a class runs at all positions of a round at once, rows of equal prefix length together; its
    processors run on the draft model too. The declaration covers this very class, not its
    subclasses. Usable as a decorator.

    Args:
        cls: a subclass of transformers' `LogitsProcessor` or `StoppingCriteria`. Its `__call__`
            receives `input_ids` [N, n] int64 and `scores` [N, V] float32, for any number N of rows.
            A criterion gets None as `scores`.

    Returns:
        The class itself, unchanged.

    Raises:
        ConfigError: `cls` is anything else, or a class of transformers known not to be row-wise.
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
    """Return whether the object's exact class was declared with `register_row_wise`."""
    return type(obj) in _REGISTERED


def unfit_reason(foreign: Sequence[object]) -> str:
    """Explain why processors or criteria do not fit into a block, with a next step for the user."""
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
    """Find the inputs of a processor besides the scores.

    The result is None if it is not known to fit into a block.
    """
    if isinstance(processor, OwnProcessor):
        return processor.reads
    reads = READS.get(type(processor)) or (Reads.PREFIX if is_registered(processor) else None)
    return reads or (Reads.HISTORY if isinstance(processor, RollbackProcessor) else None)


def offers_forced_text(processor: object) -> bool:
    """Return whether a processor has a `forced_text` method."""
    return callable(getattr(processor, "forced_text", None))


def keeps_nan(processor: object) -> bool:
    """Return whether a processor accepts NaN logits and keeps them NaN."""
    if isinstance(processor, OwnProcessor):
        return True
    return type(processor) in READS and type(processor) not in _LOSES_NAN


def find_context_len(processor: object, prefix_len: int) -> int:
    """Find how many last tokens give the result of the whole prefix of `prefix_len` tokens."""
    seen_len = _SEEN_LEN.get(type(processor))
    return prefix_len if seen_len is None else seen_len(processor, prefix_len)


def any_ids(num_rows: int, num_ids: int, device: torch.device) -> Tensor:
    """Make placeholder ids [N, n] without memory, for objects that only count ids."""
    return torch.zeros((1, 1), dtype=torch.int64, device=device).expand(num_rows, num_ids)


def name_of(obj: object) -> str:
    """Name a processor or criterion in messages: by its class, or its name if it is a function."""
    return str(getattr(obj, "__name__", type(obj).__name__))
