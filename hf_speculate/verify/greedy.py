"""Greedy verification: accept a drafted token if it is the argmax of the target's logits.

The token after the accepted tokens is the argmax at the next position. Ties go to the lowest id.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_greedy
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class GreedyVerifier(KernelVerifier):
    """Argmax verifier that is lossless for `do_sample=False`."""

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_greedy)
    reads_draft_logits = False
    reads_keys = False
