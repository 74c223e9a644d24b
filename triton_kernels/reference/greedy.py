"""The torch twin of greedy matching."""

import torch

from .._inputs import Round, Warp
from ..types import Verdict
from .rows import first_max, law_status
from .walk import choose_rows, find_end, make_chain, make_verdict


def greedy(round_: Round) -> Verdict:
    """See `verify_greedy`."""
    chain = make_chain(round_)
    best = first_max(round_.target_logits)  # [B, K+1]
    has_law = best.values.abs() < torch.inf
    end = find_end(chain, (best.indices[:, :-1] == chain.token_ids) & has_law[:, :-1])
    positions = end.num_accepted.unsqueeze(-1)
    final_ids = best.indices.gather(1, positions).squeeze(-1)
    return make_verdict(chain, end, final_ids, law_status(best.values.gather(1, positions).squeeze(-1)))


def with_greedy_rows(round_: Round, warp: Warp, verdict: Verdict) -> Verdict:
    """`verdict`, but greedy where the temperature is 0."""
    if not isinstance(warp.temperature, torch.Tensor):
        return verdict
    return choose_rows(warp.temperature == 0, greedy(round_), verdict)
