"""The drafter protocol: settings, requests and capabilities of drafters."""

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
    """A request for compiled drafts."""

    settings: CompileConfig
    lens: tuple[int, ...]  # draft lengths K to compile, ascending; others are rounded up
    units: CompiledUnits  # compiled before
    on_failure: Callable[[str], None]  # called with the reason, if something cannot be compiled


@dataclass(frozen=True)
class DrafterSetup:
    """Arguments of a drafter factory, from the call.

    Args:
        target: the target model, to share its embeddings and head; it must not be changed.
        batch_size: B.
        num_pads: [B] padding columns before each prompt; rows that leave before the first call take
            theirs along.
        max_length: largest number of columns in the output, the prompt and its padding included.
        max_draft_tokens: largest number of tokens requested in a round.
        vocab_size: the target's V.
        eos_token_ids: ids after which a row needs no further token.
        device: device of tokens, hidden states and drafts.
        processors: the call's row-wise logits processors; a drafter with them samples from a
            distribution near the target's.
        stream: the noise stream for RANDOM drafts.
        keeps_logits: whether the verifier reads `DraftOut.token_logits`; if not, return None for
            them.
        confidence_threshold: a row's draft ends after a token of lower probability, in [0, 1]; 0
            for no threshold.
        backend: "auto", "torch" or "triton", of the sampling kernels.
        compilation: the request for compiled drafts; None if the call asks for none.
        prompt_axes: [1 or 3, B, T] int64, the target's positions of the prompts in time, height and
            width, undefined at padding; later tokens go on from the last one on every axis. None if
            positions count tokens, or if the KV cache held a part of the prompt.
        has_media: whether the target reads pictures or sounds with the prompts; at their tokens,
            its first layer then reads encoder outputs instead of token embeddings.
        config: the call's settings.
        prompt_len: tokens of the longest prompt.
        num_query: prompt tokens per forward of the target.
        max_position: the position id of the target's last token in a row without padding.
        inputs: other inputs of a draft model besides tokens.
        is_distributed: whether several processes decode the call.
        for_generators: arguments of transformers' candidate generators, for sources with
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
    """The request for the draft of one round."""

    query_token_ids: Tensor
    """[B, Q] int64, the tokens of each row that `kv_cache` does not hold, the newest last; in the
    first call the whole sequence. A shorter row, finished but still in the batch, repeats its first
    token in front."""
    kv_cache: KVCache | None
    """The draft model's KV cache, advanced in place by Q + K - 1 tokens. None for drafters without
    a draft model."""
    num_draft_tokens: int
    """K at most, >= 1."""
    sample_strategy: SampleStrategy = SampleStrategy.GREEDY
    """GREEDY drafts the argmax, a point mass; RANDOM samples."""
    keys: NoiseKeys | None = None
    """Keys of the round's noise; required for RANDOM."""
    kept: Kept | None = None
    """Tokens emitted since the last call, in plain steps too. None in the first call unless the
    drafter has `hidden_layers`."""
    target_cache: CacheView | None = None
    """The target's KV states of all tokens but each row's newest one, valid in this call only. None
    in tests."""
    run_target: Callable[[Tensor], Tensor] | None = None
    """Runs the target on tokens [B, Q] int64 after those states and returns logits [B, Q, V]. Its
    cache drops the tokens again. None if the target has recurrent layers, whose states would keep
    them."""

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
    needs only `draft` and `rows`; all else is optional, and a subclass inherits the defaults.

    A drafter with heads on the last hidden state, such as Medusa, needs no cache. A drafter with
    states of its own, such as EAGLE, creates its own cache. In each call it first drops the states
    of its last drafts and reads all of `kept`, pairing each token with the hidden state it was
    chosen from; accepted drafts are among them, with the target's states. Then it drafts from its
    own states, one token at a time. Rows advance by different counts (`kept.num_emitted`), so its
    cache keeps a length per row.
    """

    hidden_layers: Sequence[int] | None = None
    """Target layers whose hidden states `kept` holds, concatenated along D. Layer i is the input of
    decoder layer i; the number of layers is the output of the last one before the final norm; -1 is
    the input of the language modelling head, after that norm. None if the drafter reads no hidden
    states."""
    max_draft_tokens: int | None = None
    """Largest number of tokens per draft; None for any number."""
    reads_host_tokens: bool = False
    """Whether it reads tokens on the host; `query_token_ids` and `kept` are then on the CPU."""
    reads_kept: bool = True
    """Whether it reads `kept`; if not, it may be None in every call."""
    reads_prompt: bool = True
    """Whether it reads the hidden states of all tokens. If not, `kept` holds those of each row's
    newest token, [B, 1, D], and in the first call only this token if nothing was decoded before."""
    min_query_len: int = 1
    """Smallest number of query tokens per row; some of them are repeated for it."""
    proposes: bool = False
    """Whether it makes proposals at no cost, known before the round; see `look_up`."""
    reads_forced_text: bool = False
    """Whether it proposes text forced by logits processors; see `force`."""
    is_free: bool = False
    """Whether all its drafts are proposals; `draft` is then never called."""
    is_compiled: bool = False
    """Whether it drafts with compiled units, as `DrafterSetup.compilation` asks."""
    can_join: bool = False
    """Whether rows of another drafter of its kind may join it. `read_kept` and `join` are called
    only then, and so is `read` unless it `awaits_prompt`."""
    drafts_fewer: bool = False
    """Whether it may draft fewer tokens than requested although rows still need some."""
    context_len: int | None = None
    """Context length in tokens of a row; longer rows decode plainly. None for any number."""
    counts_padding: bool = False
    """Whether padding counts towards `context_len`."""
    shares_columns: bool = False
    """Whether the columns of its longest row count for all rows, less the padding common to all
    rows."""
    awaits_prompt: bool = False
    """Whether `read` gets the whole prompts before the first `draft`, as a draft model reads
    pictures with them. For draft models only."""
    drafts_past_context: bool = False
    """Whether it drafts for rows past `context_len` too, by another method."""

    def is_callers(self, error: Exception) -> bool:
        """Return whether an error of these methods comes from the caller's code and is raised.

        After any other error decoding continues without drafts.
        """
        return True

    def serves_all(self, num_draft_tokens: int) -> bool:
        """Return whether its proposals serve all rows and `draft` can be skipped."""
        return False

    def has_numbers(self) -> Tensor | None:
        """Return whether each row's last drafted token was chosen from finite logits, [B] bool.

        None if unknown.
        """
        return None

    def force(self, texts: Sequence[str]) -> None:
        """Receive the forced text before `look_up`; called if it `reads_forced_text`.

        Args:
            texts: [B] the text forced in each row; "" if there is a choice.
        """
        return

    def look_up(self, new_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Find a proposal for every row before a round; called if it `proposes`, after `begin`.

        A proposal depends only on the row's earlier tokens. The draft length is chosen later.

        Args:
            new_ids: [B] lists of the new tokens of each row since the last call.

        Returns:
            [B][N] probability of each proposed token to be accepted with all before it.
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
            The proposal. K may be smaller than requested if no row needs more tokens, or if
            `drafts_fewer` is set.

        Raises:
            ConfigError: see `DraftRequest.check`.
            ShapeError: see `DraftRequest.check`.
        """

    def project_states(self, states: Tensor) -> Tensor:
        """Project the hidden states of each target forward, once; `kept` holds the result.

        Args:
            states: [B, Q, A * D], the states of the A layers in `hidden_layers`; undefined at
                padding.

        Returns:
            [B, Q, D'], by default the states as they are.
        """
        return states

    def begin(self, token_ids: Tensor) -> None:
        """Begin with the prompts, before the first `draft`.

        Called if rows may join, if an earlier call has filled the draft cache, if it proposes, or
        if it awaits the prompts. Every token after the prompts is then in a `kept`.

        Args:
            token_ids: [B, T] int64, with their padding.
        """
        return

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        """Let the draft cache hold the next tokens of each row, [B, Q] int64, without drafting."""
        return

    def read_kept(self, kept: Kept) -> None:
        """Read tokens with their hidden states before the first draft; some rows may have none."""
        return

    def join(self, other: Any) -> None:
        """Add the rows of `other`, begun as well, behind these.

        The caller does the same to the draft cache.
        """
        return

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order; a row may leave before the first call.

        The caller does the same to the draft cache.
        """


DrafterFactory = Callable[[DrafterSetup], Drafter]
"""Makes a drafter for one call.

A factory may have a `description: str`. `stats.plan` shows it, and the adaptive schedule keeps its
estimates for later calls with the same description; without one, for later calls with the same
class or function.
"""
