"""The named tuples in which the stages of a round speak to each other."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.triton_kernels.types import NoiseKeys, Sampled, Status, Stream, Verdict


class SampleStrategy(Enum):
    """How a token is chosen from logits."""

    GREEDY = "greedy"
    RANDOM = "random"


class Fed(NamedTuple):
    """What a drafter's cache holds after a draft that it was not fed, or not in every row."""

    num_ahead: int  # tokens past each row's text; negative: tokens of the text that it lacks
    is_own: Sequence[bool]  # [B] rows whose proposal those tokens are


class DraftOut(NamedTuple):
    """What a drafter proposes for one round."""

    token_ids: Tensor  # [B, K] int64
    lens: Tensor  # [B] int32, how many of a row's tokens count
    token_logits: Tensor | None  # [B, K, V], the exact law sampled, warpers included; None: a point mass
    logsumexp: Tensor | None  # [B, K] float32, of each law in token_logits; None where that is None
    fed: Fed | None = None  # None: the cache, where there is one, holds all but the last proposed token of every row


class Kept(NamedTuple):
    """What was emitted since the drafter's last call, handed back to it.

    A drafter that reads hidden states is told of every token with the state that it was chosen from: state i of a row
    is the target's last one, as its head reads it, at the token before `token_ids[i]`. The newest token has no state of
    its own yet, for the target has not read it. Such a drafter gets a `Kept` in its first call too: all tokens of the
    prompt that the target read but the first, without padding, then what was emitted. Where the prompt is embeddings
    with fewer ids, or none, it is told of the tokens that have ids.
    """

    token_ids: Tensor  # [B, N] int64, padded with -1; N is K+1 at most, and more after plain steps
    num_emitted: Tensor  # [B] int32, on the host; 0 for a row that has ended and stays
    hidden_states: Tensor | None = None  # [B, N, D], anything past `num_emitted`; None: the drafter reads none
    num_rounds: int = 1  # since the drafter's last call, plain steps among them
    new_ids: Sequence[list[int]] | None = None  # [B] the tokens once more, as lists; None: the drafter reads tensors


class HostKept(Kept):
    """What a drafter is told that reads lists; the tensors, whose making takes longer than its work, when asked for."""

    __slots__ = ()

    @classmethod
    def of(cls, new_ids: Sequence[list[int]], num_rounds: int = 1) -> "HostKept":
        """What rows have gained.

        Args:
            new_ids: [B] lists of tokens; left as they are.
            num_rounds: since the drafter's last call.
        """
        nothing: Any = None
        return cls(nothing, nothing, None, num_rounds, new_ids)

    @property
    def token_ids(self) -> Tensor:
        """See `Kept`."""
        ids = self.new_ids or []
        width = max(map(len, ids), default=0)
        return torch.tensor([row + [-1] * (width - len(row)) for row in ids], dtype=torch.int64)

    @property
    def num_emitted(self) -> Tensor:
        """See `Kept`."""
        return torch.tensor([len(row) for row in self.new_ids or []], dtype=torch.int32)


class KVState(NamedTuple):
    """One layer's states."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, D]


class Scored(NamedTuple):
    """What a model's forward gave."""

    logits: Tensor  # [B, Q', V]
    hidden_states: tuple[Tensor, ...] | None = None  # by layer, each [B, Q, D]; only where asked for
    attentions: tuple[Tensor, ...] | None = None  # by layer, each [B, H, Q, T]; only where asked for


class RoundReport(NamedTuple):
    """What one round did, as `generate(..., speculation_callback=...)` is told after it.

    All of it is on the host already. In a call that decodes several times, as Whisper's over long audio, rounds and
    seconds begin anew with each run.
    """

    num_round: int  # of the batch, counted from 1
    row_ids: tuple[int, ...]  # [N] the output's rows that were live
    num_drafted: tuple[int, ...]  # [N] drafted tokens of each that counted; 0 in a plain step
    num_accepted: tuple[int, ...]  # [N] those that the verifier kept
    num_emitted: tuple[int, ...]  # [N] tokens that went into the output, after stopping
    draft_s: float = 0.0  # of this round
    score_s: float = 0.0
    other_s: float = 0.0  # verifying, trimming, cropping and writing
    total_s: float = 0.0  # since the run began, prefill included

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
    token_logits: Tensor | None  # [B, N, V]; None where the caller's own choice withheld them
    lens: Tensor  # [B] int32, tokens that count


__all__ = [
    "DecodeOutput",
    "DraftOut",
    "Fed",
    "KVState",
    "Kept",
    "NoiseKeys",
    "PrefillOutput",
    "RoundReport",
    "SampleStrategy",
    "Sampled",
    "Scored",
    "Status",
    "Stream",
    "Verdict",
]
