"""Chooses the drafted tokens of a round from a head's logits, as exact distributions over the target's vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.heads.vocabulary import DraftVocabulary
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.triton_kernels import Draws
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Stream

# Longer drafts would take long to compile; they run step by step.
MAX_UNROLLED_STEPS = 16
_HISTORY_CAPACITY = 256  # columns to come for which the history of processors is made


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


class TokenChooser:
    """Chooses tokens for one call, and keeps the sequences that its processors read."""

    def __init__(self, setup: DrafterSetup, vocabulary: DraftVocabulary, device: torch.device):
        self.vocabulary = vocabulary.to(device)
        self.device = device
        self.processors = setup.processors
        self.stream = setup.stream
        self.backend = setup.backend
        self.keeps_logits = setup.keeps_logits
        self.threshold = setup.confidence_threshold
        self.eos_token_ids = torch.tensor(sorted(setup.eos_token_ids), dtype=torch.int64, device=device)
        self.history: TokenBuffer | None = None  # None before the first round, and without processors

    @property
    def is_plain(self) -> bool:
        """Whether tokens are chosen from the head's logits alone."""
        return not len(self.processors) and self.threshold <= 0

    def read(self, query_token_ids: Tensor, kept: Kept | None) -> None:
        """Record the sequences that the processors see, from the query and what was kept of the last round."""
        if not len(self.processors):
            return
        if self.history is None:
            query = query_token_ids.to(self.device)
            self.history = TokenBuffer(query, capacity=query.shape[1] + _HISTORY_CAPACITY)
        elif kept is not None:
            self.history.append(kept.token_ids.to(self.device), kept.num_emitted.tolist())

    def begin(self, num_tokens: int, sample_strategy: SampleStrategy, keys: NoiseKeys | None) -> "Proposal":
        """The proposal of one round of K tokens at most, still empty."""
        draws = None
        if sample_strategy is SampleStrategy.RANDOM and keys is not None:
            on_device = NoiseKeys(*(part.to(self.device) for part in keys))
            draws = Draws(on_device, self.stream, num_tokens, backend=self.backend)
        return Proposal(self, self.processors.forked(), draws)

    def rows(self, indices: Sequence[int]) -> None:
        self.processors = self.processors.rows(indices)
        if self.history is not None:
            self.history.rows(indices)


class Proposal:
    """The tokens chosen so far in one round; without draws the argmax is taken."""

    def __init__(self, chooser: TokenChooser, processors: BlockLogitsProcessorList, draws: Draws | None):
        self._chooser = chooser
        self._processors = processors
        self._draws = draws
        self._ids: list[Tensor] = []  # each [B]
        self._kept_scores: list[Tensor] = []  # each [B, V], logits of the distributions that were sampled from
        self._is_unsure: list[Tensor] = []  # each [B] bool
        self._num_noted = 0
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
        chooser = self._chooser
        is_plain = self._draws is None and not len(self._processors)
        scores = logits if is_plain else chooser.vocabulary.scattered(logits)
        if chooser.history is not None:
            block = self._processors(chooser.history.token_ids, scores[:, None], prefix_lens=chooser.history.lens)
            scores = block[:, 0]  # [B, V]
        best = scores.argmax(dim=-1) if self._draws is None else self._draws.draw(scores)
        ids = chooser.vocabulary.ids(best) if is_plain else best
        if chooser.history is not None:
            chooser.history.append(ids[:, None])
            self._num_noted += 1
        if chooser.threshold > 0:
            chosen = scores.float().log_softmax(dim=-1).gather(1, best[:, None])[:, 0]
            self._is_unsure.append(chosen.exp() < chooser.threshold)
        if self._draws is not None and chooser.keeps_logits:
            self._kept_scores.append(scores)
        self._ids.append(ids)
        return ids

    def add_all(self, logits: Tensor) -> None:
        """Choose K tokens of every row from logits [B, K, Vd] that depend on none of them."""
        chooser = self._chooser
        if self._draws is None and chooser.history is None and chooser.threshold <= 0:
            self._ids += chooser.vocabulary.ids(logits.argmax(dim=-1)).unbind(1)
            return
        for step in range(logits.shape[1]):
            self.add(logits[:, step])

    @property
    def is_over(self) -> bool:
        """Whether no row needs another token; False where finding out would wait for an accelerator."""
        if self._chooser.device.type != "cpu":
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
        history = self._chooser.history
        if history is not None:
            history.drop(self._num_noted)
        ids, lens = ids[:, :num].to(device), lens.to(device)
        if not self._kept_scores or self._draws is None:
            return DraftOut(ids, lens, None, None)
        sums = self._draws.logsumexps() if self._logsumexp is None else self._logsumexp
        scores, sums = torch.stack(self._kept_scores[:num], dim=1), sums[:, :num]
        return DraftOut(ids, lens, scores.to(device), sums.to(device))

    def _is_done(self) -> Tensor | None:
        """[B, K] bool, the tokens after which a row needs no other; None if nothing ends rows."""
        eos = self._chooser.eos_token_ids
        if not len(eos) and not self._is_unsure:
            return None
        ids = torch.stack(self._ids, dim=1)
        is_done = (ids[:, :, None] == eos).any(-1) if len(eos) else torch.zeros_like(ids, dtype=torch.bool)
        return is_done | torch.stack(self._is_unsure, dim=1) if self._is_unsure else is_done
