"""Kernel verifiers: verifiers that run a single operation from `hf_speculate.kernels`."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from hf_speculate.types import DraftOut, NoiseKeys, Verdict


class KernelVerifier:
    """Verifier that runs a single operation.

    A subclass is a dataclass whose fields are the options of the operation.
    """

    operation: ClassVar[Callable[..., Verdict]]
    reads_draft_logits: ClassVar[bool] = True  # whether the operation takes draft logits
    reads_keys: ClassVar[bool] = True  # whether the operation takes noise keys

    @property
    def is_capturable(self) -> bool:
        """Whether a device graph may capture the verifier; False if a subclass changes `verify`."""
        return type(self).verify is KernelVerifier.verify

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """Verify one round; see `Verifier.verify`."""
        arguments: dict[str, Any] = {"draft_lens": draft.lens, **vars(self)}
        if self.reads_draft_logits:
            arguments |= {"draft_logits": draft.token_logits, "draft_logsumexp": draft.logsumexp}
        if self.reads_keys:
            arguments["keys"] = keys
        return type(self).operation(target_logits, draft.token_ids, **arguments)
