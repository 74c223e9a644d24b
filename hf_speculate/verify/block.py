"""Block verification: the output's law is exactly the target's, from the longest prefix that a joint test allows."""

from dataclasses import dataclass

from torch import Tensor

from hf_speculate.triton_kernels import verify_block
from hf_speculate.types import DraftOut, NoiseKeys, Verdict


@dataclass(frozen=True)
class BlockVerifier:
    """Lossless, and keeps on average at least as many tokens as rejection; the same where the draft is a point mass.

    Args:
        backend: of the kernel.

    Source:
        Sun et al. (arXiv:2403.10444), algorithm 2.
    """

    backend: str = "auto"

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`."""
        return verify_block(
            target_logits,
            draft.token_ids,
            draft.token_logits,
            keys=keys,
            draft_lens=draft.lens,
            draft_logsumexp=draft.logsumexp,
            backend=self.backend,
        )
