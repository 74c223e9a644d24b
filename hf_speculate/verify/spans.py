"""Lets a lossy verifier decide inside spans of the text only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.config import SpeculationConfig
from hf_speculate.token_buffer import TokenBuffer
from hf_speculate.types import DraftOut, NoiseKeys, Verdict
from hf_speculate.verify.base import Verifier, make_verifier


class Span(NamedTuple):
    """The tokens around a span. A second one that opens changes nothing: spans do not nest."""

    open_id: int
    close_id: int

    def is_open_after(self, token_ids: Sequence[int], was_open: bool) -> bool:
        """Whether a text that goes on with `token_ids` ends in a span.

        Args:
            token_ids: what comes.
            was_open: whether it stood in one before.
        """
        newest = next((token_id for token_id in reversed(token_ids) if token_id in self), None)
        return was_open if newest is None else newest == self.open_id

    def open_after_each(self, token_ids: Tensor, was_open: Tensor) -> Tensor:
        """[B, K+1] bool: entry i is whether the row stands in a span after the first i tokens.

        Args:
            token_ids: [B, K] int64, what comes.
            was_open: [B] bool, whether each row stood in one before.
        """
        marks = (token_ids == self.open_id).long() - (token_ids == self.close_id).long()  # [B, K]: 1 opens, -1 closes
        marks = torch.cat([was_open.long()[:, None] * 2 - 1, marks], dim=1)  # [B, K+1]
        places = torch.arange(marks.shape[1], device=marks.device)
        newest = torch.where(marks != 0, places, 0).cummax(dim=1).values
        return marks.gather(1, newest) > 0


@dataclass(frozen=True)
class SpanVerifier:
    """Asks a lossy verifier inside of spans and an exact one outside, position by position.

    Position i of a round lies inside where the text and the first i drafted tokens leave the row in a span. Every
    position is judged as a draft of one token, with the noise that it has in the whole round. So each token outside has
    the target's law, given the text before it, or is the target's argmax. The token that opens a span is judged
    outside, the one that closes it inside.

    Args:
        lossy: judges positions inside.
        exact: judges those outside; its verdict on a round is that on one position after the other.
        span: the tokens around a span.
        is_open: [B] bool, whether each row's text ends in a span.
    """

    lossy: Verifier
    exact: Verifier
    span: Span
    is_open: Tensor

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        """See `Verifier.verify`."""
        inside = self.span.open_after_each(draft.token_ids, self.is_open)  # [B, K+1]
        reads_are_free = inside.device.type == "cpu"
        if reads_are_free and not inside.any():
            return self.exact.verify(target_logits, draft, keys)
        verify_singles = self._verify_apart if reads_are_free else self._verify_twice
        verdict = verify_singles(_one_by_one(target_logits, draft, keys), inside.flatten())
        accepted = verdict.num_accepted.view(inside.shape)  # [B, K+1] 0 or 1; 0 where nothing was drafted
        num_accepted = accepted.cumprod(dim=1).sum(dim=1)  # [B]
        here = num_accepted[:, None]
        token_ids = verdict.token_ids[:, 0].view(inside.shape)  # [B, K+1], the drafted ones where they are accepted
        columns = torch.arange(inside.shape[1], device=inside.device)
        return Verdict(
            token_ids.masked_fill(columns > here, -1),
            num_accepted.to(torch.int32),
            verdict.status.view(inside.shape).gather(1, here)[:, 0],
        )

    def _verify_apart(self, singles: "_Singles", inside: Tensor) -> Verdict:
        """Of N rounds of one position, those `inside` [N] bool by the lossy verifier, the others by the exact one."""
        groups = [(self.lossy, inside.nonzero()[:, 0]), (self.exact, (~inside).nonzero()[:, 0])]
        verdicts = [verifier.verify(*singles.rows(indices)) for verifier, indices in groups if len(indices)]
        order = torch.cat([indices for _, indices in groups]).argsort()
        return Verdict(*(torch.cat(parts)[order] for parts in zip(*verdicts, strict=True)))

    def _verify_twice(self, singles: "_Singles", inside: Tensor) -> Verdict:
        """The same by both verifiers everywhere: to tell rounds apart would wait for the device."""
        pairs = zip(self.lossy.verify(*singles), self.exact.verify(*singles), strict=True)
        return Verdict(*(torch.where(inside.view(-1, *[1] * (one.ndim - 1)), one, other) for one, other in pairs))


class Spans:
    """Where each row's text stands; it is read once, on the host.

    Args:
        span: the tokens around a span.
        exact: the verifier outside of spans.
        num_pads: [B] tokens of padding before each prompt.
    """

    def __init__(self, span: Span, exact: Verifier, num_pads: Sequence[int]):
        self.span = span
        self.exact = exact
        self._num_read = list(num_pads)
        self._is_open = [False] * len(self._num_read)

    def around(self, lossy: Verifier, host_tokens: TokenBuffer, token_ids: Tensor) -> SpanVerifier:
        """The verifier for what comes after a text.

        Args:
            lossy: judges positions inside.
            host_tokens: the rows so far, on the host.
            token_ids: [B, N] int64 on any device, tokens of each row after those.
        """
        for row, length in enumerate(host_tokens.lens):
            news = host_tokens.token_ids[row, self._num_read[row] : length].tolist()
            self._is_open[row] = self.span.is_open_after(news, self._is_open[row])
            self._num_read[row] = length
        is_open = torch.tensor(self._is_open, device=token_ids.device)
        return SpanVerifier(lossy, self.exact, self.span, self.span.open_after_each(token_ids, is_open)[:, -1])

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`, in that order."""
        self._num_read = [self._num_read[row] for row in indices]
        self._is_open = [self._is_open[row] for row in indices]


