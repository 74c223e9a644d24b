"""Drafter protocol: the settings, requests and capabilities of drafters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.view import CacheView
from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.processors.of_rows import RowProcessors
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Stream


class DraftCompilation(NamedTuple):
    """A request for compiled drafting."""

    settings: CompileConfig
    lens: tuple[int, ...]  # draft lengths K to compile, ascending; other lengths are rounded up
    units: CompiledUnits  # functions compiled in earlier calls
    on_failure: Callable[[str], None]  # called with the reason if something cannot be compiled


@dataclass(frozen=True)
class DrafterSetup:
    """Arguments that a call passes to a drafter factory.

    Args:
        target: the target model, whose embeddings and head may be shared but not changed.
        batch_size: B.
        num_pads: [B] number of padding columns before each prompt. If a row leaves before the
            first call, its entry is removed.
        max_length: maximum number of columns in the output, including the prompt and its padding.
        max_draft_tokens: maximum number of tokens requested in a round.
        vocab_size: the target's V.
        eos_token_ids: ids after which a row needs no further token.
        device: device of tokens, hidden states and drafts.
        processors: the call's row-wise logits processors. A drafter that applies them samples from
            a distribution closer to the target's.
        stream: the noise stream for RANDOM drafts.
        keeps_logits: whether the verifier reads `DraftOut.token_logits`. If not, the drafter should
            return None for them.
        confidence_threshold: in [0, 1]; a row's draft ends after a token with a lower probability.
            0 for no threshold.
        backend: backend of the sampling kernels, "auto", "torch" or "triton".
        compilation: the request for compiled drafting; None if the call does not ask for it.
        prompt_axes: [1 or 3, B, T] int64, the target's positions for the prompts in time, height
            and width, undefined at padding. Later tokens continue from the last position on every
            axis. None if positions count tokens, or if the KV cache already held a part of the
            prompt.
        has_media: whether the target reads images or audio with the prompts. If so, its first layer
            reads encoder outputs instead of token embeddings at their tokens.
        config: the call's settings.
        prompt_len: number of tokens in the longest prompt.
        num_query: number of prompt tokens per forward of the target.
        max_position: position id of the target's last token in a row without padding.
        inputs: inputs of a draft model other than tokens.
        is_distributed: whether several processes decode the call.
        for_generators: arguments for transformers' candidate generators, for sources with
            `reads_prepared`.
    """

    target: PreTrainedModel
    batch_size: int
    num_pads: tuple[int, ...]
    max_length: int
    max_draft_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    device: torch.device
    processors: RowProcessors
    stream: Stream
    keeps_logits: bool = True
    confidence_threshold: float = 0.0
    backend: str = "auto"
    compilation: DraftCompilation | None = None
    prompt_axes: Tensor | None = None
    has_media: bool = False
    config: SpeculationConfig = field(default_factory=SpeculationConfig, compare=False, repr=False)
    prompt_len: int = field(default=0, compare=False, repr=False)
    num_query: int = field(default=1, compare=False, repr=False)
    max_position: int = field(default=0, compare=False, repr=False)
    inputs: ExtraInputs = field(default_factory=ExtraInputs, compare=False, repr=False)
    is_distributed: bool = field(default=False, compare=False, repr=False)
    for_generators: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


class DraftRequest(NamedTuple):
    """The request for one round's draft."""

    query_token_ids: Tensor
    """[B, Q] int64, the tokens of each row that `kv_cache` does not hold, newest last. In the first
    call, these are all tokens. A shorter row, which is finished but still in the batch, is padded
    on the left with its first token."""
    kv_cache: KVCache | None
    """The draft model's KV cache, advanced in place by Q + K - 1 tokens. None for drafters without
    a draft model."""
    num_draft_tokens: int
    """Maximum draft length K, >= 1."""
    sample_strategy: SampleStrategy = SampleStrategy.GREEDY
    """GREEDY drafts the argmax, which is a point mass; RANDOM samples."""
    keys: NoiseKeys | None = None
    """Noise keys of the round; required for RANDOM."""
    kept: Kept | None = None
    """The tokens emitted since the last call, including plain steps. None in the first call unless
    the drafter has `hidden_layers`."""
    target_cache: CacheView | None = None
    """The target's KV states of all tokens except each row's newest token, valid only in this call.
    None in tests."""
    run_target: Callable[[Tensor], Tensor] | None = None
    """Runs the target on tokens [B, Q] int64 after the states in `target_cache` and returns the
    logits [B, Q, V]. The target's cache then drops these tokens. None if the target has recurrent
    layers, because their states would keep them."""

    def check(self) -> None:
        """Raise an error if the request is malformed.

        Raises:
            ConfigError: `num_draft_tokens` is below 1, or RANDOM lacks keys.
            ShapeError: the query is empty.
        """
        if self.num_draft_tokens < 1:
            raise ConfigError(
                f"num_draft_tokens must be at least 1, got {self.num_draft_tokens}; skip the "
                "drafter for none"
            )
        query = self.query_token_ids
        if query.dim() != 2 or query.size(1) < 1:
            raise ShapeError(f"query_token_ids must be [B, Q] with Q >= 1, got {list(query.shape)}")
        if self.sample_strategy is SampleStrategy.RANDOM and self.keys is None:
            raise ConfigError(
                "keys must be given for SampleStrategy.RANDOM, got None; pass NoiseKeys of the "
                "round"
            )


