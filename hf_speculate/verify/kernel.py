"""Kernel verifiers: verifiers made of one operation of `hf_speculate.kernels`."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from hf_speculate.types import DraftOut, NoiseKeys, Verdict


class KernelVerifier:
    """Verifier made of one operation.

    A subclass is a dataclass. Its fields are the options of the operation.
    """

    operation: ClassVar[Callable[..., Verdict]]
    reads_draft_logits: ClassVar[bool] = True  # whether the operation takes draft logits
    reads_keys: ClassVar[bool] = True  # whether it takes noise keys

    @property
    def is_capturable(self) -> bool:
        """Whether a device graph may capture it; False for other rules of a subclass."""
        return type(self).verify is KernelVerifier.verify

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """Verify one round, see `Verifier.verify`."""
        arguments: dict[str, Any] = {"draft_lens": draft.lens, **vars(self)}
        if self.reads_draft_logits:
            arguments |= {"draft_logits": draft.token_logits, "draft_logsumexp": draft.logsumexp}
        if self.reads_keys:
            arguments["keys"] = keys
        return type(self).operation(target_logits, draft.token_ids, **arguments)
