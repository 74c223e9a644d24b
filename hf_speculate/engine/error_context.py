"""Adds to an error where in a call it was raised."""

from contextlib import suppress
from enum import Enum
from types import TracebackType

from hf_speculate.errors import SpeculateError

_PREFIX = "hf_speculate: raised while "


class Stage(Enum):
    """What a call is doing, as the note on an error says it."""

    PREPARE = "the call was prepared"
    PREFILL = "the target read the prompt"
    DRAFT = "tokens were drafted"
    SCORE = "the target scored tokens"
    VERIFY = "tokens were judged"  # logits processors run here, and foreign stopping criteria
    TRIM = "stops were looked for"
    EMIT = "tokens were handed on"  # streamers run here
    CROP = "the caches were rolled back"
    REPORT = "speculation_callback ran"
    RETURN = "the output was put together"


class Place:
    """Where a call is; used in `with`, it says so in a note on the error that leaves.

    The error stays the same object. One that carries such a note already, as from a call inside this one, gets no
    second, and a refusal, which says all there is to say, gets none.
    """

    def __init__(self) -> None:
        self.stage: Stage | None = None  # None: the code that runs is not ours
        self.num_round = 0  # of the loop, counted from 1; 0 before it

    def enter(self, stage: Stage | None, num_round: int | None = None) -> None:
        """Say what comes now.

        Args:
            stage: what; None: nothing of ours.
            num_round: of the loop; None: as before.
        """
        self.stage = stage
        if num_round is not None:
            self.num_round = num_round

    def __str__(self) -> str:
        what = "" if self.stage is None else self.stage.value
        return f"{what}, round {self.num_round}" if self.num_round else what

    def __enter__(self) -> "Place":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self.stage is None:
            return
        if isinstance(error, SpeculateError) and self.stage is Stage.PREPARE:
            return
        if not any(str(note).startswith(_PREFIX) for note in getattr(error, "__notes__", ())):
            with suppress(AttributeError, TypeError):  # an error that cannot be written to arrives as it is
                error.add_note(f"{_PREFIX}{self}")
