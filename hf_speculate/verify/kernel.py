"""Kernel verifiers: verifiers that are one operation of `hf_speculate.kernels`."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from hf_speculate.types import DraftOut, NoiseKeys, Verdict


class KernelVerifier:
    """Hands a round to an operation; a subclass is a dataclass whose fields are the operation's options."""

    operation: ClassVar[Callable[..., Verdict]]
    reads_draft_logits: ClassVar[bool] = True  # whether the operation takes the distribution of the drafts
    reads_keys: ClassVar[bool] = True  # whether it takes keys of the noise

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`."""
        arguments: dict[str, Any] = {"draft_lens": draft.lens, **vars(self)}
        if self.reads_draft_logits:
            arguments |= {"draft_logits": draft.token_logits, "draft_logsumexp": draft.logsumexp}
        if self.reads_keys:
            arguments["keys"] = keys
        return type(self).operation(target_logits, draft.token_ids, **arguments)
