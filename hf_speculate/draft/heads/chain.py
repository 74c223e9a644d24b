"""Drafts a chain of tokens with a network of pairs (token, state): EAGLE-3 and MTP layers.

A pair joins token t_{i+1} with a state of the token before it, stands at position i, and predicts t_{i+2}. The first
token of a draft comes from true pairs, whose states are the target's. Each later one comes from the pair of the token
drafted before it with what the network itself made of the pair before. Keys and values of such pairs are dropped when
the round is over, of accepted tokens too: these come again with the target's states.

A network may have several depths, as checkpoints with several MTP layers do. Depth d reads what depth d - 1 made of
the pair before, so that its pair at position p joins t_{p+1} with a state of depth d - 1 at p - 1, and it has no pair
at positions below d. Draft step k runs depth (k - 1) mod n, which first catches up on the tokens drafted before.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hf_speculate.draft.heads.proposal import Proposal
from hf_speculate.draft.heads.round import HeadDrafter, HeadNetwork, NewTokens, last_of
from hf_speculate.draft.heads.row_cache import Placed, RowCache
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

    def run(self, depth: int, pairs: Pairs, cache: RowCache, parts: TargetParts) -> Tensor:
        """[B, N, H], what a depth makes of pairs; their keys and values go into the cache."""

    def read(self, outputs: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Logits [B, Vd] of outputs [B, H], and the states [B, H] for the next pairs."""


class ChainDrafter(HeadDrafter[ChainNetwork]):
    """Drafts one token after another with a `ChainNetwork`."""

    def propose(self, new: NewTokens, num_draft_tokens: int, proposal: Proposal) -> None:
        """See `HeadDrafter.propose`."""
        for chunk in new.chunks():
            self._read(chunk)
        ends = self.cache.ends  # [B], each row's first position without a true pair
        outputs = [[self.newest_outputs[depth]] for depth in range(self.network.num_depths)]  # each [B, H]
        drafted: list[Tensor] = []  # each [B]
        logits, feedback = self.network.read(outputs[0][0], self.parts)
        drafted.append(proposal.add(logits))
        num_own = [0] * self.network.num_depths  # columns behind the rows' ends that a depth has written
        for step in range(1, num_draft_tokens):
            if proposal.is_over:
                break
            depth = step % self.network.num_depths
            if step < self.network.num_depths:  # the depth's first turn: it catches up
                states = torch.stack(outputs[depth - 1][:step], dim=1)  # [B, step, H]
                token_ids, first = torch.stack(drafted, dim=1), 0
            else:
                states, token_ids, first = feedback[:, None], drafted[-1][:, None], step - 1
            given = self._run_own(depth, token_ids, states, ends + first, num_own[depth])
            num_own[depth] += token_ids.shape[1]
            outputs[depth] += given.unbind(1)
            logits, feedback = self.network.read(given[:, -1], self.parts)
            drafted.append(proposal.add(logits))

    def _read(self, new: NewTokens) -> None:
        """Run true pairs through every depth."""
        states = new.states
        if states is None or not new.width:
            return
        for depth in range(self.network.num_depths):
            placed = self._place(new.width)
            pairs = Pairs(new.token_ids, states, placed.columns, placed)
            outputs = self.network.run(depth, pairs, self.cache, self.parts)
            before = self.newest_outputs.get(depth)
            self.newest_outputs[depth] = last_of(outputs, new, before)
            if depth + 1 < self.network.num_depths:
                head = torch.zeros_like(outputs[:, 0]) if before is None else before
                states = torch.cat([head[:, None], outputs[:, :-1]], dim=1)  # each of the pair before
        self.cache.advance(new.counts, new.lens)

    def _run_own(self, depth: int, token_ids: Tensor, states: Tensor, first: Tensor, num_own: int) -> Tensor:
        """[B, N, H] of pairs with drafted tokens, from positions `first` [B] on."""
        num = token_ids.shape[1]
        placed = self._place(num, num_own)
        positions = first[:, None] + torch.arange(num, device=self.device)
        return self.network.run(depth, Pairs(token_ids, states, positions, placed), self.cache, self.parts)

    def _place(self, num_tokens: int, offset: int = 0) -> Placed:
        network = self.network
        firsts = range(network.num_depths) if network.num_depths > 1 else ()
        return self.cache.place(num_tokens, network.windows, self.dtype, offset=offset, firsts=list(firsts))