class Drafter(Protocol):
    """Protocol of drafters.

    A drafter proposes the next tokens of every row. A drafter passed to `generate(drafter=...)`
    needs only `draft` and `rows`. Everything else is optional, and a subclass inherits the
    defaults.

    A drafter with heads on the last hidden state, such as Medusa, needs no cache. A drafter with
    states of its own, such as EAGLE, creates its own cache. In each call, it first drops the states
    of its last drafts and reads all of `kept`, pairing each token with the hidden state that it was
    chosen from. These tokens include accepted drafts, with the target's states. The drafter then
    drafts from its own states, one token at a time. Rows advance by different counts
    (`kept.num_emitted`), so its cache keeps one length per row.
    """

    hidden_layers: Sequence[int] | None = None
    """Target layers whose hidden states `kept` holds, concatenated along D. Layer i stands for the
    input of decoder layer i, and the number of layers for the output of the last layer before the
    final norm. -1 stands for the input of the language modelling head, after that norm. None if the
    drafter reads no hidden states."""
    max_draft_tokens: int | None = None
    """Maximum number of tokens per draft; None for no limit."""
    reads_host_tokens: bool = False
    """Whether it reads tokens on the host; `query_token_ids` and `kept` are then on the CPU."""
    reads_kept: bool = True
    """Whether it reads `kept`; if not, `kept` may be None in every call."""
    reads_prompt: bool = True
    """Whether it reads the hidden states of all tokens. If not, `kept` holds only the states of
    each row's newest token, [B, 1, D]. In the first call, `kept` then contains only this token if
    nothing has been decoded before."""
    min_query_len: int = 1
    """Minimum number of query tokens per row. Some tokens are fed again to reach it."""
    proposes: bool = False
    """Whether it makes free proposals, which are known before the round; see `look_up`."""
    reads_forced_text: bool = False
    """Whether it proposes text that logits processors force; see `force`."""
    is_free: bool = False
    """Whether all its drafts are free proposals; `draft` is then never called."""
    is_compiled: bool = False
    """Whether it drafts with compiled units, as requested by `DrafterSetup.compilation`."""
    can_join: bool = False
    """Whether rows of another drafter of its kind may join it. `read_kept` and `join` are called
    only in this case, and so is `read` unless `awaits_prompt` is set."""
    drafts_fewer: bool = False
    """Whether it may draft fewer tokens than requested even if rows need more."""
    context_len: int | None = None
    """Context length of a row in tokens; longer rows use plain decoding. None for no limit."""
    counts_padding: bool = False
    """Whether padding counts towards `context_len`."""
    shares_columns: bool = False
    """Whether the number of columns of its longest row applies to all rows, minus the padding that
    all rows share."""
    awaits_prompt: bool = False
    """Whether `read` gets the whole prompts before the first `draft`, because the draft model reads
    images with them. Only for draft models."""
    drafts_past_context: bool = False
    """Whether it also drafts for rows past `context_len`, with another method."""

    def is_callers(self, error: Exception) -> bool:
        """Return whether an error from these methods comes from user code and is raised.

        After any other error, decoding continues without drafts.
        """
        return True

    def serves_all(self, num_draft_tokens: int) -> bool:
        """Return whether free proposals serve all rows, so that `draft` can be skipped."""
        return False

    def has_numbers(self) -> Tensor | None:
        """Return whether each row's last drafted token was chosen from finite logits, [B] bool.

        The result is None if this is unknown.
        """
        return None

    def force(self, texts: Sequence[str]) -> None:
        """Receive the forced texts before `look_up`; called if `reads_forced_text` is set.

        Args:
            texts: [B] text forced in each row; "" if there is a choice.
        """
        return

    def look_up(self, new_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Find a proposal for every row before a round.

        The method is called after `begin` if `proposes` is set. A proposal depends only on the
        row's earlier tokens. The draft length is chosen later.

        Args:
            new_ids: [B] lists of each row's new tokens since the last call.

        Returns:
            [B][N] probability that each proposed token and all tokens before it are accepted.
        """
        return [[] for _ in new_ids]

    def cut_proposal(self, num_draft_tokens: int) -> DraftOut:
        """Return the first `num_draft_tokens` tokens of each proposal, as point masses.

        The KV cache of a draft model is not read.
        """
        raise ConfigError(f"{type(self).__name__} must define cut_proposal() if it proposes")

    def draft(self, request: DraftRequest) -> DraftOut:
        """Draft up to `request.num_draft_tokens` tokens per row.

        Returns:
            The draft. K may be smaller than requested if no row needs more tokens or if
            `drafts_fewer` is set.

        Raises:
            ConfigError: see `DraftRequest.check`.
            ShapeError: see `DraftRequest.check`.
        """

    def project_states(self, states: Tensor) -> Tensor:
        """Project the hidden states of each target forward once; `kept` holds the result.

        Args:
            states: [B, Q, A * D], the states of the A layers in `hidden_layers`; undefined at
                padding.

        Returns:
            [B, Q, D'], by default the unchanged states.
        """
        return states

    def begin(self, token_ids: Tensor) -> None:
        """Begin with the prompts before the first `draft`.

        The method is called if rows may join, if an earlier call has filled the draft cache, or if
        the drafter proposes tokens or awaits the prompts. Every token after the prompts then
        appears in a `kept`.

        Args:
            token_ids: [B, T] int64, the prompts with their padding.
        """
        return

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        """Read the next tokens [B, Q] int64 of each row into the draft cache, without drafting."""
        return

    def read_kept(self, kept: Kept) -> None:
        """Read tokens with their hidden states before the first draft.

        Some rows may have no tokens.
        """
        return

    def join(self, other: Any) -> None:
        """Append the rows of `other`, which must have begun as well.

        The caller does the same with the draft cache.
        """
        return

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices` in this order; a row may leave before the first call.

        The caller does the same with the draft cache.
        """


DrafterFactory = Callable[[DrafterSetup], Drafter]
"""Makes a drafter for one call.

A factory may have a `description: str`, which appears in `stats.plan`. The adaptive schedule keeps
its estimates for later calls with the same description or, without a description, with the same
class or function.
"""
