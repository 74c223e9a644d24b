"""Draft faults: handle errors raised during drafting."""

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
# old versions of torch raise only RuntimeError
_OF_DEVICES: Any = getattr(torch, "AcceleratorError", ())


@dataclass
class DraftFaults:
    """Context manager for errors in a drafter.

    It turns an error in a draft model or head into a fallback: decoding continues without drafts.
    Errors in user code are raised, and so are errors after which the device is lost. If several
    processes decode the call, an error in one of them is raised in all at their next
    synchronisation; otherwise the other processes would wait forever. Running out of memory is a
    fallback, because the draft frees its cache and the target does not need it.
    """

    stats: SpeculationStats  # receives the fallbacks
    name: str  # drafter name for the fallback reason
    device: torch.device  # the drafter's device
    is_callers: Callable[[Exception], bool]  # see `Drafter.is_callers`
    ranks: Ranks = ONE_PROCESS  # the processes that decode the call together
    _error: Exception | None = field(default=None, init=False)  # not yet known to other ranks
    # whether the last synchronisation within the context is over
    _is_over: bool = field(default=False, init=False)

    @classmethod
    def of(cls, plan: Plan, stats: SpeculationStats) -> "DraftFaults":
        """Return the draft faults for a planned call.

        Every error counts as a user error until `is_callers` is set to the drafter's method.
        """
        device = (plan.draft or plan.target).device
        return cls(
            stats,
            f"the drafter ({plan.source.description})",
            device,
            lambda error: True,
            plan.call.ranks,
        )

    def __enter__(self) -> None:
        self._is_over = False

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
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
        self.report(
            f"plain decoding, because {self.name} raised {type(error).__name__}: {first_line}"
        )
        return True

    @property
    def is_pending(self) -> bool:
        """Whether an error waits for the other ranks."""
        return self._error is not None

    def meet(self, is_last: bool = True) -> None:
        """Synchronise errors: raise an error from any process in all of them.

        Call this method before any other wait for the other processes.

        Args:
            is_last: Whether this is the last synchronisation in the context.
        """
        error, self._error = self._error, None
        has_failed = self.ranks.any(error is not None)
        self._is_over = is_last or has_failed
        if has_failed:
            raise error or OtherRankError(
                "drafting must go well in every process, got an error in another one"
            )

    def report(self, reason: str) -> None:
        """Record a fallback and warn about it once."""
        if reason not in self.stats.fallbacks:
            self.stats.add_fallback(reason)
            warn_user(reason)


def is_of_device(error: Exception, device: torch.device) -> bool:
    """Return whether an error has left the device unusable; wait for queued work to find out."""
    if isinstance(error, _OF_DEVICES):
        return True
    if device.type != "cuda":
        return False
    try:  # kernels run asynchronously, so a device fault may still be pending
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
