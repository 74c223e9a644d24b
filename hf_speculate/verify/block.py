"""Block verification: accept the longest prefix of a draft that passes a joint test; lossless.

With p and q as in rejection sampling, the weight of a prefix of i tokens is w_i = min(1, w_{i-1} *
p(x_i) / q(x_i)), where w_0 = 1. A prefix of i < K tokens passes with probability
S_i / (S_i + 1 - w_i), where S_i is the mass of max(w_i * p - q, 0) at the next position. The whole
draft passes with probability w_K. The longest passing prefix is accepted. The token after it is
sampled from the normalised residual max(w_i * p - q, 0), or from p at the bonus position after a
full acceptance.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_block
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class BlockVerifier(KernelVerifier):
    """Lossless verifier with a joint test for prefixes.

    On average, it accepts at least as many tokens as rejection sampling; for point masses, it
    accepts the same number.

    Source:
        Sun et al. (arXiv:2403.10444), algorithm 2.
    """

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_block)
