"""Greedy verification: a drafted token is accepted if it is the argmax of the target's logits.

The token after the accepted ones is the argmax at their position. Ties go to the lowest id.
"""

from dataclasses import dataclass

from torch import Tensor

from hf_speculate.triton_kernels import verify_greedy
from hf_speculate.types import DraftOut, NoiseKeys, Verdict


@dataclass(frozen=True)
class GreedyVerifier:
    """Greedy verification, lossless for `do_sample=False`."""

    backend: str = "auto"  # of the kernel

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`; needs no noise."""
        return verify_greedy(target_logits, draft.token_ids, draft_lens=draft.lens, backend=self.backend)
