"""Verifiers: rules for accepting drafted tokens."""

import importlib
from typing import TYPE_CHECKING, Any

from hf_speculate.config import SpeculationConfig
from hf_speculate.types import Stream
from hf_speculate.verify.base import Verifier, VerifierFactory, register_verifier

if TYPE_CHECKING:
    from hf_speculate.verify.block import BlockVerifier as BlockVerifier
    from hf_speculate.verify.coupled import CoupledVerifier as CoupledVerifier
    from hf_speculate.verify.greedy import GreedyVerifier as GreedyVerifier
    from hf_speculate.verify.prefix import keep_prefix as keep_prefix
    from hf_speculate.verify.rejection import RejectionVerifier as RejectionVerifier
    from hf_speculate.verify.typical import TypicalVerifier as TypicalVerifier

# Maps a name to its module. The module is imported on first use.
_MODULES = {
    "BlockVerifier": "block",
    "CoupledVerifier": "coupled",
    "GreedyVerifier": "greedy",
    "RejectionVerifier": "rejection",
    "TypicalVerifier": "typical",
    "keep_prefix": "prefix",
}
__all__ = [*_MODULES, "Verifier", "register_verifier"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def _without_options(name: str) -> VerifierFactory:
    """Return a factory for a verifier with one option, its kernel backend."""
    return lambda config: __getattr__(name)(config.verifier_backend)


def _make_typical(config: SpeculationConfig) -> Verifier:
    typical: type[TypicalVerifier] = __getattr__("TypicalVerifier")
    return typical(
        posterior_threshold=config.posterior_threshold,
        posterior_alpha=config.posterior_alpha,
        entropy_epsilon=config.entropy_epsilon,
        correction=config.typical_correction or "argmax",
        backend=config.verifier_backend,
    )


register_verifier(
    "greedy",
    _without_options("GreedyVerifier"),
    lossless=True,
    reads_draft_logits=False,
    reads_keys=False,
)
register_verifier("rejection", _without_options("RejectionVerifier"), lossless=True)
register_verifier("typical", _make_typical, lossless=False, reads_draft_logits=False)
register_verifier("block", _without_options("BlockVerifier"), lossless=True)
register_verifier(
    "coupled",
    _without_options("CoupledVerifier"),
    lossless=True,
    reads_draft_logits=False,
    draft_stream=Stream.RACE,
)
