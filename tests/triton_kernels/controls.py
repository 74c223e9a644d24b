"""Negative controls: wrong implementations that a test of the distribution must detect."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import Stream
from hf_speculate.triton_kernels.reference import rejection
from hf_speculate.triton_kernels.reference.chain import Chain, End
from hf_speculate.triton_kernels.reference.rejection import Draft, FinalDistribution, Target, final_distribution


def residual_of_logits(
    target: Target, draft: Draft, chain: Chain, end: End, ratios: Tensor | None = None
) -> FinalDistribution:
    """`final_distribution` with the residual of logits instead of probabilities."""
    final = final_distribution(target, None, chain, end._replace(rejected=torch.zeros_like(end.rejected)))
    logsumexp = target.logsumexp.gather(1, end.num_accepted.unsqueeze(-1))
    logits = final.weights.log() + final.pieces.expand(logsumexp).unsqueeze(-1)
    residual = (logits - final.pieces.gather_at(draft.logits, end.last)).clamp(min=0.0)
    return final._replace(weights=torch.where(final.pieces.expand(end.rejected).unsqueeze(-1), residual, final.weights))


def correction_noise_of_the_draft(patch: pytest.MonkeyPatch, twin: ModuleType) -> None:
    """The correction is drawn with the noise of the draft's own tokens."""
    race = twin.race
    patch.setattr(twin, "race", lambda weights, pieces, keys, _, at: race(weights, pieces, keys, Stream.DRAFT, at))


def coins_of_the_draft(patch: pytest.MonkeyPatch, twin: ModuleType) -> None:
    """Acceptance coins are the noise of the draft's own tokens."""
    uniforms = rejection.uniforms
    patch.setattr(rejection, "uniforms", lambda keys, _, at, ids: uniforms(keys, Stream.DRAFT, at, ids))


def epsilon_in_the_residual(patch: pytest.MonkeyPatch, twin: ModuleType) -> None:
    """Every token has a little weight in the residual."""
    race, epsilon = twin.race, 1e-4
    patch.setattr(twin, "race", lambda weights, *rest: race(weights + epsilon, *rest))


def target_in_place_of_the_residual(patch: pytest.MonkeyPatch, twin: ModuleType) -> None:
    """After a rejection the target itself is drawn from."""
    final = twin.final_distribution

    def without_residual(target: Target, draft: Draft, chain: Chain, end: End, *rest: Any) -> FinalDistribution:
        return final(target, draft, chain, end._replace(rejected=torch.zeros_like(end.rejected)), *rest)

    patch.setattr(twin, "final_distribution", without_residual)


def logits_in_the_residual(patch: pytest.MonkeyPatch, twin: ModuleType) -> None:
    """The residual is one of logits."""
    patch.setattr(twin, "final_distribution", residual_of_logits)


# What makes the reference of a verifier wrong.
CONTROLS: dict[str, Callable[[pytest.MonkeyPatch, ModuleType], None]] = {
    control.__name__.replace("_", " "): control
    for control in (
        correction_noise_of_the_draft,
        coins_of_the_draft,
        epsilon_in_the_residual,
        target_in_place_of_the_residual,
        logits_in_the_residual,
    )
}
