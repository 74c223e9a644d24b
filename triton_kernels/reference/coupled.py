"""The torch twin of coupled verification."""

import torch

from .._inputs import Round, Warp
from ..types import NoiseKeys, Stream, Verdict
from .greedy import greedy, with_greedy_rows
from .masses import row_masses
from .races import race_rows
from .rows import law_status
from .walk import find_end, make_chain, make_verdict


def coupled(round_: Round, warp: Warp, keys: NoiseKeys) -> Verdict:
    """See `verify_coupled`."""
    if warp.is_greedy:
        return greedy(round_)
    chain = make_chain(round_)
    masses, _, logsumexp = row_masses(round_.target_logits, warp)
    offsets = torch.arange(masses.shape[1], device=masses.device).unsqueeze(0)
    winners = race_rows(masses, keys, Stream.RACE, offsets)  # [B, K+1]
    has_law = logsumexp.abs() < torch.inf
    end = find_end(chain, (winners[:, :-1] == chain.token_ids) & has_law[:, :-1])
    here = end.num_accepted.unsqueeze(-1)
    status = law_status(logsumexp.gather(1, here).squeeze(-1))
    verdict = make_verdict(chain, end, winners.gather(1, here).squeeze(-1), status)
    return with_greedy_rows(round_, warp, verdict)
