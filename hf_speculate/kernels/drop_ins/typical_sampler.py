"""vLLM's `TypicalAcceptanceSampler`, for typical acceptance from normalised probabilities."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._checks import FLOAT_DTYPES, ID_DTYPES, check_dtype, check_logits, check_shape
from .._inputs import Round, TypicalRule, Warp
from ..backends import operations
from ..errors import ConfigError, ShapeError
from .common import mask_undefined_draws

ENTROPY_EPSILON = 1e-5  # vLLM's constant


@dataclass(frozen=True)
class TypicalAcceptanceSampler:
    """Typical acceptance from probabilities, like vLLM's class.

    `verify_typical` is the equivalent for logits, with the exact entropy.

    Args:
        posterior_threshold: in (0, 1), a probability.
        posterior_alpha: > 0.
        strict_mode: whether to check devices and the range of every id, which synchronises with the
            device.
        disable_bonus_tokens: whether to emit -1 instead of the bonus token.
        backend: "auto", "torch" or "triton".

    Raises:
        ConfigError: a value is out of range.

    Source: Cai et al., arXiv:2401.10774, section 3.3.1.
    """

    posterior_threshold: float
    posterior_alpha: float
    strict_mode: bool = False
    disable_bonus_tokens: bool = False
    backend: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        self._make_rule()

    def _make_rule(self) -> TypicalRule:
        return TypicalRule(
            self.posterior_threshold, self.posterior_alpha, ENTROPY_EPSILON, samples=False
        )

    @torch.no_grad()
    def __call__(
        self,
        target_with_bonus_probs: Tensor,
        bonus_token_ids: Tensor,
        draft_probs: Tensor | None,
        draft_token_ids: Tensor,
    ) -> Tensor:
        """Accept drafted tokens while p(x) > min(threshold, alpha * exp(-entropy of p)).

        Args:
            target_with_bonus_probs: [B, K+1, V] probabilities, any float dtype; each row is divided
                by its sum.
            bonus_token_ids: [B] or [B, 1] int32 or int64, emitted if all drafted tokens are
                accepted.
            draft_probs: [B, K, V] or None; ignored.
            draft_token_ids: [B, K] int32 or int64. An id outside [0, V) is rejected.

        Returns:
            [B, K+1] int64: the accepted prefix, the target's most probable token at the first
            rejection (ties go to the lowest index; -1 if the target row is not a valid
            distribution), then -1.

        Raises:
            ConfigError: the backend is unknown, or in strict mode an id is outside [0, V).
            KernelUnavailableError: backend="triton" is not available.
            ShapeError: a tensor has the wrong shape or dtype, or in strict mode the wrong device.
        """
        _check(target_with_bonus_probs, bonus_token_ids, draft_token_ids)
        if self.strict_mode:
            _check_strictly(target_with_bonus_probs, bonus_token_ids, draft_probs, draft_token_ids)
        implementation = operations(self.backend, target_with_bonus_probs.device)
        logits = target_with_bonus_probs.to(torch.float32).log()
        verdict = implementation.typical(
            Round(logits, draft_token_ids, None), Warp(), self._make_rule(), None
        )
        at = verdict.num_accepted.to(torch.int64).unsqueeze(-1)  # [B, 1]
        # Take the argmax over probabilities, since the logarithm can round two of them to the same
        # number.
        # [B, 1, V]
        rows = target_with_bonus_probs.gather(1, at.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        best = implementation.greedy(Round(rows, draft_token_ids[:, :0], None)).token_ids  # [B, 1]
        ids = mask_undefined_draws(
            verdict._replace(token_ids=verdict.token_ids.scatter(1, at, best)), logits
        )
        bonus = bonus_token_ids.view(-1, 1).to(torch.int64)
        if self.disable_bonus_tokens:
            bonus = torch.full_like(bonus, -1)
        ids[:, -1:] = torch.where(at == draft_token_ids.shape[1], bonus, ids[:, -1:])
        return ids


def _check(target_probs: Tensor, bonus_token_ids: Tensor, draft_token_ids: Tensor) -> None:
    check_logits("target_with_bonus_probs", target_probs, "B, K+1, V")
    num_rows, num_positions, _ = target_probs.shape
    check_shape("draft_token_ids", draft_token_ids, "B, K", (num_rows, num_positions - 1))
    check_dtype("draft_token_ids", draft_token_ids, ID_DTYPES)
    legend, shape = ("B", (num_rows,)) if bonus_token_ids.dim() == 1 else ("B, 1", (num_rows, 1))
    check_shape("bonus_token_ids", bonus_token_ids, legend, shape)
    check_dtype("bonus_token_ids", bonus_token_ids, ID_DTYPES)


def _check_strictly(
    target_probs: Tensor,
    bonus_token_ids: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
) -> None:
    """Raise unless devices agree, `draft_probs` matches the target, and all ids are in [0, V)."""
    num_rows, num_positions, vocab_size = target_probs.shape
    if draft_probs is not None:
        check_shape(
            "draft_probs", draft_probs, "B, K, V", (num_rows, num_positions - 1, vocab_size)
        )
        check_dtype("draft_probs", draft_probs, FLOAT_DTYPES)
    named = {
        "bonus_token_ids": bonus_token_ids,
        "draft_probs": draft_probs,
        "draft_token_ids": draft_token_ids,
    }
    for name, tensor in named.items():
        if tensor is not None and tensor.device != target_probs.device:
            raise ShapeError(
                f"{name} must be on {target_probs.device} like target_with_bonus_probs, got "
                f"{tensor.device}; move it"
            )
    for name in ("bonus_token_ids", "draft_token_ids"):
        ids = named[name]
        if (
            ids is not None
            and ids.numel()
            and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
        ):
            raise ConfigError(
                f"{name} must be in [0, V) = [0, {vocab_size}), got "
                f"{int(ids.min())}..{int(ids.max())}; "
                "with strict_mode=False such drafted ids are rejected"
            )
