"""Torch reference of typical acceptance."""

import torch
from torch import Tensor

from .._inputs import Round, TypicalRule, Warp
from ..types import NoiseKeys, Stream, Verdict
from .chain import find_end, make_chain, make_verdict
from .greedy import greedy, with_greedy_rows
from .masses import LOG2_E, masses_and_exponents, row_masses
from .races import race_rows
from .rows import chunks, first_max, pick_rows, row_status, row_sum, scale, warp_at, warp_of

# exp2(-300) is 0 in float32. The product of 0 and a finite exponent is 0, whereas 0 * -inf is NaN.
MIN_EXPONENT = -300.0


def _accept(logits: Tensor, warp: Warp, token_ids: Tensor, rule: TypicalRule) -> Tensor:
    """Test every position separately, [B, K] bool; False for an invalid row.

    The logits are [B, K, V].
    """
    target, exponents = masses_and_exponents(logits, warp)
    if rule.entropy_epsilon > 0.0:
        terms = exponents[..., : logits.shape[-1]]
        torch.div(target.masses, target.sums.unsqueeze(-1), out=terms)
        terms.mul_((terms + rule.entropy_epsilon).log_())
        entropy = -row_sum(exponents)
    else:
        exponents.clamp_(min=MIN_EXPONENT)[..., : logits.shape[-1]].mul_(target.masses)
        entropy = target.sums.log() - row_sum(exponents) / (target.sums * LOG2_E)
    thresholds = (-entropy).exp_().mul_(rule.alpha).clamp_(max=rule.threshold)
    masses = target.masses.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return masses > thresholds.mul_(target.sums)


def typical(round_: Round, warp: Warp, rule: TypicalRule, keys: NoiseKeys | None) -> Verdict:
    """See `verify_typical`."""
    if warp.is_greedy:
        return greedy(round_)
    chain = make_chain(round_)
    temperature, cutoffs = warp
    inner = warp if cutoffs is None else Warp(temperature, cutoffs[:, :-1])
    logits = round_.target_logits[:, :-1]
    parts = [
        _accept(logits[chunk], warp_of(inner, chunk), chain.token_ids[chunk], rule)
        for chunk in chunks(logits)
    ]
    end = find_end(chain, torch.cat(parts))
    final_logits = pick_rows(round_.target_logits, end.num_accepted)  # [B, V]
    values, final_ids = first_max(
        scale(final_logits, temperature, torch.empty_like(final_logits, dtype=torch.float32))
    )
    warp = warp_at(warp, end.num_accepted)
    if warp.row_cutoffs is not None:
        dropped = values < warp.row_cutoffs
        values, final_ids = (
            values.masked_fill(dropped, -torch.inf),
            final_ids.masked_fill(dropped, 0),
        )
    if rule.samples and keys is not None:
        final_ids = race_rows(
            row_masses(final_logits, warp).masses, keys, Stream.CORRECTION, end.num_accepted
        )
    return with_greedy_rows(round_, warp, make_verdict(chain, end, final_ids, row_status(values)))
