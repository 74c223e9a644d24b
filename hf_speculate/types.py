"""The named tuples that the stages of a round exchange."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from hf_speculate.kernels.types import NoiseKeys as NoiseKeys
from hf_speculate.kernels.types import Status as Status
from hf_speculate.kernels.types import Stream as Stream
from hf_speculate.kernels.types import Verdict as Verdict

BAD_LOGITS = int(Status.NAN | Status.ALL_MASKED | Status.POSITIVE_INF)
"""Flags of logits that define no distribution; a draft's logits may set them too."""


class SampleStrategy(Enum):
    """The strategy that chooses a token from logits."""

    GREEDY = "greedy"
    RANDOM = "random"


class CachedDraft(NamedTuple):
    """The states that a draft cache holds after a draft that was not fed to it, or not in every row."""

    num_ahead: int  # tokens past each row's sequence; negative: tokens of the sequence that the cache lacks
    is_own: Sequence[bool]  # [B] rows whose drafted tokens the cache holds; those of others were proposed at no cost


class DraftOut(NamedTuple):
    """The tokens that a drafter proposes for one round."""

    token_ids: Tensor  # [B, K] int64
    lens: Tensor  # [B] int32, tokens of each row that count
    token_logits: Tensor | None  # [B, K, V], the exact distribution sampled, warpers included; None for a point mass
    logsumexp: Tensor | None  # [B, K] float32 of token_logits; None if token_logits is None
    cached: CachedDraft | None = None  # None if the draft cache holds all but the last drafted token of every row


class DraftNames(NamedTuple):
    """Names of a draft source's tokens, by what proposed them."""

    model: str  # tokens of a model or head
    free: str  # tokens proposed at no cost, as by prompt lookup


class Kept(NamedTuple):
    """The tokens emitted since the drafter's last call, as feedback to the drafter.

    A drafter with `hidden_layers` gets every token with the hidden state that it was chosen from: state i of a row is
    the target's state at the token before `token_ids[i]`. The newest token has no state yet, because the target has not
    read it. Such a drafter gets a `Kept` in its first call too: all tokens of the prompt that the target read except
    the first, without padding, then the emitted ones. If the prompt is embeddings with fewer ids, or none, only tokens
    with ids are included.
    """

    token_ids: Tensor  # [B, N] int64, padded with -1; N is at most K+1, and more after plain steps
    num_emitted: Tensor  # [B] int32, on the host; 0 for a finished row that stays in the batch
    # [B, N, D], undefined past `num_emitted`; [B, 1, D] without `reads_prompt`; None without layers
    hidden_states: Tensor | None = None


class KVState(NamedTuple):
    """The keys and values of one layer."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, D]


class Scored(NamedTuple):
    """The outputs of a model's forward."""

    logits: Tensor  # [B, Q', V]
    hidden_states: tuple[Tensor, ...] | None = None  # by layer, each [B, Q, D]; None unless requested
    attentions: tuple[Tensor, ...] | None = None  # by layer, each [B, H, Q, T]; None unless requested
    captured: Tensor | None = None  # [B, Q, A * D], states of the layers that a drafter reads; None unless captured


class Verified(NamedTuple):
    """The verdict of a round, on the host."""

    token_ids: Tensor  # [B, N] int64 on the target's device, padded with -1
    new_ids: list[list[int]]  # [B] accepted tokens and the token that follows them
    num_drafted: list[int]  # [B] drafted tokens that counted
    num_accepted: list[int]  # [B]
    status: int  # `Status` flags of all rows, combined
    scores: Tensor  # [B, N, V] processed logits
    is_stopped: list[bool] | None = None  # [B] the stopping criteria's answer, if they ran between positions
    num_host_syncs: int = 1  # times that our own code waited for the device
    num_user_host_syncs: int = 0  # calls of user code that may have waited for it
    device_num_accepted: Tensor | None = None  # [B] int32 on the target's device; None if it is not there
    has_bad_logits: bool = (
        False  # whether the target's logits are not finite, for which a drafted token may be the cause
    )
    is_rescored: bool = False  # whether the target scored the round again for that reason

    def of_equal_lengths(self) -> "Verified":
        """The same with only as many new tokens in every row as the shortest has."""
        shortest = min(map(len, self.new_ids))
        return self._replace(new_ids=[ids[:shortest] for ids in self.new_ids])


