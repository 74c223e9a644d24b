"""Coupled verification: accept a drafted token if the target samples it with the same noise.

The target's token is the winner of an exponential race on the target distribution, with noise keyed
by row seed, position and token id. Drafts are sampled with the same noise, so they often agree.
"""

from dataclasses import dataclass

from hf_speculate.kernels import verify_coupled
from hf_speculate.verify.kernel import KernelVerifier


@dataclass(frozen=True)
class CoupledVerifier(KernelVerifier):
    """Lossless verifier that shares its noise with the draft.

    The output depends only on the row seed and the prompt, not on the draft.

    Source:
        Daliri et al. (arXiv:2408.07978).
    """

    backend: str = "auto"  # kernel backend

    operation = staticmethod(verify_coupled)
    reads_draft_logits = False
