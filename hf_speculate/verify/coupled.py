"""Coupled verification: the target must sample the drafted token with the same noise.

The target's token is the winner of an exponential race on its distribution, with noise keyed by row
seed, position and token id. Drafts are sampled with the same noise, so they agree often.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_coupled
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class CoupledVerifier(KernelVerifier):
    """Lossless verifier with noise shared by the draft.

    The output depends on row seed and prompt only, whatever is drafted.

    Source:
        Daliri et al. (arXiv:2408.07978).
    """

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_coupled)
    reads_draft_logits = False
