"""Torch reference of greedy verification."""

import math

import torch

from .._inputs import Round, Warp
from ..types import Verdict
from .chain import BAD_DRAFT_ID, choose_rows, find_end, make_chain, make_verdict
from .rows import FirstMax, first_max, is_on_host, row_status


def greedy(round_: Round) -> Verdict:
    """See `verify_greedy`."""
    best = first_max(round_.target_logits)  # [B, K+1]
    if is_on_host(best.values):
        return _verdict_on_host(round_, best)
    chain = make_chain(round_)
    is_valid = best.values.abs() < torch.inf
    end = find_end(chain, (best.indices[:, :-1] == chain.token_ids) & is_valid[:, :-1])
    positions = end.num_accepted.unsqueeze(-1)
    final_ids = best.indices.gather(1, positions).squeeze(-1)
    return make_verdict(
        chain, end, final_ids, row_status(best.values.gather(1, positions).squeeze(-1))
    )


def _verdict_on_host(round_: Round, best: FirstMax) -> Verdict:
    """Compute the verdict from Python numbers.

    It takes 0.13 ms, compared with 0.32 ms for the operators above (B = 1, K = 5, V = 4,096, 2
    cores of an AMD EPYC).
    """
    num_draft_tokens, vocab_size = round_.draft_token_ids.shape[1], round_.target_logits.shape[-1]
    lens = (
        [num_draft_tokens] * len(best.values)
        if round_.draft_lens is None
        else round_.draft_lens.tolist()
    )
    rows = zip(
        round_.draft_token_ids.tolist(),
        lens,
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    ids, num_accepted, final_values, bad_ids = [], [], [], []
    for drafted, length, best_ids, values in rows:
        drafted = drafted[: max(length, 0)]
        num_equal = 0
        while (
            num_equal < len(drafted)
            and drafted[num_equal] == best_ids[num_equal]
            and math.isfinite(values[num_equal])
        ):
            num_equal += 1
        ids.append(
            [*drafted[:num_equal], best_ids[num_equal], *[-1] * (num_draft_tokens - num_equal)]
        )
        num_accepted.append(num_equal)
        final_values.append(values[num_equal])
        bad_ids.append(num_equal < len(drafted) and not 0 <= drafted[num_equal] < vocab_size)
    status = row_status(torch.tensor(final_values, dtype=torch.float32, device="cpu"))
    if any(bad_ids):
        status = torch.add(status, torch.tensor(bad_ids, device="cpu"), alpha=BAD_DRAFT_ID)
    return Verdict(
        torch.tensor(ids, dtype=torch.int64, device="cpu").view(len(ids), num_draft_tokens + 1),
        torch.tensor(num_accepted, dtype=torch.int32, device="cpu"),
        status,
    )


def with_greedy_rows(round_: Round, warp: Warp, verdict: Verdict) -> Verdict:
    """Replace rows of `verdict` whose temperature is 0 with the greedy verdict."""
    if not isinstance(warp.temperature, torch.Tensor):
        return verdict
    return choose_rows(warp.temperature == 0, greedy(round_), verdict)
