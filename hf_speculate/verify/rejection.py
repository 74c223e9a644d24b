"""Rejection sampling: lossless verification of sampled drafts and point masses.

With target distribution p, draft distribution q and a uniform number u, token x is accepted if
u < min(1, p(x) / q(x)). After the first rejection, a token is sampled from the normalised residual
max(p - q, 0). After a full acceptance, a token is sampled from p at the bonus position. For a point
mass, x is accepted if u < p(x), and the residual is p without x.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_rejection
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class RejectionVerifier(KernelVerifier):
    """Lossless verifier that tests every token.

    Source:
        Leviathan et al. (arXiv:2211.17192), algorithm 1; Chen et al. (arXiv:2302.01318), algorithm
        2.
    """

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_rejection)
