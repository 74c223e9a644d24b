"""Draft faults: what becomes of an error that is raised while tokens are drafted."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from hf_speculate.engine.plan import Plan
from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.errors import OtherRankError, warn_user
from hf_speculate.stats import SpeculationStats

LOGGER = logging.getLogger("hf_speculate")
_OF_DEVICES: Any = getattr(torch, "AcceleratorError", ())  # old versions of torch raise RuntimeError alone


@dataclass
class DraftFaults:
    """As a context, turns an error of a draft model or head into a fallback: the text goes on without it.

    Raised are errors of the caller's own code, and those after which a device does nothing more. Where several
    processes decode one call, an error of one is raised in all of them as soon as they meet: alone, it would let the
    others wait for ever. A lack of memory is a fallback: the draft gives up its cache, and the target needs none of it.
    """

    stats: SpeculationStats  # written to
    name: str  # name of the drafter, for the reason
    device: torch.device  # device of the drafter
    is_callers: Callable[[Exception], bool]  # see `Drafter.is_callers`
    ranks: Ranks = ONE_PROCESS  # the processes that decode the call together
    _error: Exception | None = field(default=None, init=False)  # that other ranks have yet to learn of
    _is_over: bool = field(default=False, init=False)  # whether the ranks meet no more in this context

    @classmethod
    def of(cls, plan: Plan, stats: SpeculationStats) -> "DraftFaults":
        """Return the faults of a planned call; all errors are the caller's until the drafter says which are."""
        device = (plan.draft or plan.target).device
        return cls(stats, f"the drafter ({plan.source.description})", device, lambda error: True, plan.call.ranks)

    def __enter__(self) -> None:
        self._is_over = False

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.ranks.is_distributed:
            if not self._is_over:
                self._error = error
            return not self._is_over
        if self.is_callers(error) or is_of_device(error, self.device):
            return False
        LOGGER.debug("an error of the draft", exc_info=error)
        first_line = str(error).strip().partition("\n")[0]
        self.report(f"plain decoding, because {self.name} raised {type(error).__name__}: {first_line}")
        return True

    @property
    def is_pending(self) -> bool:
        """Whether an error waits for the other ranks."""
        return self._error is not None

    def meet(self, is_last: bool = True) -> None:
        """Raise an error of any process in all of them; called where the next thing to do would wait for them.

        `is_last` says that no other meeting follows in the same context.
        """
        error, self._error = self._error, None
        has_failed = self.ranks.any(error is not None)
        self._is_over = is_last or has_failed
        if has_failed:
            raise error or OtherRankError("drafting must go well in every process, got an error in another one")

    def report(self, reason: str) -> None:
        """Record a fallback, and warn of it once."""
        if reason not in self.stats.fallbacks:
            self.stats.add_fallback(reason)
            warn_user(reason)


def is_of_device(error: Exception, device: torch.device) -> bool:
    """Return whether an error has left a device unable to do anything more; waits for what the device has to do."""
    if isinstance(error, _OF_DEVICES):
        return True
    if device.type != "cuda":
        return False
    try:  # kernels run behind the host, so that a fault of the device may be yet to come
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