def make_spans(
    config: SpeculationConfig,
    do_sample: bool,
    num_pads: Sequence[int],
    led: Callable[[Verifier], Verifier] | None = None,
) -> Spans | None:
    """What restricts the call's verifier to spans; None where it decides everywhere.

    Args:
        config: resolved settings.
        do_sample: whether the call samples.
        num_pads: [B] tokens of padding before each prompt.
        led: makes a verifier the same on all processes that compute one model; None: it is.
    """
    if config.relax_only_inside is None:
        return None
    exact = make_verifier(replace(config, verifier="rejection" if do_sample else "greedy"))
    exact = exact if led is None else led(exact)
    return Spans(Span(*map(int, config.relax_only_inside)), exact, num_pads)


class _Singles(NamedTuple):
    """N rounds of one position each, as arguments of a verifier."""

    target_logits: Tensor  # [N, 2, V]; the second row is the first again, as only its draw would be of another position
    draft: DraftOut  # of one token, which counts or does not
    keys: NoiseKeys

    def rows(self, indices: Tensor) -> "_Singles":
        """Those at `indices` [M] int64."""
        ids, lens, laws, sums, _ = self.draft
        some_laws, some_sums = (None if part is None else part[indices] for part in (laws, sums))
        draft = DraftOut(ids[indices], lens[indices], some_laws, some_sums)
        return _Singles(self.target_logits[:, :1][indices].expand(-1, 2, -1), draft, self.keys.rows(indices))


def _one_by_one(target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> _Singles:
    """The B rounds of K+1 positions as N = B (K+1) rounds; at a row's bonus position no drafted token counts."""
    batch_size, num_positions, vocab_size = target_logits.shape
    places = torch.arange(num_positions, device=target_logits.device)
    laws, sums = draft.token_logits, draft.logsumexp
    singles = DraftOut(
        pad(draft.token_ids, (0, 1)).reshape(-1, 1),
        (draft.lens[:, None] - places).clamp(0, 1).reshape(-1).to(torch.int32),
        None if laws is None else pad(laws, (0, 0, 0, 1)).reshape(-1, 1, vocab_size),
        None if sums is None else pad(sums, (0, 1)).reshape(-1, 1),
    )
    shape = (batch_size, num_positions)
    return _Singles(
        target_logits.reshape(-1, 1, vocab_size).expand(-1, 2, -1),
        singles,
        NoiseKeys(
            keys.seeds[:, None].expand(shape).reshape(-1),
            keys.rounds[:, None].expand(shape).reshape(-1),
            (keys.positions[:, None] + places).reshape(-1),
        ),
    )
