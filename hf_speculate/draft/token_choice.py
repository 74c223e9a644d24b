"""Token choice: chooses drafted tokens from a draft's logits, after the call's logits processors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.draft.heads.vocabulary import DraftVocabulary
from hf_speculate.models.inferencer import Choice
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.row_groups import ProcessorGroups
from hf_speculate.triton_kernels import Draws
from hf_speculate.types import Kept, NoiseKeys, SampleStrategy, Stream

_HISTORY_CAPACITY = 256  # columns to come for which the history of processors is made


@dataclass(frozen=True)
class DraftSettings:
    """How drafted tokens are chosen."""

    eos_token_ids: Tensor | None = None  # [E] int64, ids after which a row needs no further token; None for none
    # a row's draft ends after a token of lower probability, in [0, 1]; 0 for no threshold
    confidence_threshold: float = 0.0
    keeps_logits: bool = True  # whether the verifier reads the distribution that was sampled
    stream: Stream = Stream.DRAFT  # the noise stream for RANDOM drafts
    backend: str = "auto"  # of the sampling kernel


class Choosing(NamedTuple):
    """How the steps of a compiled draft choose tokens."""

    stream: Stream
    keeps_logits: bool
    backend: str


class TokenChooser:
    """Chooses the drafted tokens of one call, and keeps the sequences that its processors read.

    With a vocabulary, logits have a column for each of its ids, and tokens are ids of the target.
    """

    def __init__(
        self,
        processors: BlockLogitsProcessorList | ProcessorGroups,
        settings: DraftSettings,
        device: torch.device,
        vocabulary: DraftVocabulary | None = None,
    ):
        self.processors = processors
        self.settings = settings
        self.vocabulary = vocabulary
        self.history: TokenBuffer | None = None  # None before the first round, and if no processor reads tokens
        self.can_join = isinstance(processors, ProcessorGroups)
        self.reads_kept = self.can_join or processors.reads_token_ids  # a later row may have such processors
        self._device = device

    @property
    def is_plain(self) -> bool:
        """Whether tokens are chosen from the draft's logits alone."""
        return not len(self.processors) and not self.settings.confidence_threshold

    def begin(self, token_ids: Tensor) -> None:
        """Record the prompts [B, T] int64 if processors read them."""
        if self.reads_kept:
            self.history = TokenBuffer(token_ids.to(self._device), token_ids.shape[1] + _HISTORY_CAPACITY)

    def read(self, query: Tensor, kept: Kept | None) -> None:
        """Record the sequences that processors see: the first query, then what was kept of the last round."""
        if self.history is None:
            self.begin(query)
        elif kept is not None:
            self.history.append(kept.token_ids.to(self._device), kept.num_emitted.tolist())

    def start(self, num_tokens: int, sample_strategy: SampleStrategy, keys: NoiseKeys | None) -> "RoundChoices":
        """The choices of one round of K tokens at most."""
        draws = None
        if sample_strategy is SampleStrategy.RANDOM and keys is not None:
            on_device = NoiseKeys(*(part.to(self._device) for part in keys))
            draws = Draws(on_device, self.settings.stream, num_tokens, backend=self.settings.backend)
        return RoundChoices(self, draws)

    def join(self, other: "TokenChooser") -> None:
        if isinstance(self.processors, ProcessorGroups) and isinstance(other.processors, ProcessorGroups):
            self.processors.join(other.processors)
        if self.history is not None and other.history is not None:
            self.history.join(other.history)

    def rows(self, indices: Sequence[int]) -> None:
        self.processors = self.processors.rows(indices)
        if self.history is not None:
            self.history.rows(indices)


class RoundChoices:
    """Chooses the tokens of one round, with new forks of processors that have state."""

    def __init__(self, chooser: TokenChooser, draws: Draws | None):
        self.draws = draws  # None to take the argmax
        self._chooser = chooser
        self._processors = chooser.processors.forked()
        self._num_recorded = 0

    def choose(self, logits: Tensor) -> Choice:
        """Choose one token per row from [B, V] or [B, Vd]; rows are done if its probability is below the threshold."""
        chooser, settings, vocabulary = self._chooser, self._chooser.settings, self._chooser.vocabulary
        is_mapped = vocabulary is not None and (self.draws is not None or len(self._processors) > 0)
        scores = vocabulary.scattered(logits) if vocabulary is not None and is_mapped else logits
        history = chooser.history
        if len(self._processors):
            # without a history, none of them reads token ids
            ids = scores.new_empty(len(scores), 0, dtype=torch.int64) if history is None else history.token_ids
            prefix_lens = None if history is None else history.lens
            scores = self._processors(ids, scores[:, None], prefix_lens=prefix_lens)[:, 0]  # [B, V]
        best = scores.argmax(dim=-1) if self.draws is None else self.draws.draw(scores)
        token_ids = best if vocabulary is None or is_mapped else vocabulary.ids(best)
        if history is not None:
            history.append(token_ids[:, None])
            self._num_recorded += 1
        is_unsure = None
        if settings.confidence_threshold > 0:
            chosen = scores.float().log_softmax(dim=-1).gather(1, best[:, None])[:, 0]
            is_unsure = chosen.exp() < settings.confidence_threshold
        is_kept = self.draws is not None and settings.keeps_logits
        return Choice(token_ids, scores if is_kept else None, is_unsure)

    def end(self) -> None:
        """Forget the tokens of the round."""
        if self._chooser.history is not None:
            self._chooser.history.drop(self._num_recorded)