class Trimmed(NamedTuple):
    """The part of a verdict that token-by-token decoding would have emitted."""

    num_emitted: list[int]  # [B]
    is_stopped: list[bool]  # [B] a stopping criterion ends the row at its last emitted token
    is_finished: list[bool]  # [B] the row needs no further token after this round
    num_new: list[int]  # [B] tokens that each row has emitted since its prompt


class StageSeconds(NamedTuple):
    """Seconds spent in each stage."""

    inputs: float = 0.0
    preparation: float = 0.0
    vocabulary: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    score: float = 0.0
    verify: float = 0.0
    bookkeeping: float = 0.0


class RoundRecord(NamedTuple):
    """The record of one round, which observers read after it."""

    num_round: int  # counted from 1; 0 for the token that follows the prompt
    row_ids: list[int]  # [B] the output row of each row
    was_live: list[bool]  # [B] rows that were not finished before the round
    is_served: list[bool]  # [B] rows that the drafter could draft for
    num_model_tokens: int  # tokens that a model or head was asked for; 0 if it was not called
    num_fed: int  # tokens of each row that the drafter read
    num_left: list[int]  # [B] tokens that each row has room for
    draft: DraftOut
    scored: Scored
    verified: Verified
    trimmed: Trimmed
    seconds: StageSeconds  # since the last record
    total_s: float  # since the run began
    call_s: float = 0.0  # since the call of `generate()` began
    names: DraftNames = DraftNames("", "")

    @property
    def live_rows(self) -> list[int]:
        """The rows that were not finished before the round."""
        return [row for row, was_live in enumerate(self.was_live) if was_live]

    def drafted_by(self, row: int) -> str:
        """Return the name of a row's drafted tokens; empty if none counted."""
        if not self.verified.num_drafted[row]:
            return ""
        cached = self.draft.cached
        is_free = not self.num_model_tokens or (cached is not None and not cached.is_own[row])
        return self.names.free if is_free else self.names.model


class RoundReport(NamedTuple):
    """The record of one round, as passed to `generate(..., speculation_callback=...)`.

    All values are on the host. In a call that decodes in several runs, as Whisper's over long audio, rounds and seconds
    start again with each run.
    """

    num_round: int  # number of the batch's round, counted from 1
    row_ids: tuple[int, ...]  # [N] output rows that were live
    num_drafted: tuple[int, ...]  # [N] drafted tokens of each row that counted; 0 in a plain step
    num_accepted: tuple[int, ...]  # [N] drafted tokens that the verifier accepted
    num_emitted: tuple[int, ...]  # [N] tokens added to the output; in a probe, accepted ones may be left out
    draft_s: float = 0.0
    score_s: float = 0.0
    other_s: float = 0.0  # verifying, trimming, rolling back and recording
    total_s: float = 0.0  # since the run began, prefill included
    drafted_by: tuple[str, ...] = ()  # [N] draft source as in `stats.plan`; "" without drafts

    @property
    def round_s(self) -> float:
        """Seconds of this round."""
        return self.draft_s + self.score_s + self.other_s


class PrefillOutput(NamedTuple):
    """The first token after a prompt."""

    token_ids: Tensor  # [B, 1] int64
    token_logits: Tensor  # [B, Q', V]


class DecodeOutput(NamedTuple):
    """Tokens decoded one by one."""

    token_ids: Tensor  # [B, N] int64
    token_logits: Tensor | None  # [B, N, V]; None if nobody reads them
    lens: Tensor  # [B] int32, tokens of each row that count
