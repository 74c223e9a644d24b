"""The walk along a drafted chain: where it ends, what is handed back."""

from typing import NamedTuple

import torch
from torch import Tensor

from .types import Status, Verdict


class Chain(NamedTuple):
    """What was drafted, in the form the twins read it."""

    token_ids: Tensor  # [B, K] int64, bad ids replaced by 0
    good_ids: Tensor  # [B, K] bool, whether the id is in [0, V)
    counted: Tensor  # [B, K] bool, whether the position is within the row's length
    lens: Tensor  # [B] int64

    @property
    def acceptable(self) -> Tensor:
        """[B, K] bool: the position counts and holds a token."""
        return self.counted & self.good_ids


class End(NamedTuple):
    """Where every row's chain ends."""

    num_accepted: Tensor  # [B] int64, also the index of the target row that gives the last token
    last: Tensor  # [B] int64, the drafted position there; the last one where none is left
    refused: Tensor  # [B] bool, a drafted token was refused there
    bad_id: Tensor  # [B] bool, and it was not in [0, V)


def make_chain(draft_token_ids: Tensor, draft_lens: Tensor | None, vocab_size: int) -> Chain:
    """Read drafted ids [B, K] and lengths [B], both as they come."""
    num_rows, num_draft_tokens = draft_token_ids.shape
    ids = draft_token_ids.to(torch.int64)
    good_ids = (ids >= 0) & (ids < vocab_size)
    if draft_lens is None:
        lens = torch.full((num_rows,), num_draft_tokens, dtype=torch.int64, device=ids.device)
    else:
        lens = draft_lens.to(torch.int64).clamp(0, num_draft_tokens)
    counted = torch.arange(num_draft_tokens, device=ids.device) < lens.unsqueeze(-1)
    return Chain(ids.masked_fill(~good_ids, 0), good_ids, counted, lens)


def find_end(chain: Chain, accepted: Tensor) -> End:
    """End each row at its first position that is not `accepted` [B, K] bool."""
    num_draft_tokens = accepted.shape[1]
    num_accepted = (accepted & chain.acceptable).to(torch.int64).cumprod(-1).sum(-1)
    refused = num_accepted < chain.lens
    last = num_accepted.clamp(max=max(num_draft_tokens - 1, 0))
    if num_draft_tokens == 0:
        return End(num_accepted, last, refused, refused)
    bad_id = refused & ~chain.good_ids.gather(1, last.unsqueeze(-1)).squeeze(-1)
    return End(num_accepted, last, refused, bad_id)


def make_verdict(chain: Chain, end: End, final_ids: Tensor, status: Tensor) -> Verdict:
    """Write the accepted tokens, `final_ids` [B] int64 after them, -1 beyond; `status` [B] int32 gains BAD_DRAFT_ID."""
    columns = torch.arange(chain.token_ids.shape[1] + 1, device=final_ids.device)
    num_accepted = end.num_accepted.unsqueeze(-1)
    ids = torch.cat((chain.token_ids, final_ids.unsqueeze(-1)), dim=-1)  # [B, K+1]
    ids = torch.where(columns == num_accepted, final_ids.unsqueeze(-1), ids).masked_fill_(columns > num_accepted, -1)
    flags = status | end.bad_id.to(torch.int32).mul_(int(Status.BAD_DRAFT_ID))
    return Verdict(ids, end.num_accepted.to(torch.int32), flags)


def choose_rows(rows: Tensor, yes: Verdict, no: Verdict) -> Verdict:
    """Take `yes` where `rows` [B] bool holds, `no` elsewhere."""
    return Verdict(
        torch.where(rows.unsqueeze(-1), yes.token_ids, no.token_ids),
        torch.where(rows, yes.num_accepted, no.num_accepted),
        torch.where(rows, yes.status, no.status),
    )
