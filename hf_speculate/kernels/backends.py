"""Backend selection: the torch reference or the Triton kernels."""

import importlib.util
import os
from typing import Protocol

import torch
from torch import Tensor

from . import reference
from ._inputs import Cut, Proposal, Round, TypicalRule, Warp
from .custom_ops import CustomOperations
from .errors import ConfigError, KernelUnavailableError
from .types import NoiseKeys, Sampled, Stream, Verdict

BACKENDS = ("auto", "torch", "triton")
OLDEST_TRITON = (3, 6)


class Operations(Protocol):
    """Operations implemented by `reference` (torch) and `kernels` (Triton)."""

    def greedy(self, round_: Round) -> Verdict:
        """Verify greedily."""

    def reject(
        self, round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys
    ) -> Verdict:
        """Verify by rejection sampling."""

    def reject_and_test(
        self, round_: Round, proposal: Proposal, keys: NoiseKeys
    ) -> tuple[Verdict, Tensor]:
        """Verify by rejection sampling; also return the test at each position, [B, K] bool."""

    def typical(
        self, round_: Round, warp: Warp, rule: TypicalRule, keys: NoiseKeys | None
    ) -> Verdict:
        """Verify by typical acceptance; `keys` is required if the rule samples."""

    def block(self, round_: Round, warp: Warp, proposal: Proposal, keys: NoiseKeys) -> Verdict:
        """Verify by block verification."""

    def coupled(self, round_: Round, warp: Warp, keys: NoiseKeys) -> Verdict:
        """Verify against the target's own samples."""

    def sample(self, logits: Tensor, warp: Warp, keys: NoiseKeys, stream: Stream) -> Sampled:
        """Sample one token per row."""

    def cut(self, logits: Tensor, temperature: float, rule: Cut) -> Tensor:
        """Apply temperature and cutoffs to logits, see `warp_logits`."""


def is_interpreting() -> bool:
    """Return whether TRITON_INTERPRET is set.

    If it is, Triton runs kernels in Python, on tensors on any device.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def _triton_version() -> tuple[int, int] | None:
    """Return the major and minor version of Triton; None if it is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton  # optional dependency

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def check_backend(backend: str, device: torch.device) -> None:
    """Raise unless `backend` is known and available on `device`.

    Raises:
        ConfigError: the name is unknown.
        KernelUnavailableError: the backend is "triton", and Triton is missing, too old, or does not
            support the device.
    """
    if backend not in BACKENDS:
        choices = ", ".join(f'"{choice}"' for choice in BACKENDS)
        raise ConfigError(
            f'backend must be one of {choices}, got {backend!r}; leave it out for "auto"'
        )
    if backend != "triton":
        return
    version = _triton_version()
    if version is None or version < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        state = (
            "is not installed"
            if version is None
            else f"is installed as {'.'.join(map(str, version))}"
        )
        raise KernelUnavailableError(
            f'backend must be "auto" or "torch" here, got "triton", which {state}; pip install '
            f'"triton>={oldest}"'
        )
    if device.type != "cuda" and not is_interpreting():
        raise KernelUnavailableError(
            f'backend must be "auto" or "torch" for tensors on {device.type}, got "triton"; move '
            "them to a GPU, or "
            "set TRITON_INTERPRET=1 before Triton is imported"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs_kernels(backend: str, device: torch.device) -> bool:
    """Return whether `backend` selects Triton on `device`.

    "auto" does so on a GPU if a recent enough Triton is installed. Raise the errors of
    `check_backend`.
    """
    check_backend(backend, device)
    if backend == "auto":
        return device.type == "cuda" and (_triton_version() or (0, 0)) >= OLDEST_TRITON
    return backend == "triton"


def operations(backend: str, device: torch.device) -> Operations:
    """Return the implementation that `backend` selects on `device`; see `runs_kernels`.

    Raise the errors of `check_backend`.
    """
    is_triton = runs_kernels(backend, device)
    if torch.compiler.is_compiling():
        return CustomOperations(is_triton)
    if not is_triton:
        return reference
    from . import kernels  # imports Triton

    return kernels
