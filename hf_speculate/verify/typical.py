"""Typical acceptance: lossy verification with a threshold that falls with the target's entropy.

With target distribution p and its entropy H(p) in nats, token x is accepted if p(x) >
min(posterior_threshold, posterior_alpha * exp(-H(p))). The token after the accepted tokens is the
argmax of p, or a sample from p, at the next position.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_typical
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class TypicalVerifier(KernelVerifier):
    """Lossy verifier with an entropy-dependent threshold.

    Source:
        Cai et al. (arXiv:2401.10774), section 3.3.1.
    """

    posterior_threshold: float = 0.09  # in (0, 1)
    posterior_alpha: float = 0.3  # > 0
    entropy_epsilon: float = 0.0  # >= 0, added inside the logarithm of the entropy
    correction: str = "argmax"  # how to choose the next token, "argmax" or "sample"
    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_typical)
    reads_draft_logits = False
