"""Greedy verification: a drafted token is accepted if it is the argmax of the target's logits.

The token after the accepted ones is the argmax at their position. Ties go to the lowest id.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_greedy
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class GreedyVerifier(KernelVerifier):
    """Argmax verifier, lossless for `do_sample=False`."""

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_greedy)
    reads_draft_logits = False
    reads_keys = False
