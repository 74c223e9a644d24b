"""Greedy verification: a token stays while it is the target's argmax."""

from dataclasses import dataclass

from torch import Tensor

from hf_speculate.triton_kernels import verify_greedy
from hf_speculate.types import DraftOut, NoiseKeys, Verdict


@dataclass(frozen=True)
class GreedyVerifier:
    """Lossless for `do_sample=False`; ties go to the lowest id.

    Args:
        backend: of the kernel.
    """

    backend: str = "auto"

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`; needs no noise."""
        return verify_greedy(target_logits, draft.token_ids, draft_lens=draft.lens, backend=self.backend)
