"""Verification by typical acceptance."""

import torch
from torch import Tensor

from ._checks import check_keys, check_round, check_warp
from ._inputs import Round, TypicalRule, Warp
from .backends import operations
from .errors import ConfigError
from .types import NoiseKeys, Verdict

CORRECTIONS = ("argmax", "sample")


@torch.no_grad()
def verify_typical(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    *,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    correction: str = "argmax",
    entropy_epsilon: float = 0.0,
    keys: NoiseKeys | None = None,
    draft_lens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    row_cutoffs: Tensor | None = None,
    backend: str = "auto",
) -> Verdict:
    """Accept drafted tokens while p(x) > min(threshold, alpha * exp(-entropy of p)).

    Here p is the target distribution. Typical acceptance is lossy: the output does not follow the
    target distribution.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64.
        posterior_threshold: in (0, 1), a probability.
        posterior_alpha: > 0.
        correction: how to choose the correction or bonus token, "argmax" or "sample".
        entropy_epsilon: >= 0, added inside the logarithm of the entropy; 0 gives the exact entropy
            in nats.
        keys: [B] int64 each, required for correction="sample" (stream CORRECTION).
        draft_lens: [B] int32 or int64, number of valid drafted tokens; None means K for all rows.
        temperature: divides the target logits in float32; a float or [B], >= 0; 0 means greedy.
        row_cutoffs: [B, K+1], thresholds for the scaled target logits; smaller logits are masked.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict; `token_ids` [B, K+1] are padded with -1.

    Raises:
        ConfigError: the backend or correction is unknown, a value is out of range, or
            correction="sample" has no keys.
        KernelUnavailableError: backend="triton" is not available.
        ShapeError: a tensor has the wrong shape, dtype or device.

    Source: Cai et al., arXiv:2401.10774, section 3.3.1.
    """
    check_round(target_logits, draft_token_ids, draft_lens)
    warp = check_warp(target_logits, "B, K+1", Warp(temperature, row_cutoffs))
    rule = TypicalRule(
        posterior_threshold, posterior_alpha, entropy_epsilon, samples=correction == "sample"
    )
    if correction not in CORRECTIONS:
        raise ConfigError(
            f'correction must be one of "argmax", "sample", got {correction!r}; "argmax" needs no '
            "keys"
        )
    if rule.samples and keys is None:
        raise ConfigError(
            'keys must be given with correction="sample", got None; or pass correction="argmax"'
        )
    if keys is not None:
        check_keys(keys, target_logits)
    round_ = Round(target_logits, draft_token_ids, draft_lens)
    return operations(backend, target_logits.device).typical(round_, warp, rule, keys)
