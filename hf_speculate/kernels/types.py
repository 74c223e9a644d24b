"""Named tuples and enums of the operations."""

from enum import IntEnum, IntFlag
from typing import NamedTuple

from torch import Tensor


class Stream(IntEnum):
    """Independent random number streams. All except RACE depend on the round."""

    DRAFT = 0
    ACCEPT = 1
    CORRECTION = 2
    RACE = 3
    NOISE = 4  # of random input tokens


class Status(IntFlag):
    """Flags of invalid inputs; 0 for a valid row."""

    BAD_DRAFT_ID = 1
    NAN = 2
    ALL_MASKED = 4
    POSITIVE_INF = 8
    EMPTY_RESIDUAL = 16


class NoiseKeys(NamedTuple):
    """Keys of a round's random numbers, per row."""

    seeds: Tensor  # [B] int64, row seeds
    rounds: Tensor  # [B] int64, index of the round
    positions: Tensor  # [B] int64, number of unpadded tokens before the first drafted token

    def rows(self, indices: Tensor) -> "NoiseKeys":
        """Select the keys of the rows `indices` [N] int64."""
        return NoiseKeys(self.seeds[indices], self.rounds[indices], self.positions[indices])


class Sampled(NamedTuple):
    """One sampled token per row."""

    token_ids: Tensor  # [B] int64
    logsumexp: Tensor  # [B] float32, of the logits after temperature and cutoffs


class Verdict(NamedTuple):
    """The result of verifying one round."""

    # [B, K+1] int64: accepted draft tokens, the correction or bonus token, then -1
    token_ids: Tensor
    num_accepted: Tensor  # [B] int32, without the correction or bonus token
    status: Tensor  # [B] int32, `Status` flags

    @property
    def num_emitted(self) -> Tensor:
        """[B] int32, accepted tokens plus the correction or bonus token."""
        return self.num_accepted + 1
