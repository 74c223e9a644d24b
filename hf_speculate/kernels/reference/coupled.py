"""Torch reference of coupled verification."""

import torch

from .._inputs import Round, Warp
from ..types import NoiseKeys, Stream, Verdict
from .chain import find_end, make_chain, make_verdict
from .greedy import greedy, with_greedy_rows
from .masses import row_masses
from .races import race_rows
from .rows import row_status


def coupled(round_: Round, warp: Warp, keys: NoiseKeys) -> Verdict:
    """See `verify_coupled`."""
    if warp.is_greedy:
        return greedy(round_)
    chain = make_chain(round_)
    masses, _, logsumexp = row_masses(round_.target_logits, warp)
    offsets = torch.arange(masses.shape[1], device=masses.device).unsqueeze(0)
    winners = race_rows(masses, keys, Stream.RACE, offsets)  # [B, K+1]
    is_valid = logsumexp.abs() < torch.inf
    end = find_end(chain, (winners[:, :-1] == chain.token_ids) & is_valid[:, :-1])
    here = end.num_accepted.unsqueeze(-1)
    status = row_status(logsumexp.gather(1, here).squeeze(-1))
    verdict = make_verdict(chain, end, winners.gather(1, here).squeeze(-1), status)
    return with_greedy_rows(round_, warp, verdict)
