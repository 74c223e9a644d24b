"""Rejection sampling: the output's law is exactly the target's."""

from dataclasses import dataclass

from torch import Tensor

from hf_speculate.triton_kernels import verify_rejection
from hf_speculate.types import DraftOut, NoiseKeys, Verdict


@dataclass(frozen=True)
class RejectionVerifier:
    """Lossless speculative sampling, for drafts that sample and for point masses.

    Args:
        backend: of the kernel.

    Source:
        Leviathan et al. (arXiv:2211.17192), algorithm 1; Chen et al. (arXiv:2302.01318), algorithm 2.
    """

    backend: str = "auto"

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`."""
        return verify_rejection(
            target_logits,
            draft.token_ids,
            draft.token_logits,
            keys=keys,
            draft_lens=draft.lens,
            draft_logsumexp=draft.logsumexp,
            backend=self.backend,
        )
