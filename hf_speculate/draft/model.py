"""Drafts with a smaller model of the same vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.base import check_request
from hf_speculate.errors import ConfigError
from hf_speculate.models.inferencer import Choice, Inferencer
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.token_buffer import TokenBuffer
from hf_speculate.triton_kernels import Draws
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Stream


@dataclass(frozen=True)
class DraftSettings:
    """How a draft model proposes.

    Args:
        eos_token_ids: [E] int64, ids after which a row needs no further token; None: none.
        confidence_threshold: a row stops after a token of lower probability, in [0, 1]; 0 disables.
        keeps_logits: whether the verifier reads the law that was sampled.
        stream: the noise that RANDOM draws with.
        backend: of the sampling kernel.
    """

    eos_token_ids: Tensor | None = None
    confidence_threshold: float = 0.0
    keeps_logits: bool = True
    stream: Stream = Stream.DRAFT
    backend: str = "auto"


class ModelDrafter:
    """A `Drafter` over a draft model: K forwards a round, no nested `generate()`.

    Args:
        inferencer: runs the draft model.
        processors: applied to the draft's logits, so that its law is near the target's; row-wise ones only. Each draft
            begins with new forks of those with state.
        settings: see `DraftSettings`.
    """

    def __init__(
        self,
        inferencer: Inferencer,
        processors: BlockLogitsProcessorList | None = None,
        settings: DraftSettings | None = None,
    ):
        self.inferencer = inferencer
        self.processors = BlockLogitsProcessorList() if processors is None else processors
        self._in_force = self.processors  # in the present draft
        self.settings = settings or DraftSettings()
        self._history: TokenBuffer | None = None  # what the processors read
        self._begun: Tensor | None = None  # [B, N] int64, what the cache held before the first call

    def draft(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | None,
        num_draft_tokens: int,
        sample_strategy: SampleStrategy,
        *,
        keys: NoiseKeys | None = None,
        kept: Kept | None = None,
    ) -> DraftOut:
        """See `Drafter.draft`; `kv_cache` is required."""
        check_request(query_token_ids, num_draft_tokens, sample_strategy, keys)
        if kv_cache is None:
            raise ConfigError("kv_cache must be given to a draft model, got None; pass a KVCache")
        home = query_token_ids.device
        device = self.inferencer.language_model.device
        query = query_token_ids.to(device)
        self._follow(query, kept)
        self._in_force = self.processors.forked()
        settings = self.settings
        draws = None
        if sample_strategy is SampleStrategy.RANDOM and keys is not None:
            keys = NoiseKeys(*(part.to(device) for part in keys))
            draws = Draws(keys, settings.stream, num_draft_tokens, backend=settings.backend)
        proposal = _Proposal(self, draws)
        decoded = self.inferencer.decode(query, kv_cache, num_draft_tokens, sample_strategy, choose=proposal.choose)
        if self._history is not None:
            num = decoded.token_ids.shape[1]
            self._history.truncate([length - num for length in self._history.lens])
        logits, logsumexps = decoded.token_logits, None
        if draws is not None and logits is not None:
            logits, logsumexps = logits.to(home), draws.logsumexps().to(home)
        return DraftOut(decoded.token_ids.to(home), decoded.lens.to(home), logits, logsumexps)

    def begin(self, token_ids: Tensor) -> None:
        """Note that the cache holds the rows' first tokens already, so that the first query is what follows them.

        Args:
            token_ids: [B, N] int64.
        """
        self._begun = token_ids.to(self.inferencer.language_model.device)

    def rows(self, indices: Sequence[int]) -> None:
        """Keep what belongs to the named rows."""
        self.inferencer.language_model.rows(indices)
        self.processors = self.processors.rows(indices)
        if self._history is not None:
            self._history.rows(indices)
        if self._begun is not None:
            self._begun = self._begun[torch.tensor(list(indices), device=self._begun.device)]

    def law(self, logits: Tensor) -> Tensor:
        """[B, V] the draft's logits after its processors, at the history's end."""
        if self._history is None:
            return logits
        block = self._in_force(self._history.token_ids, logits[:, None], prefix_lens=self._history.lens)
        return block[:, 0]

    def note(self, token_ids: Tensor) -> None:
        """Put drafted tokens [B] at the history's end, until the round is over."""
        if self._history is not None:
            self._history.append(token_ids[:, None])

    def _follow(self, query: Tensor, kept: Kept | None) -> None:
        if not len(self.processors):
            return
        if self._history is None:
            text = query if self._begun is None else torch.cat([self._begun, query], dim=1)
            self._history = TokenBuffer(text, capacity=text.shape[1] + 256)
        elif kept is not None:
            self._history.append(kept.token_ids.to(query.device), kept.num_emitted.tolist())


class _Proposal:
    """One round's choices."""

    def __init__(self, drafter: ModelDrafter, draws: Draws | None):
        self.drafter = drafter
        self.draws = draws  # None: the argmax is taken

    def choose(self, logits: Tensor, step: int) -> Choice:
        """Choose one token per row from [B, V]."""
        law = self.drafter.law(logits)
        token_ids = law.argmax(dim=-1) if self.draws is None else self.draws.draw(law)
        self.drafter.note(token_ids)
        is_kept = self.draws is not None and self.drafter.settings.keeps_logits
        return Choice(token_ids, law if is_kept else None, self._is_done(law, token_ids))

    def _is_done(self, law: Tensor, token_ids: Tensor) -> Tensor | None:
        """[B] bool, rows that need no further token; None where nothing could end them."""
        settings = self.drafter.settings
        is_done = None
        if settings.eos_token_ids is not None:
            is_done = (token_ids[:, None] == settings.eos_token_ids).any(1)
        if settings.confidence_threshold > 0:
            chosen = law.float().log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0]
            is_unsure = chosen.exp() < settings.confidence_threshold
            is_done = is_unsure if is_done is None else is_done | is_unsure
        return is_done
