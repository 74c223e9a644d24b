"""Token choice: choose drafted tokens from a draft's logits after the logits processors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.kernels import Draws, sample
from hf_speculate.kernels.warped_draws import WarpedDraws
from hf_speculate.models.inferencer import Chosen, ChosenTokens, joined
from hf_speculate.processors.of_rows import RowProcessors
from hf_speculate.rows.per_row import PerRow
from hf_speculate.rows.row_lens import ArangeCache
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Stream

_HISTORY_CAPACITY = 256  # number of columns reserved for later tokens in the history


class DraftSettings(NamedTuple):
    """Settings for choosing drafted tokens."""

    # [E] int64, ids after which a row needs no further token; None for none
    eos_token_ids: Tensor | None = None
    # in [0, 1]; a row's draft ends after a token with a lower probability
    confidence_threshold: float = 0.0
    keeps_logits: bool = True  # whether the verifier reads the sampled distribution
    stream: Stream = Stream.DRAFT  # the noise stream for RANDOM drafts
    backend: str = "auto"  # backend of the sampling kernel
    # arguments for `warp_logits` before each choice in a captured draft; empty for no warping
    warp: tuple[tuple[str, Any], ...] = ()


def choose_step(logits: Tensor, keys: NoiseKeys | None, settings: DraftSettings) -> Chosen:
    """Choose one token for every row from logits [B, V] in a compiled or captured draft.

    Without noise keys, the argmax is chosen.
    """
    if keys is None:
        return Chosen(logits.argmax(dim=-1)[:, None])
    if settings.warp:
        draws = WarpedDraws(keys, settings.stream, 1, settings.keeps_logits, dict(settings.warp))
        warped_ids, _ = draws.draw(logits)
        if not settings.keeps_logits:
            return Chosen(warped_ids[:, None])
        return Chosen(warped_ids[:, None], draws.logits(), draws.logsumexps())
    token_ids, logsumexp = sample(
        logits, keys=keys, stream=settings.stream, backend=settings.backend
    )
    if not settings.keeps_logits:
        return Chosen(token_ids[:, None])
    return Chosen(token_ids[:, None], logits[:, None], logsumexp[:, None])


def draft_of(chosen: Sequence[Chosen], settings: DraftSettings) -> DraftOut:
    """Make the draft from consecutive tokens without waiting for the device."""
    token_ids, logits, logsumexp = joined(chosen)
    counts = ArangeCache(token_ids.device, torch.int32)
    lens = ChosenTokens(settings.eos_token_ids, counts).lens(token_ids)
    return DraftOut(token_ids, lens, logits, logsumexp)


class TokenChooser(PerRow):
    """Chooses the drafted tokens of one call.

    It returns the target's ids and keeps the sequences for the logits processors.
    """

    PARTS = ("history",)
    REPLACED = ("processors",)

    def __init__(
        self,
        processors: RowProcessors,
        settings: DraftSettings,
        device: torch.device,
        vocabulary: DraftVocabulary,
    ):
        self.processors, self.settings, self.vocabulary = processors, settings, vocabulary
        # None before the first round or if no processor reads tokens
        self.history: TokenBuffer | None = None
        self.can_join = processors.can_join
        # A row that joins later may have such processors.
        self.reads_kept = self.can_join or processors.reads_token_ids
        self.counts, self._device = ArangeCache(device, torch.int32), device
        self.processor_error: Exception | None = None  # the last error raised by a processor
        self.last_logits: Tensor | None = None  # [B, V] or [B, Vd], for the last drafted token

    @property
    def is_plain(self) -> bool:
        """Whether tokens are chosen only from the draft's logits."""
        return not len(self.processors) and not self.settings.confidence_threshold

    def warp_alone(self) -> tuple[tuple[str, Any], ...]:
        """Return the `warp_logits` arguments that replace all processors; empty if none can.

        With these arguments, captured kernels can sample tokens without the processors.
        """
        backend = self.settings.backend
        if self.settings.confidence_threshold or not len(self.processors):
            return ()
        if not WarpedDraws.can_run(backend, self._device):
            return ()
        others, warp = self.processors.split_warp()
        return () if len(others) else tuple(warp.items())

    def begin(self, token_ids: Tensor) -> None:
        """Record the prompts [B, T] int64 if processors read them."""
        if self.reads_kept:
            self.history = TokenBuffer(
                token_ids.to(self._device), token_ids.shape[1] + _HISTORY_CAPACITY
            )

    def read(self, query: Tensor, kept: Kept | None) -> None:
        """Record the sequences for processors from the first query, and later from `kept`."""
        if self.history is None:
            self.begin(query)
        elif kept is not None:
            self.history.append(kept.token_ids.to(self._device), kept.num_emitted.tolist())

    def start(
        self, num_tokens: int, sample_strategy: SampleStrategy, keys: NoiseKeys | None
    ) -> "RoundDraft":
        """Return an empty draft for one round of at most K tokens."""
        if sample_strategy is SampleStrategy.GREEDY or keys is None:
            return RoundDraft(self, None, num_tokens)
        return RoundDraft(self, NoiseKeys(*(part.to(self._device) for part in keys)), num_tokens)

    def forget(self) -> None:
        self.last_logits = None

    def has_numbers(self) -> Tensor | None:
        """See `Drafter.has_numbers`."""
        return None if self.last_logits is None else self.last_logits.amax(dim=-1).isfinite()


