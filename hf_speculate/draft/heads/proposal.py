"""Chooses the drafted tokens of a round from a head's logits, as exact distributions over the target's vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.draft.token_choice import TokenChooser
from hf_speculate.types import DraftOut, NoiseKeys, SampleStrategy, Stream

# Longer drafts would take long to compile; they run step by step.
MAX_UNROLLED_STEPS = 16


class Unrolled(NamedTuple):
    """A draft whose steps are unrolled into one compiled unit."""

    token_ids: Tensor  # [B, K] int64
    token_logits: Tensor | None  # [B, K, V] if the verifier reads them
    logsumexp: Tensor | None  # [B, K] float32


class Choosing(NamedTuple):
    """How such a unit chooses tokens, the same in all steps."""

    num_steps: int
    stream: Stream
    keeps_logits: bool


class Proposal:
    """The tokens chosen so far in one round of at most K; without noise keys the argmax is taken."""

    def __init__(self, chooser: TokenChooser, num_tokens: int, sample_strategy: SampleStrategy, keys: NoiseKeys | None):
        self._chooser = chooser
        self._choices = chooser.start(num_tokens, sample_strategy, keys)
        self._draws = self._choices.draws
        self._ids: list[Tensor] = []  # each [B]
        self._kept_scores: list[Tensor] = []  # each [B, V], logits of the distributions that were sampled from
        self._is_unsure: list[Tensor] = []  # each [B] bool
        self._logsumexp: Tensor | None = None  # [B, K], of an unrolled draft

    @property
    def keys(self) -> NoiseKeys | None:
        """Keys of the noise; None if the argmax is taken."""
        return None if self._draws is None else self._draws.keys

    def add_unrolled(self, unrolled: Unrolled, num_tokens: int) -> None:
        """Take the first tokens of a whole draft, chosen with `keys`."""
        self._ids += unrolled.token_ids[:, :num_tokens].unbind(1)
        if unrolled.token_logits is not None and unrolled.logsumexp is not None:
            self._kept_scores += unrolled.token_logits[:, :num_tokens].unbind(1)
            self._logsumexp = unrolled.logsumexp[:, :num_tokens]

    def add(self, logits: Tensor) -> Tensor:
        """Choose the next token [B] int64 of every row, an id of the target, from the head's logits [B, Vd]."""
        choice = self._choices.choose(logits)
        self._ids.append(choice.token_ids)
        if choice.token_logits is not None:
            self._kept_scores.append(choice.token_logits)
        if choice.is_done is not None:
            self._is_unsure.append(choice.is_done)
        return choice.token_ids

    def add_all(self, logits: Tensor) -> None:
        """Choose K tokens of every row from logits [B, K, Vd] that depend on none of them."""
        vocabulary = self._chooser.vocabulary
        if self._draws is None and self._chooser.is_plain and vocabulary is not None:
            self._ids += vocabulary.ids(logits.argmax(dim=-1)).unbind(1)
            return
        for step in range(logits.shape[1]):
            self.add(logits[:, step])

    @property
    def is_over(self) -> bool:
        """Whether no row needs another token; False where finding out would wait for an accelerator."""
        if self._ids[0].device.type != "cpu":
            return False
        is_done = self._is_done()
        return is_done is not None and bool(is_done.any(dim=1).all())

    def finish(self, device: torch.device, most: Tensor | None = None) -> DraftOut:
        """The proposal on a device; `most` [B] int bounds the tokens that count."""
        ids = torch.stack(self._ids, dim=1)  # [B, K]
        num = ids.shape[1]
        lens = torch.full((ids.shape[0],), num, dtype=torch.int32, device=ids.device)
        is_done = self._is_done()
        if is_done is not None:
            lens = torch.where(is_done.any(1), is_done.int().argmax(1) + 1, lens).to(torch.int32)
        if most is not None:
            lens = torch.minimum(lens, most.to(torch.int32))
        if most is not None and ids.device.type == "cpu":  # elsewhere reading it would wait for an accelerator
            num = max(int(lens.max()), 1)
        self._choices.end()
        ids, lens = ids[:, :num].to(device), lens.to(device)
        if not self._kept_scores or self._draws is None:
            return DraftOut(ids, lens, None, None)
        sums = self._draws.logsumexps() if self._logsumexp is None else self._logsumexp
        scores, sums = torch.stack(self._kept_scores[:num], dim=1), sums[:, :num]
        return DraftOut(ids, lens, scores.to(device), sums.to(device))

    def _is_done(self) -> Tensor | None:
        """[B, K] bool, the tokens after which a row needs no other; None if nothing ends rows."""
        eos = self._chooser.settings.eos_token_ids
        if eos is None and not self._is_unsure:
            return None
        ids = torch.stack(self._ids, dim=1)
        is_done = torch.zeros_like(ids, dtype=torch.bool) if eos is None else (ids[:, :, None] == eos).any(-1)
        return is_done | torch.stack(self._is_unsure, dim=1) if self._is_unsure else is_done
