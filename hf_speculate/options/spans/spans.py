"""Spans: a lossy verifier decides inside spans of the sequence, a lossless verifier outside."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.config import SpeculationConfig
from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.transfers import send
from hf_speculate.types import DraftOut, NoiseKeys, Verdict
from hf_speculate.verify.base import Verifier, make_verifier


class Span(NamedTuple):
    """The opening and closing tokens of a span.

    Spans do not nest, so a second opening token has no effect.
    """

    open_id: int
    close_id: int

    def open_after_each(self, token_ids: Tensor, was_open: Tensor) -> Tensor:
        """Return whether each row is inside a span after its first i tokens of [B, K].

        The result is [B, K+1] bool.
        """
        # [B, K]: 1 opens, -1 closes
        marks = (token_ids == self.open_id).long() - (token_ids == self.close_id).long()
        marks = torch.cat([was_open.long()[:, None] * 2 - 1, marks], dim=1)  # [B, K+1]
        columns = torch.arange(marks.shape[1], device=marks.device)
        newest = torch.where(marks != 0, columns, 0).cummax(dim=1).values
        return marks.gather(1, newest) > 0


@dataclass(frozen=True)
class SpanVerifier:
    """A verifier that is lossy inside spans and lossless outside.

    Position i of a round is inside if the sequence with the first i drafted tokens ends inside a
    span. Every position is verified as a draft of one token, with the noise that it has in the
    whole round. Hence each token outside a span follows the target's distribution given the
    sequence before it, or is the target's argmax. An opening token counts as outside the span, and
    a closing token counts as inside.
    """

    lossy: Verifier  # verifies positions inside
    exact: Verifier  # verifies positions outside; its verdict must not depend on grouping
    span: Span  # opening and closing tokens
    is_open: Tensor  # [B] bool, whether each row ends inside a span

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        inside = self.span.open_after_each(draft.token_ids, self.is_open)  # [B, K+1]
        if inside.device.type == "cpu" and not inside.any():
            return self.exact.verify(target_logits, draft, keys)
        single_logits, single_draft, single_keys = _token_by_token(target_logits, draft, keys)
        lossy = self.lossy.verify(single_logits, single_draft, single_keys)
        # Run both on all positions, since selecting positions would synchronise with the device.
        only_lossy = inside.device.type == "cpu" and bool(inside.all())
        exact = lossy if only_lossy else self.exact.verify(single_logits, single_draft, single_keys)
        is_lossy = inside.flatten()
        token_ids = torch.where(is_lossy, lossy.token_ids[:, 0], exact.token_ids[:, 0]).view(
            inside.shape
        )
        # 0 or 1
        accepted = torch.where(is_lossy, lossy.num_accepted, exact.num_accepted).view(inside.shape)
        status = torch.where(is_lossy, lossy.status, exact.status).view(inside.shape)
        # [B]; nothing was drafted for the last position
        num_accepted = accepted.cumprod(dim=1).sum(dim=1)
        here = num_accepted[:, None]
        columns = torch.arange(inside.shape[1], device=inside.device)
        token_ids = token_ids.masked_fill(columns > here, -1)  # [B, K+1]
        return Verdict(token_ids, num_accepted.to(torch.int32), status.gather(1, here)[:, 0])


class Spans(PerRow):
    """The span state of each row: inside a span, or outside.

    Tokens are read once, on the host.
    """

    TENSORS = ("_num_read", "_is_open")

    def __init__(self, span: Span, exact: Verifier, num_pads: Sequence[int]):
        self.span = span
        self.exact = exact
        self._num_read = torch.tensor(num_pads, device="cpu")  # [B]
        self._is_open = torch.zeros(len(num_pads), dtype=torch.bool, device="cpu")

    def around(self, lossy: Verifier, host_tokens: TokenBuffer, token_ids: Tensor) -> SpanVerifier:
        """Return the verifier for positions after the rows' tokens, then `token_ids` [B, N]."""
        lens = torch.tensor(host_tokens.lens, device="cpu")
        width = max(int((lens - self._num_read).max()), 0)
        columns = self._num_read[:, None] + torch.arange(width, device="cpu")  # [B, width], unread
        news = host_tokens.token_ids.gather(
            1, columns.clamp(max=host_tokens.token_ids.shape[1] - 1)
        )
        news = news.masked_fill(columns >= lens[:, None], -1)
        self._is_open, self._num_read = self.span.open_after_each(news, self._is_open)[:, -1], lens
        is_open = send(self._is_open, token_ids.device)
        return SpanVerifier(
            lossy, self.exact, self.span, self.span.open_after_each(token_ids, is_open)[:, -1]
        )


def make_spans(config: SpeculationConfig, do_sample: bool, num_pads: Sequence[int]) -> Spans:
    """Make the spans for a call's settings."""
    exact = make_verifier(replace(config, verifier="rejection" if do_sample else "greedy"))
    open_id, close_id = config.relax_only_inside or ()
    return Spans(Span(int(open_id), int(close_id)), exact, num_pads)


def _token_by_token(
    target_logits: Tensor, draft: DraftOut, keys: NoiseKeys
) -> tuple[Tensor, DraftOut, NoiseKeys]:
    """Split B rounds of K+1 positions into N = B (K+1) rounds of one drafted token.

    Bonus positions get no drafted token.
    """
    num_positions, vocab_size = target_logits.shape[1:]
    offsets = torch.arange(num_positions, device=target_logits.device)
    logits, sums = draft.token_logits, draft.logsumexp
    singles = draft._replace(
        token_ids=pad(draft.token_ids, (0, 1)).reshape(-1, 1),
        lens=(draft.lens[:, None] - offsets).clamp(0, 1).reshape(-1).to(torch.int32),
        token_logits=None
        if logits is None
        else pad(logits, (0, 0, 0, 1)).reshape(-1, 1, vocab_size),
        logsumexp=None if sums is None else pad(sums, (0, 1)).reshape(-1, 1),
    )
    positions = (keys.positions[:, None] + offsets).reshape(-1)
    seeds, rounds = (
        values.repeat_interleave(num_positions) for values in (keys.seeds, keys.rounds)
    )
    # the sample at the second position is unused
    logits = target_logits.reshape(-1, 1, vocab_size).expand(-1, 2, -1)
    return logits, singles, NoiseKeys(seeds, rounds, positions)
