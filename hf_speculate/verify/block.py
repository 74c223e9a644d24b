"""Block verification: lossless, accepts the longest prefix of a draft to pass a joint test.

With p and q as in rejection sampling, the weight of a prefix of i tokens is w_i = min(1, w_{i-1} *
p(x_i) / q(x_i)), w_0 = 1. Prefix i < K passes with probability S_i / (S_i + 1 - w_i), S_i being the
mass of max(w_i * p - q, 0) at the next position, and the whole draft with probability w_K. The
longest passing prefix is accepted. The token after it is sampled from the residual max(w_i * p - q,
0), normalised; after a full acceptance, from p at the bonus position.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_block
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class BlockVerifier(KernelVerifier):
    """Lossless verifier with a joint test of prefixes.

    It accepts at least as many tokens as rejection sampling on average, and as many for point
    masses.

    Source:
        Sun et al. (arXiv:2403.10444), algorithm 2.
    """

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_block)
