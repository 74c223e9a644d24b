"""Stage clock: time the stages of a call and add the current stage to errors as a note."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from hf_speculate.errors import SpeculateError
from hf_speculate.types import StageSeconds

_PREFIX = "hf_speculate: raised while "
_DEVICE_ERRORS = ("CUDA error", "HIP error", "Triton Error")  # substrings of device errors
_AFTER_DEVICE_ERROR = (
    "hf_speculate: this process may have lost the device; start another one with "
    'speculation_graphs="off", and run '
    "`hf-speculate doctor` to see whether graphs or kernels fail on this device"
)


class Stage(Enum):
    """Stages of a call, as worded in error notes."""

    PREPARE = "the call was prepared"
    VOCABULARY = "the vocabularies were compared"
    INPUTS = "transformers prepared the call"
    PREFILL = "the target read the prompt"
    DRAFT = "tokens were drafted"
    SCORE = "the target scored tokens"
    # includes logits processors, and stopping criteria that are called token by token
    VERIFY = "tokens were verified"
    TRIM = "stopping criteria ran"
    COMMIT = "the KV caches were rolled back"
    RECORD = "the round was recorded"
    EMIT = "tokens were passed to the streamer"
    REPORT = "speculation_callback ran"
    PAD = "the target read the padding of finished rows"
    RETURN = "the output was built"


_FIELD_OF = {
    Stage.INPUTS: "inputs",
    Stage.PREPARE: "preparation",
    Stage.VOCABULARY: "vocabulary",
    Stage.PREFILL: "prefill",
    Stage.DRAFT: "draft",
    Stage.SCORE: "score",
    Stage.VERIFY: "verify",
}


class StageClock:
    """Clock for the current stage and the stage times.

    As a context manager, it adds a note with the current stage to an error.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by field of `StageSeconds`
        self._created = self._began = self._since = self._now()
        self.stage: Stage | None = None  # None in code outside the library
        self.num_round = 0  # number of the current round, starting at 1; 0 before the loop

    def start(self, stage: Stage) -> None:
        """Begin a run of the decoder with `stage` before its first round."""
        self.enter(stage, 0)
        self._began = self._since

    def enter(self, stage: Stage | None, num_round: int | None = None) -> None:
        """Begin a stage, and add the time since the last call to the previous stage.

        Args:
            stage: The stage. None for code outside the library.
            num_round: Number of the round. None for the current one.
        """
        self._book()
        self.stage = stage
        if num_round is not None:
            self.num_round = num_round

    def lap(self) -> StageSeconds:
        self._book()
        seconds = StageSeconds(**self._seconds)
        self._seconds.clear()
        return seconds

    @property
    def prefill_s(self) -> float:
        return self._seconds["prefill"]

    @property
    def total_s(self) -> float:
        """Seconds since `start`, up to the last `enter` or `lap`."""
        return self._since - self._began

    @property
    def call_s(self) -> float:
        """Seconds since the clock was made, up to the last `enter` or `lap`."""
        return self._since - self._created

    def _book(self) -> None:
        now = self._now()
        if self.stage is not None:
            self._seconds[_FIELD_OF.get(self.stage, "bookkeeping")] += now - self._since
        self._since = now

    def __str__(self) -> str:
        stage = "" if self.stage is None else self.stage.value
        return f"{stage}, round {self.num_round}" if self.num_round else stage

    def __enter__(self) -> "StageClock":
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is None or self.stage in (None, Stage.INPUTS):
            return
        if isinstance(error, SpeculateError) and self.stage is Stage.PREPARE:
            return  # the error is about the arguments
        # A nested call may have added a note already.
        if not any(str(note).startswith(_PREFIX) for note in getattr(error, "__notes__", ())):
            with suppress(AttributeError, TypeError):  # some errors do not accept notes
                error.add_note(f"{_PREFIX}{self}")
                if any(words in str(error) for words in _DEVICE_ERRORS):
                    error.add_note(_AFTER_DEVICE_ERROR)
