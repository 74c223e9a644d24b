"""The named tuples and enums that the operations take and return."""

from enum import IntEnum, IntFlag
from typing import NamedTuple

from torch import Tensor


class Stream(IntEnum):
    """Independent sources of noise. All but RACE are keyed by the round as well."""

    DRAFT = 0
    ACCEPT = 1
    CORRECTION = 2
    RACE = 3


class Status(IntFlag):
    """What was wrong with a row; 0 when nothing was."""

    BAD_DRAFT_ID = 1
    NAN = 2
    ALL_MASKED = 4
    POSITIVE_INF = 8
    EMPTY_RESIDUAL = 16


class NoiseKeys(NamedTuple):
    """What the noise of one round depends on, one entry per row."""

    seeds: Tensor  # [B] int64, the row seed
    rounds: Tensor  # [B] int64, how many rounds this row has begun
    positions: Tensor  # [B] int64, unpadded tokens before the first drafted token

    def rows(self, indices: Tensor) -> "NoiseKeys":
        """Keys of the rows `indices` [N] int64."""
        return NoiseKeys(self.seeds[indices], self.rounds[indices], self.positions[indices])


class Sampled(NamedTuple):
    """One draw per row."""

    token_ids: Tensor  # [B] int64
    logsumexp: Tensor  # [B] float32, of the law that was drawn from


class Verdict(NamedTuple):
    """What a verifier kept of one round."""

    token_ids: Tensor  # [B, K+1] int64: kept draft tokens, then the correction or bonus token, then -1
    num_accepted: Tensor  # [B] int32, without the correction or bonus token
    status: Tensor  # [B] int32, `Status` flags

    @property
    def num_emitted(self) -> Tensor:
        """[B] int32: accepted tokens and the one that follows them."""
        return self.num_accepted + 1