class RoundDraft:
    """Draft of one round, implementing `TokenChoice`.

    It chooses its tokens with new forks of the stateful processors.
    """

    def __init__(self, chooser: TokenChooser, keys: NoiseKeys | None, num_tokens: int):
        self.tokens = ChosenTokens(chooser.settings.eos_token_ids, chooser.counts, num_tokens)
        self.are_enough = self.tokens.are_enough
        self.keys = keys  # noise keys; None to choose the argmax
        self._chooser = chooser
        self._processors = chooser.processors.forked()
        self._draws: Draws | None = None
        self._warped: WarpedDraws | None = None  # replaces the draws and a last warper
        if keys is not None:
            settings, warp = chooser.settings, dict[str, Any]()
            if chooser.vocabulary.size is None and WarpedDraws.can_run(
                settings.backend, keys.seeds.device
            ):
                self._processors, warp = self._processors.split_warp()
            if warp:
                self._warped = WarpedDraws(
                    keys, settings.stream, num_tokens, settings.keeps_logits, warp
                )
            else:
                self._draws = Draws(keys, settings.stream, num_tokens, backend=settings.backend)
        self._keeps_logits = chooser.settings.keeps_logits
        self._num_tokens = num_tokens  # maximum K; a compiled draft may be longer
        self._num_recorded = 0  # number of this round's tokens in the history

    def choose(self, logits: Tensor) -> Tensor:
        """Choose the next token [B] int64 from logits [B, V] or [B, Vd].

        A row ends if the probability of its token is below the threshold.
        """
        chooser = self._chooser
        settings, vocabulary, history = chooser.settings, chooser.vocabulary, chooser.history
        chooser.last_logits = logits
        is_mapped = self.keys is not None or len(self._processors) > 0
        scores = vocabulary.scattered(logits) if is_mapped else vocabulary.cut(logits)
        if len(self._processors):
            ids = (
                scores.new_empty(len(scores), 0, dtype=torch.int64)
                if history is None
                else history.token_ids
            )
            # Without a history, no processor reads token ids.
            prefix_lens = None if history is None else history.lens
            try:
                # [B, V]
                processed = self._processors(ids, scores[:, None], prefix_lens=prefix_lens)[:, 0]
            except Exception as error:
                chooser.processor_error = error
                raise
            if vocabulary.size is not None:  # all ids of a head with a smaller V may be banned
                processed = torch.where(
                    (processed == -torch.inf).all(-1, True), scores.to(processed), processed
                )
            scores = processed
        column = self.tokens.column(len(scores))
        if self._warped is not None:
            best, scores = self._warped.draw(scores, column)
        elif self._draws is not None:
            best = self._draws.draw(scores)
        else:
            best = torch.argmax(scores, dim=-1, out=column)
        token_ids = best if is_mapped else vocabulary.ids(best)
        if history is not None:
            history.append(token_ids[:, None])
            self._num_recorded += 1
        are_last = None
        if settings.confidence_threshold > 0:
            log_probs = scores.float().log_softmax(dim=-1).gather(1, best[:, None])[:, 0]
            are_last = log_probs.exp() < settings.confidence_threshold
        is_kept = self._draws is not None and settings.keeps_logits
        chosen = Chosen(token_ids[:, None], scores[:, None] if is_kept else None)
        self.tokens.add(chosen, are_last, is_in_place=token_ids is column)
        return token_ids

    def choose_all(self, logits: Tensor) -> None:
        """Choose K tokens per row from logits [B, K, Vd] that do not depend on these tokens."""
        if self.keys is None and self._chooser.is_plain:
            self._chooser.last_logits = logits[:, -1]
            vocabulary = self._chooser.vocabulary
            self.tokens.add(Chosen(vocabulary.ids(vocabulary.cut(logits).argmax(dim=-1))))
            return
        for step in range(logits.shape[1]):
            self.choose(logits[:, step])

    def finish(self, device: torch.device, most: Tensor | None = None) -> DraftOut:
        """Return the draft on a device, and drop its tokens from the history.

        Args:
            device: device of the result.
            most: [B] int32, maximum number of valid tokens per row; None for no limit.
        """
        token_ids, logits, logsumexp = self.tokens.joined()
        if self._warped is not None and self._warped.num_drawn and self._keeps_logits:
            logits, logsumexp = self._warped.logits(), self._warped.logsumexps()
        token_ids = token_ids[:, : self._num_tokens]
        lens, num = self.tokens.lens(token_ids), token_ids.shape[1]
        if most is not None:
            lens = torch.minimum(lens, most)
            if lens.device.type == "cpu":  # on an accelerator, reading it would wait for the device
                num = max(int(lens.max()), 1)
        if self._chooser.history is not None:
            self._chooser.history.drop(self._num_recorded)
        token_ids, lens = token_ids[:, :num].to(device), lens.to(device)
        if self._draws is not None and logits is not None and logsumexp is None:
            logsumexp = self._draws.logsumexps()
        if logits is None or logsumexp is None:
            return DraftOut(token_ids, lens, None, None)
        return DraftOut(token_ids, lens, logits[:, :num].to(device), logsumexp[:, :num].to(device))
