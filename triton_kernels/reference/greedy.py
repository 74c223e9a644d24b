"""Torch reference of greedy verification."""

import torch

from .._inputs import Round, Warp
from ..types import Verdict
from .chain import choose_rows, find_end, make_chain, make_verdict, undrafted_verdict
from .rows import first_max, row_status


def greedy(round_: Round) -> Verdict:
    """See `verify_greedy`."""
    best = first_max(round_.target_logits)  # [B, K+1]
    if round_.target_logits.shape[1] == 1:  # with K = 0 most operators would work on empty tensors
        return undrafted_verdict(best.indices.squeeze(1), row_status(best.values.squeeze(1)))
    chain = make_chain(round_)
    is_valid = best.values.abs() < torch.inf
    end = find_end(chain, (best.indices[:, :-1] == chain.token_ids) & is_valid[:, :-1])
    positions = end.num_accepted.unsqueeze(-1)
    final_ids = best.indices.gather(1, positions).squeeze(-1)
    return make_verdict(chain, end, final_ids, row_status(best.values.gather(1, positions).squeeze(-1)))


def with_greedy_rows(round_: Round, warp: Warp, verdict: Verdict) -> Verdict:
    """Replace rows of `verdict` whose temperature is 0 by the greedy verdict."""
    if not isinstance(warp.temperature, torch.Tensor):
        return verdict
    return choose_rows(warp.temperature == 0, greedy(round_), verdict)
