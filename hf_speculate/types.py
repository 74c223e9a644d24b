"""Named tuples exchanged by the stages of a round."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from hf_speculate.kernels.types import NoiseKeys as NoiseKeys
from hf_speculate.kernels.types import Status as Status
from hf_speculate.kernels.types import Stream as Stream
from hf_speculate.kernels.types import Verdict as Verdict

BAD_LOGITS = int(Status.NAN | Status.ALL_MASKED | Status.POSITIVE_INF)
"""Flags of logits without a distribution; a draft's logits may set them too."""


class SampleStrategy(Enum):
    """The strategy for choosing a token from logits."""

    GREEDY = "greedy"
    RANDOM = "random"


class CachedDraft(NamedTuple):
    """The contents of a draft cache.

    Set for a draft proposed without the model in some or all rows.
    """

    # cached tokens past each row's sequence; negative: sequence tokens missing in the cache
    num_ahead: int
    is_own: Sequence[bool]  # [B] rows with a cached draft; the other rows have free proposals


class DraftOut(NamedTuple):
    """The draft of one round."""

    token_ids: Tensor  # [B, K] int64
    lens: Tensor  # [B] int32, valid tokens of each row
    # [B, K, V], the exact sampling distribution, warpers included; None for a point mass
    token_logits: Tensor | None
    logsumexp: Tensor | None  # [B, K] float32 of token_logits; None if token_logits is None
    # None if the draft cache holds all but the last drafted token of every row
    cached: CachedDraft | None = None


class DraftNames(NamedTuple):
    """Names of a draft source's tokens, by proposer."""

    model: str  # tokens of a model or head
    free: str  # tokens proposed at no cost, as by prompt lookup


class Kept(NamedTuple):
    """Feedback: the tokens emitted since the last call.

    A drafter with `hidden_layers` gets every token with its source state: state i of a row is the
    target's state at the token before `token_ids[i]`. The newest token has no state yet, because
    the target has not read it. Such a drafter gets a `Kept` in its first call too: all prompt
    tokens read by the target except the first, without padding, then the emitted tokens. If the
    prompt is embeddings with fewer ids, or none, only tokens with ids are included.
    """

    token_ids: Tensor  # [B, N] int64, padded with -1; N is at most K+1, and more after plain steps
    num_emitted: Tensor  # [B] int32, on the host; 0 for a finished row still in the batch
    # [B, N, D], undefined past `num_emitted`; [B, 1, D] without `reads_prompt`; None without layers
    hidden_states: Tensor | None = None


class KVState(NamedTuple):
    """The keys and values of one layer."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, D]


class DeviceVerdict(NamedTuple):
    """The verdict of a round on the device.

    A graph overwrites its verdict in the next round.
    """

    verdict: Verdict
    scores: Tensor  # [B, K+1, V] processed logits
    # [B, N] int64 to be read by the host: the ids, then perhaps 1 for each position of NaN logits
    ids: Tensor
    logits: Tensor  # [B, K+1, V] before the processors
    # [B, ...] int32, see `transfers.pack`: `ids`, `num_accepted`, `status` and the lengths of the
    # drafts; None if they are not joined yet
    packed: Tensor | None = None


class RoundRows(NamedTuple):
    """The state of B rows at the beginning of a round, on the host."""

    newest_ids: list[list[int]]  # [B, 2] newest tokens of each row
    rounds: list[int]  # [B] keys of the noise, as in `NoiseKeys`
    positions: list[int]  # [B]
    is_live: list[bool]  # [B]
    seeds: Tensor  # [B] int64 row seeds, on the device


class DeviceRows(NamedTuple):
    """The state of B rows before a round, on the device. The round overwrites it."""

    newest_ids: Tensor  # [B, 2] int64, newest tokens of each row
    keys: NoiseKeys


class Scored(NamedTuple):
    """The outputs of a model's forward."""

    logits: Tensor  # [B, Q', V]
    # by layer, each [B, Q, D]; None unless requested
    hidden_states: tuple[Tensor, ...] | None = None
    # by layer, each [B, H, Q, T]; None unless requested
    attentions: tuple[Tensor, ...] | None = None
    # [B, Q, A * D], layer states for the drafter; None unless captured
    captured: Tensor | None = None
    judged: DeviceVerdict | None = None  # None if the round is not verified yet


class Verified(NamedTuple):
    """The verdict of a round, on the host."""

    token_ids: Tensor  # [B, N] int64 on the target's device, padded with -1
    new_ids: list[list[int]]  # [B] accepted tokens and the next token
    num_drafted: list[int]  # [B] valid drafted tokens
    num_accepted: list[int]  # [B]
    status: int  # `Status` flags of all rows, combined
    scores: Tensor  # [B, N, V] processed logits
    # [B] result of the stopping criteria, if they ran between positions
    is_stopped: list[bool] | None = None
    num_host_syncs: int = 1  # waits of the library for the device
    num_user_host_syncs: int = 0  # calls of user code, each a possible wait for the device
    # [B] int32 on the target's device; None if it is not there
    device_num_accepted: Tensor | None = None
    # whether target logits are not finite, perhaps due to a drafted token
    has_bad_logits: bool = False
    # whether a graph has verified the round; it overwrites the tensors in the next one
    is_captured: bool = False
    is_rescored: bool = False  # whether the target scored the round again because of bad logits

    def of_equal_lengths(self) -> "Verified":
        """Truncate the new tokens of all rows to the length of the shortest."""
        shortest = min(map(len, self.new_ids))
        return self._replace(new_ids=[ids[:shortest] for ids in self.new_ids])


class Trimmed(NamedTuple):
    """A verdict, cut to token-by-token decoding's output."""

    num_emitted: list[int]  # [B]
    is_stopped: list[bool]  # [B] rows ended by a stopping criterion at the last emitted token
    is_finished: list[bool]  # [B] rows without further tokens after this round
    num_new: list[int]  # [B] tokens of each row emitted since its prompt


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
    """The record of one round, read by observers."""

    num_round: int  # counted from 1; 0 for the first token after the prompt
    row_ids: list[int]  # [B] the output row of each row
    was_live: list[bool]  # [B] rows not finished before the round
    is_served: list[bool]  # [B] rows supported by the drafter
    num_model_tokens: int  # tokens requested from a model or head; 0 if it was not called
    num_fed: int  # tokens of each row read by the drafter
    num_left: list[int]  # [B] remaining tokens of each row
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
        """Rows not finished before the round."""
        return [row for row, was_live in enumerate(self.was_live) if was_live]

    def drafted_by(self, row: int) -> str:
        """Return the name of a row's drafted tokens; empty if there are none."""
        if not self.verified.num_drafted[row]:
            return ""
        cached = self.draft.cached
        is_free = not self.num_model_tokens or (cached is not None and not cached.is_own[row])
        return self.names.free if is_free else self.names.model


class RoundReport(NamedTuple):
    """The public record of one round.

    It is passed to `generate(..., speculation_callback=...)`. All values are on the host. Rounds
    and seconds start again with each run if a call decodes in several runs, like Whisper over long
    audio.
    """

    num_round: int  # number of the batch's round, counted from 1
    row_ids: tuple[int, ...]  # [N] live output rows
    num_drafted: tuple[int, ...]  # [N] valid drafted tokens of each row; 0 in a plain step
    num_accepted: tuple[int, ...]  # [N] drafted tokens accepted by the verifier
    # [N] tokens added to the output; a probe may leave out accepted ones
    num_emitted: tuple[int, ...]
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
    token_logits: Tensor | None  # [B, N, V]; None if not needed
    lens: Tensor  # [B] int32, valid tokens of each row
