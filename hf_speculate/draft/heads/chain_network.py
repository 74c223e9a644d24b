"""The protocol of networks that a chain is drafted with, see `chain`."""

from typing import NamedTuple, Protocol

from torch import Tensor

from hf_speculate.draft.heads.round import HeadNetwork
from hf_speculate.draft.heads.row_cache import Placed, StateStore
from hf_speculate.draft.heads.target_parts import TargetParts


class Pairs(NamedTuple):
    """Pairs of tokens and states that go through one depth of a network together."""

    token_ids: Tensor  # [B, N] int64
    states: Tensor  # [B, N, H], the target's after `project`, or what the network made of earlier pairs
    positions: Tensor  # [B, N] int64
    placed: Placed


class ChainNetwork(HeadNetwork, Protocol):
    """A network that a chain is drafted with."""

    num_depths: int
    """How many layers of it take turns; each has pairs and caches of its own."""
    is_traceable: bool
    """Whether its forwards can be compiled."""

    def run(self, depth: int, pairs: Pairs, cache: StateStore, parts: TargetParts) -> Tensor:
        """[B, N, H], what a depth makes of pairs; their keys and values go into the cache."""

    def read(self, outputs: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Logits [B, Vd] of outputs [B, H], and the states [B, H] for the next pairs."""
