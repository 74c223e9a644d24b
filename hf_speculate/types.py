"""Named tuples that the stages of a round exchange."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from hf_speculate.kernels.types import NoiseKeys as NoiseKeys
from hf_speculate.kernels.types import Status as Status
from hf_speculate.kernels.types import Stream as Stream
from hf_speculate.kernels.types import Verdict as Verdict

BAD_LOGITS = int(Status.NAN | Status.ALL_MASKED | Status.POSITIVE_INF)
"""Flags of logits that define no distribution. A draft's logits may also set them."""


class SampleStrategy(Enum):
    """Strategy for choosing a token from logits."""

    GREEDY = "greedy"
    RANDOM = "random"


class CachedDraft(NamedTuple):
    """The contents of a draft cache.

    They are recorded for a draft in which some or all rows have free proposals.
    """

    # number of cached tokens past each row's sequence; if negative, number of sequence tokens that
    # the cache lacks
    num_ahead: int
    is_own: Sequence[bool]  # [B] rows whose draft is cached; all other rows have free proposals


class DraftOut(NamedTuple):
    """The draft for one round."""

    token_ids: Tensor  # [B, K] int64
    lens: Tensor  # [B] int32, number of valid tokens in each row
    # [B, K, V], logits of the exact sampling distribution, after warpers; None for point masses
    token_logits: Tensor | None
    logsumexp: Tensor | None  # [B, K] float32, over token_logits; None if token_logits is None
    # None if the draft cache holds all but the last drafted token of every row
    cached: CachedDraft | None = None


class DraftNames(NamedTuple):
    """Names for the tokens of a draft source."""

    model: str  # name for tokens from a model or head
    free: str  # name for tokens proposed at no cost, for example by prompt lookup


class Kept(NamedTuple):
    """Feedback to the drafter: the tokens emitted since the last call.

    A drafter with `hidden_layers` gets every token with the state that it was chosen from: state i
    of a row is the target's state at the token before `token_ids[i]`. The newest token has no state
    yet, because the target has not read it. Such a drafter gets a `Kept` even in its first call. It
    contains all prompt tokens that the target has read except the first, without padding, followed
    by the emitted tokens. If the prompt consists of embeddings with fewer ids or none, only tokens
    with ids are included.
    """

    token_ids: Tensor  # [B, N] int64, padded with -1; N <= K+1, but larger after plain steps
    num_emitted: Tensor  # [B] int32, on the host; 0 for a finished row still in the batch
    # [B, N, D], undefined past `num_emitted`; [B, 1, D] without `reads_prompt`; None without
    # `hidden_layers`
    hidden_states: Tensor | None = None


class KVState(NamedTuple):
    """The keys and values of one layer."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, D]


class DeviceVerdict(NamedTuple):
    """The verdict of a round on the device.

    In the next round, a graph overwrites its verdict.
    """

    verdict: Verdict
    scores: Tensor  # [B, K+1, V] processed logits
    # [B, N] int64 for the host to read: the ids, possibly followed by a 1 for each position whose
    # logits are NaN
    ids: Tensor
    logits: Tensor  # [B, K+1, V] before the processors
    # [B, ...] int32, see `transfers.pack`: `ids`, `num_accepted`, `status` and the draft lengths;
    # None if they have not been joined yet
    packed: Tensor | None = None


class RoundRows(NamedTuple):
    """The state of B rows on the host at the beginning of a round."""

    newest_ids: list[list[int]]  # [B, 2] newest tokens of each row
    rounds: list[int]  # [B] round number of each row, see `NoiseKeys`
    positions: list[int]  # [B] position of each row, see `NoiseKeys`
    is_live: list[bool]  # [B] rows that are not finished
    seeds: Tensor  # [B] int64 row seeds, on the device


class DeviceRows(NamedTuple):
    """The state of B rows on the device before a round, which overwrites it."""

    newest_ids: Tensor  # [B, 2] int64, newest tokens of each row
    keys: NoiseKeys


class Scored(NamedTuple):
    """The outputs of a model's forward."""

    logits: Tensor  # [B, Q', V]
    # by layer, each [B, Q, D]; None unless requested
    hidden_states: tuple[Tensor, ...] | None = None
    # by layer, each [B, H, Q, T]; None unless requested
    attentions: tuple[Tensor, ...] | None = None
    # [B, Q, A * D], states of the layers that the drafter reads; None unless captured
    captured: Tensor | None = None
    judged: DeviceVerdict | None = None  # verdict; None if the round is not verified yet


