"""Spans: a lossy verifier decides inside spans of the sequence, a lossless one outside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.config import SpeculationConfig
from hf_speculate.types import DraftOut, NoiseKeys, Verdict
from hf_speculate.verify.base import Verifier, make_verifier


class Span(NamedTuple):
    """The tokens that open and close a span. Spans do not nest: a second opening token changes nothing."""

    open_id: int
    close_id: int

    def is_open_after(self, token_ids: Sequence[int], was_open: bool) -> bool:
        """Whether a sequence ends inside a span after `token_ids`, the next tokens."""
        newest = next((token_id for token_id in reversed(token_ids) if token_id in self), None)
        return was_open if newest is None else newest == self.open_id

    def open_after_each(self, token_ids: Tensor, was_open: Tensor) -> Tensor:
        """[B, K+1] bool: whether each row is inside a span after its first i tokens of [B, K]."""
        marks = (token_ids == self.open_id).long() - (token_ids == self.close_id).long()  # [B, K]: 1 opens, -1 closes
        marks = torch.cat([was_open.long()[:, None] * 2 - 1, marks], dim=1)  # [B, K+1]
        columns = torch.arange(marks.shape[1], device=marks.device)
        newest = torch.where(marks != 0, columns, 0).cummax(dim=1).values
        return marks.gather(1, newest) > 0


@dataclass(frozen=True)
class SpanVerifier:
    """Verifies positions inside spans with a lossy verifier, and all others with a lossless one.

    Position i of a round is inside if the sequence and the first i drafted tokens end inside a span. Every position is
    verified as a draft of one token, with the noise that it has in the whole round. So each token outside has the
    target's distribution given the sequence before it, or is the target's argmax. The token that opens a span is
    verified outside, the one that closes it inside.
    """

    lossy: Verifier  # verifies positions inside
    exact: Verifier  # verifies positions outside; verifying position by position must give the same verdict
    span: Span  # the tokens that open and close a span
    is_open: Tensor  # [B] bool, whether each row ends inside a span

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        inside = self.span.open_after_each(draft.token_ids, self.is_open)  # [B, K+1]
        reads_are_free = inside.device.type == "cpu"
        if reads_are_free and not inside.any():
            return self.exact.verify(target_logits, draft, keys)
        verify_singles = self._verify_apart if reads_are_free else self._verify_twice
        verdict = verify_singles(_one_by_one(target_logits, draft, keys), inside.flatten())
        accepted = verdict.num_accepted.view(inside.shape)  # [B, K+1] 0 or 1; 0 if nothing was drafted
        num_accepted = accepted.cumprod(dim=1).sum(dim=1)  # [B]
        here = num_accepted[:, None]
        token_ids = verdict.token_ids[:, 0].view(inside.shape)  # [B, K+1], drafted tokens if accepted
        columns = torch.arange(inside.shape[1], device=inside.device)
        return Verdict(
            token_ids.masked_fill(columns > here, -1),
            num_accepted.to(torch.int32),
            verdict.status.view(inside.shape).gather(1, here)[:, 0],
        )

    def _verify_apart(self, singles: "_Singles", inside: Tensor) -> Verdict:
        """Verify N rounds of one position: those `inside` [N] bool by the lossy verifier, others by the exact one."""
        groups = [(self.lossy, inside.nonzero()[:, 0]), (self.exact, (~inside).nonzero()[:, 0])]
        verdicts = [verifier.verify(*singles.rows(indices)) for verifier, indices in groups if len(indices)]
        order = torch.cat([indices for _, indices in groups]).argsort()
        return Verdict(*(torch.cat(parts)[order] for parts in zip(*verdicts, strict=True)))

    def _verify_twice(self, singles: "_Singles", inside: Tensor) -> Verdict:
        """The same with both verifiers everywhere: telling rounds apart would wait for the device."""
        pairs = zip(self.lossy.verify(*singles), self.exact.verify(*singles), strict=True)
        return Verdict(*(torch.where(inside.view(-1, *[1] * (one.ndim - 1)), one, other) for one, other in pairs))


class Spans:
    """Whether each row is inside a span; tokens are read once, on the host."""

    def __init__(self, span: Span, exact: Verifier, num_pads: Sequence[int]):
        self.span = span
        self.exact = exact
        self._num_read = list(num_pads)
        self._is_open = [False] * len(self._num_read)

    def around(self, lossy: Verifier, host_tokens: TokenBuffer, token_ids: Tensor) -> SpanVerifier:
        """The verifier for the positions after the rows' tokens; `token_ids` [B, N] come next in each row."""
        for row, length in enumerate(host_tokens.lens):
            news = host_tokens.token_ids[row, self._num_read[row] : length].tolist()
            self._is_open[row] = self.span.is_open_after(news, self._is_open[row])
            self._num_read[row] = length
        is_open = torch.tensor(self._is_open, device=token_ids.device)
        return SpanVerifier(lossy, self.exact, self.span, self.span.open_after_each(token_ids, is_open)[:, -1])

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order."""
        self._num_read = [self._num_read[row] for row in indices]
        self._is_open = [self._is_open[row] for row in indices]


def make_spans(
    config: SpeculationConfig,
    do_sample: bool,
    num_pads: Sequence[int],
    wrap: Callable[[Verifier], Verifier] | None = None,
) -> Spans | None:
    """What restricts the call's verifier to spans; None if it decides everywhere."""
    if config.relax_only_inside is None:
        return None
    exact = make_verifier(replace(config, verifier="rejection" if do_sample else "greedy"))
    exact = exact if wrap is None else wrap(exact)
    return Spans(Span(*map(int, config.relax_only_inside)), exact, num_pads)


class _Singles(NamedTuple):
    """N rounds of one position each, as the arguments of a verifier."""

    target_logits: Tensor  # [N, 2, V]; the second row repeats the first, because its sample is not used
    draft: DraftOut  # of one token, which may not count
    keys: NoiseKeys

    def rows(self, indices: Tensor) -> "_Singles":
        """The rounds `indices` [M] int64."""
        ids, lens, logits, sums, _ = self.draft
        some_logits, some_sums = (None if part is None else part[indices] for part in (logits, sums))
        draft = DraftOut(ids[indices], lens[indices], some_logits, some_sums)
        return _Singles(self.target_logits[:, :1][indices].expand(-1, 2, -1), draft, self.keys.rows(indices))


def _one_by_one(target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> _Singles:
    """B rounds of K+1 positions as N = B (K+1) rounds; at a row's bonus position no drafted token counts."""
    batch_size, num_positions, vocab_size = target_logits.shape
    offsets = torch.arange(num_positions, device=target_logits.device)
    logits, sums = draft.token_logits, draft.logsumexp
    singles = DraftOut(
        pad(draft.token_ids, (0, 1)).reshape(-1, 1),
        (draft.lens[:, None] - offsets).clamp(0, 1).reshape(-1).to(torch.int32),
        None if logits is None else pad(logits, (0, 0, 0, 1)).reshape(-1, 1, vocab_size),
        None if sums is None else pad(sums, (0, 1)).reshape(-1, 1),
    )
    shape = (batch_size, num_positions)
    return _Singles(
        target_logits.reshape(-1, 1, vocab_size).expand(-1, 2, -1),
        singles,
        NoiseKeys(
            keys.seeds[:, None].expand(shape).reshape(-1),
            keys.rounds[:, None].expand(shape).reshape(-1),
            (keys.positions[:, None] + offsets).reshape(-1),
        ),
    )
