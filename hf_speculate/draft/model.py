"""The model drafter: drafts with a smaller model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.draft.base import DrafterDefaults, DraftRequest
from hf_speculate.errors import ConfigError
from hf_speculate.models.inferencer import Choice, Inferencer
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.row_groups import ProcessorGroups
from hf_speculate.transfers import upload
from hf_speculate.triton_kernels import Draws
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Stream


@dataclass(frozen=True)
class DraftSettings:
    """How a draft model chooses tokens."""

    eos_token_ids: Tensor | None = None  # [E] int64, ids after which a row needs no further token; None for none
    # a row's draft ends after a token of lower probability, in [0, 1]; 0 for no threshold
    confidence_threshold: float = 0.0
    keeps_logits: bool = True  # whether the verifier reads the distribution that was sampled
    stream: Stream = Stream.DRAFT  # the noise stream for RANDOM drafts
    backend: str = "auto"  # of the sampling kernel


class ModelDrafter(DrafterDefaults):
    """A `Drafter` over a draft model: K forwards a round, no nested `generate()`.

    The row-wise logits processors are applied to the draft's logits, so that its distribution is near the target's.
    Each draft starts with new forks of those that have state.
    """

    def __init__(
        self,
        inferencer: Inferencer,
        processors: BlockLogitsProcessorList | ProcessorGroups | None = None,
        settings: DraftSettings | None = None,
    ):
        self.inferencer = inferencer
        self.processors: BlockLogitsProcessorList | ProcessorGroups = BlockLogitsProcessorList()
        if processors is not None:
            self.processors = processors
        self.can_join = isinstance(processors, ProcessorGroups)
        self._active = self.processors  # in the current draft
        self.settings = settings or DraftSettings()
        self._history: TokenBuffer | None = None  # the tokens that processors read
        self.reads_kept = self.can_join or self.processors.reads_token_ids  # a later row may have such processors
        self._resumed: Tensor | None = None  # [B, N] int64, tokens that the cache held before the first call

    @property
    def draft_model(self) -> PreTrainedModel:
        """The model whose states `kv_cache` holds."""
        return self.inferencer.language_model.model

    def draft(self, request: DraftRequest) -> DraftOut:
        """See `Drafter.draft`; `kv_cache` is required."""
        request.check()
        query, kv_cache, num_draft_tokens, sample_strategy, keys, kept = request
        if kv_cache is None:
            raise ConfigError("kv_cache must be given to a draft model, got None; pass a KVCache")
        target_device, device = query.device, self.inferencer.language_model.device
        query = query.to(device)
        self._follow(query, kept)
        self._active = self.processors.forked()
        settings = self.settings
        draws = None
        if sample_strategy is SampleStrategy.RANDOM and keys is not None:
            keys = NoiseKeys(*(part.to(device) for part in keys))
            draws = Draws(keys, settings.stream, num_draft_tokens, backend=settings.backend)
        proposal = _Proposal(self, draws)
        decoded = self.inferencer.decode(
            query,
            kv_cache,
            num_draft_tokens,
            sample_strategy,
            choose=proposal.choose,
            stop_ids=settings.eos_token_ids,
        )
        if self._history is not None:
            self._history.drop(decoded.token_ids.shape[1])
        logits, logsumexps = decoded.token_logits, None
        if draws is not None and logits is not None:
            logits, logsumexps = logits.to(target_device), draws.logsumexps().to(target_device)
        return DraftOut(decoded.token_ids.to(target_device), decoded.lens.to(target_device), logits, logsumexps)

    def resume(self, token_ids: Tensor) -> None:
        self._resumed = token_ids.to(self.inferencer.language_model.device)

    def begin(self, token_ids: Tensor) -> None:
        self._history = TokenBuffer(token_ids.to(self.inferencer.language_model.device), token_ids.shape[1] + 256)

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.inferencer.feed(token_ids.to(self.inferencer.language_model.device), kv_cache)

    def join(self, other: "ModelDrafter") -> None:
        self.inferencer.language_model.join(other.inferencer.language_model)
        if isinstance(self.processors, ProcessorGroups) and isinstance(other.processors, ProcessorGroups):
            self.processors.join(other.processors)
        if self._history is not None and other._history is not None:
            self._history.join(other._history)

    def rows(self, indices: Sequence[int]) -> None:
        self.inferencer.language_model.rows(indices)
        self.processors = self.processors.rows(indices)
        if self._history is not None:
            self._history.rows(indices)
        if self._resumed is not None:
            self._resumed = self._resumed[upload(indices, self._resumed.device)]

    def process(self, logits: Tensor) -> Tensor:
        """[B, V] the draft's logits after its processors."""
        if not len(self.processors):
            return logits
        if self._history is None:  # no processor reads token ids
            block = self._active(logits.new_empty(len(logits), 0, dtype=torch.int64), logits[:, None])
        else:
            block = self._active(self._history.token_ids, logits[:, None], prefix_lens=self._history.lens)
        return block[:, 0]

    def append(self, token_ids: Tensor) -> None:
        """Show drafted tokens [B] to the processors until the end of the round."""
        if self._history is not None:
            self._history.append(token_ids[:, None])

    def _follow(self, query: Tensor, kept: Kept | None) -> None:
        if not self.reads_kept:
            return
        if self._history is None:
            text = query if self._resumed is None else torch.cat([self._resumed, query], dim=1)
            self._history = TokenBuffer(text, capacity=text.shape[1] + 256)
        elif kept is not None:
            self._history.append(kept.token_ids.to(query.device), kept.num_emitted.tolist())


class _Proposal:
    """Chooses the tokens of one round."""

    def __init__(self, drafter: ModelDrafter, draws: Draws | None):
        self.drafter = drafter
        self.draws = draws  # None to take the argmax

    def choose(self, logits: Tensor, step: int) -> Choice:
        """Choose one token per row from [B, V]."""
        logits = self.drafter.process(logits)
        token_ids = logits.argmax(dim=-1) if self.draws is None else self.draws.draw(logits)
        self.drafter.append(token_ids)
        is_kept = self.draws is not None and self.drafter.settings.keeps_logits
        return Choice(token_ids, logits if is_kept else None, self._is_unsure(logits, token_ids))

    def _is_unsure(self, logits: Tensor, token_ids: Tensor) -> Tensor | None:
        """[B] bool, rows whose token has a probability below the threshold; None without a threshold."""
        threshold = self.drafter.settings.confidence_threshold
        if threshold <= 0:
            return None
        chosen = logits.float().log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0]
        return chosen.exp() < threshold