class Verified(NamedTuple):
    """The verdict of a round on the host."""

    token_ids: Tensor  # [B, N] int64 on the target's device, padded with -1
    new_ids: list[list[int]]  # [B] accepted tokens and the next token
    num_drafted: list[int]  # [B] number of valid drafted tokens
    num_accepted: list[int]  # [B] number of accepted tokens
    status: int  # combined `Status` flags of all rows
    scores: Tensor  # [B, N, V] processed logits
    # [B] result of the stopping criteria; None unless they ran between positions
    is_stopped: list[bool] | None = None
    num_host_syncs: int = 1  # number of times that the library waits for the device
    num_user_host_syncs: int = 0  # number of calls to user code that may wait for the device
    # [B] int32 on the target's device; None if only the host has the numbers
    device_num_accepted: Tensor | None = None
    # whether any target logits are not finite, possibly because of a drafted token
    has_bad_logits: bool = False
    # whether a graph has verified the round; the graph overwrites the tensors in the next round
    is_captured: bool = False
    is_rescored: bool = False  # whether the target scored the round again because of bad logits

    def of_equal_lengths(self) -> "Verified":
        """Truncate the new tokens of all rows to the length of the shortest row."""
        shortest = min(map(len, self.new_ids))
        return self._replace(new_ids=[ids[:shortest] for ids in self.new_ids])


class Trimmed(NamedTuple):
    """A verdict that is trimmed to the output of token-by-token decoding."""

    num_emitted: list[int]  # [B] number of emitted tokens
    is_stopped: list[bool]  # [B] rows that a stopping criterion ends at the last emitted token
    is_finished: list[bool]  # [B] rows that get no further tokens after this round
    num_new: list[int]  # [B] number of tokens emitted since the prompt of each row


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
    """The record of one round, which observers read."""

    num_round: int  # number of the round, starting at 1; 0 for the first token after the prompt
    row_ids: list[int]  # [B] index of each row's output row
    was_live: list[bool]  # [B] rows that were not finished before the round
    is_served: list[bool]  # [B] rows that the drafter serves
    num_model_tokens: int  # tokens requested from a model or head; 0 if it was not called
    num_fed: int  # number of tokens per row that the drafter read
    num_left: list[int]  # [B] number of remaining tokens in each row
    draft: DraftOut
    scored: Scored
    verified: Verified
    trimmed: Trimmed
    seconds: StageSeconds  # seconds since the last record
    total_s: float  # seconds since the run began
    call_s: float = 0.0  # seconds since the call to `generate()` began
    names: DraftNames = DraftNames("", "")

    @property
    def live_rows(self) -> list[int]:
        """Rows that were not finished before the round."""
        return [row for row, was_live in enumerate(self.was_live) if was_live]

    def drafted_by(self, row: int) -> str:
        """Return the name for a row's drafted tokens; empty if there are none."""
        if not self.verified.num_drafted[row]:
            return ""
        cached = self.draft.cached
        is_free = not self.num_model_tokens or (cached is not None and not cached.is_own[row])
        return self.names.free if is_free else self.names.model


class RoundReport(NamedTuple):
    """The public record of one round.

    The function passed as `generate(..., speculation_callback=...)` receives it. All values are on
    the host. If a call decodes in several runs, as Whisper does for long audio, rounds and seconds
    restart with each run.
    """

    num_round: int  # number of the batch's round, starting at 1
    row_ids: tuple[int, ...]  # [N] indices of the live output rows
    num_drafted: tuple[int, ...]  # [N] number of valid drafted tokens; 0 in a plain step
    num_accepted: tuple[int, ...]  # [N] number of drafted tokens that the verifier accepted
    # [N] number of tokens added to the output; a stop may leave out accepted tokens
    num_emitted: tuple[int, ...]
    draft_s: float = 0.0
    score_s: float = 0.0
    other_s: float = 0.0  # verification, trimming, rollback and recording
    total_s: float = 0.0  # seconds since the run began, including the prefill
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
    token_logits: Tensor | None  # [B, N, V]; None if they are not needed
    lens: Tensor  # [B] int32, number of valid tokens in each row
