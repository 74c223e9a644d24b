"""Rejection sampling: lossless verification of sampled drafts and point masses.

With target distribution p, draft distribution q and a uniform u, token x is accepted if u < min(1,
p(x) / q(x)). After the first rejection a token is sampled from the residual max(p - q, 0),
normalised; after a full acceptance, from p at the bonus position. For a point mass, x is accepted
if u < p(x), and the residual is p without x.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_rejection
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class RejectionVerifier(KernelVerifier):
    """Lossless verifier with a test of every token.

    Source:
        Leviathan et al. (arXiv:2211.17192), algorithm 1; Chen et al. (arXiv:2302.01318), algorithm
        2.
    """

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_rejection)
