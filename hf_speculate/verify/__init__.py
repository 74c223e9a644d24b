"""Verifiers: rules that decide which drafted tokens are accepted."""

from hf_speculate.config import SpeculationConfig
from hf_speculate.types import Stream
from hf_speculate.verify.base import Verifier, register_verifier
from hf_speculate.verify.block import BlockVerifier
from hf_speculate.verify.coupled import CoupledVerifier
from hf_speculate.verify.greedy import GreedyVerifier
from hf_speculate.verify.prefix import keep_prefix
from hf_speculate.verify.rejection import RejectionVerifier
from hf_speculate.verify.typical import TypicalVerifier


def _make_typical(config: SpeculationConfig) -> TypicalVerifier:
    return TypicalVerifier(
        posterior_threshold=config.posterior_threshold,
        posterior_alpha=config.posterior_alpha,
        entropy_epsilon=config.entropy_epsilon,
        correction=config.typical_correction or "argmax",
        backend=config.verifier_backend,
    )


register_verifier(
    "greedy",
    lambda config: GreedyVerifier(config.verifier_backend),
    lossless=True,
    reads_draft_logits=False,
    reads_keys=False,
)
register_verifier("rejection", lambda config: RejectionVerifier(config.verifier_backend), lossless=True)
register_verifier("typical", _make_typical, lossless=False, reads_draft_logits=False)
register_verifier("block", lambda config: BlockVerifier(config.verifier_backend), lossless=True)
register_verifier(
    "coupled",
    lambda config: CoupledVerifier(config.verifier_backend),
    lossless=True,
    reads_draft_logits=False,
    draft_stream=Stream.RACE,
)

__all__ = [
    "BlockVerifier",
    "CoupledVerifier",
    "GreedyVerifier",
    "RejectionVerifier",
    "TypicalVerifier",
    "Verifier",
    "keep_prefix",
    "register_verifier",
]
