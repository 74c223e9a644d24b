"""Coupled verification: a token stays while it is the one that the target draws itself."""

from dataclasses import dataclass

from torch import Tensor

from hf_speculate.triton_kernels import verify_coupled
from hf_speculate.types import DraftOut, NoiseKeys, Verdict


@dataclass(frozen=True)
class CoupledVerifier:
    """Lossless: the text is a function of row seed and prompt alone, whatever was drafted.

    Args:
        backend: of the kernel.

    Source:
        Daliri et al. (arXiv:2408.07978).
    """

    backend: str = "auto"

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`; reads no more of the draft than its tokens."""
        return verify_coupled(target_logits, draft.token_ids, keys=keys, draft_lens=draft.lens, backend=self.backend)
