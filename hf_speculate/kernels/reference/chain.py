"""Drafted chains: validate ids and lengths, find the first rejection, assemble the verdict."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._inputs import Round
from ..types import Status, Verdict

# A Python number, because torch.compile cannot trace the conversion of an enum.
BAD_DRAFT_ID = int(Status.BAD_DRAFT_ID)


class Chain(NamedTuple):
    """The validated drafted tokens of one round."""

    token_ids: Tensor  # [B, K] int64, clamped to [0, V)
    good_ids: Tensor  # [B, K] bool, whether the id was in [0, V)
    acceptable: Tensor  # [B, K] bool, whether the id was in [0, V) and within the row's length
    lens: Tensor | int  # [B] int64, or K for all rows


class End(NamedTuple):
    """The first rejected position of every row."""

    # [B] int64, also the index of the target row for the correction or bonus token
    num_accepted: Tensor
    last: Tensor  # [B] int64, num_accepted clamped to K-1
    rejected: Tensor  # [B] bool, whether a drafted token in [0, V) was rejected
    bad_id: Tensor  # [B] bool, whether a drafted token outside [0, V) was rejected


def make_chain(round_: Round) -> Chain:
    """Clamp drafted ids to [0, V) and lengths to 0..K."""
    draft_token_ids, draft_lens, vocab_size = (
        round_.draft_token_ids,
        round_.draft_lens,
        round_.target_logits.shape[-1],
    )
    num_draft_tokens = draft_token_ids.shape[1]
    ids = draft_token_ids.to(torch.int64)
    safe_ids = ids.clamp(0, vocab_size - 1)
    good_ids = ids == safe_ids
    if draft_lens is None:
        return Chain(safe_ids, good_ids, good_ids, num_draft_tokens)
    lens = draft_lens.to(torch.int64).clamp(0, num_draft_tokens)
    counted = torch.arange(num_draft_tokens, device=ids.device) < lens.unsqueeze(-1)
    return Chain(safe_ids, good_ids, good_ids & counted, lens)


def find_end(chain: Chain, accepted: Tensor) -> End:
    """End each row at its first position where `accepted` [B, K] bool is False."""
    return end_at(chain, (accepted & chain.acceptable).cumprod(-1, dtype=torch.int64).sum(-1))


def end_at(chain: Chain, num_accepted: Tensor) -> End:
    """End each row after `num_accepted` [B] int64 tokens."""
    num_draft_tokens = chain.token_ids.shape[1]
    ended = num_accepted < chain.lens
    if num_draft_tokens == 0:
        return End(num_accepted, num_accepted, ended, ended)
    last = num_accepted.clamp(max=num_draft_tokens - 1)
    rejected = ended & chain.good_ids.gather(1, last.unsqueeze(-1)).squeeze(-1)
    return End(num_accepted, last, rejected, ended ^ rejected)


def make_verdict(chain: Chain, end: End, final_ids: Tensor, status: Tensor) -> Verdict:
    """Assemble accepted tokens, then `final_ids` [B] int64, then -1.

    BAD_DRAFT_ID is added to `status` [B] int32.
    """
    columns = torch.arange(chain.token_ids.shape[1] + 1, device=final_ids.device)
    here, final_column = end.num_accepted.unsqueeze(-1), final_ids.unsqueeze(-1)
    ids = torch.cat((chain.token_ids, final_column), dim=-1)  # [B, K+1]
    ids.scatter_(1, here, final_column).masked_fill_(columns > here, -1)
    flags = torch.add(status, end.bad_id, alpha=BAD_DRAFT_ID)
    return Verdict(ids, end.num_accepted.to(torch.int32), flags)


def choose_rows(rows: Tensor, yes: Verdict, no: Verdict) -> Verdict:
    """Take `yes` in rows where `rows` [B] bool is True, and `no` in the others."""
    return Verdict(
        torch.where(rows.unsqueeze(-1), yes.token_ids, no.token_ids),
        torch.where(rows, yes.num_accepted, no.num_accepted),
        torch.where(rows, yes.status, no.status),
    )
