"""The torch twin of typical acceptance."""

import torch
from torch import Tensor

from .._inputs import Round, TypicalRule, Warp
from ..types import NoiseKeys, Stream, Verdict
from .greedy import greedy, with_greedy_rows
from .rows import Masses, first_max, law_status, padded_like, pick_rows, race, row_masses, row_sum, to_law
from .walk import find_end, make_chain, make_verdict

# exp(-200) is 0 in float32, and 0 times a finite number is 0, where 0 times -inf is not.
LOG_OF_NOTHING = -200.0


def _entropy(law: Tensor, target: Masses, epsilon: float) -> Tensor:
    """Entropy in nats [B, K] of `law` [B, K, V]; `epsilon` goes inside the logarithm."""
    rows = padded_like(law)
    terms = rows[..., : law.shape[-1]]
    if epsilon > 0.0:
        torch.div(target.masses, target.sums.unsqueeze(-1), out=terms)
        terms.mul_((terms + epsilon).log_())
        return -row_sum(rows)
    torch.sub(law, law.amax(-1, keepdim=True), out=terms)
    terms.clamp_(min=LOG_OF_NOTHING).mul_(target.masses)
    return target.sums.log() - row_sum(rows) / target.sums


def _accept(law: Tensor, token_ids: Tensor, rule: TypicalRule) -> Tensor:
    """Judge every position by itself.

    Args:
        law: [B, K, V] float32.
        token_ids: [B, K] int64 in [0, V).
        rule: its numbers.

    Returns:
        [B, K] bool, False where a row has no law.
    """
    target = row_masses(law)
    thresholds = (-_entropy(law, target, rule.entropy_epsilon)).exp_().mul_(rule.alpha).clamp_(max=rule.threshold)
    masses = target.masses.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return masses > thresholds.mul_(target.sums)


def typical(round_: Round, warp: Warp, rule: TypicalRule, keys: NoiseKeys | None) -> Verdict:
    """See `verify_typical`."""
    if warp.is_greedy:
        return greedy(round_)
    chain = make_chain(round_)
    law = to_law(round_.target_logits, warp)
    end = find_end(chain, _accept(law[:, :-1], chain.token_ids, rule))
    final_law = pick_rows(law, end.num_accepted)  # [B, V]
    best = first_max(final_law)
    final_ids = best.indices
    if rule.samples and keys is not None:
        final_ids = race(row_masses(final_law).masses, keys, Stream.CORRECTION, end.num_accepted)
    return with_greedy_rows(round_, warp, make_verdict(chain, end, final_ids, law_status(best.values)))
