"""Drafts a chain of tokens with a network of pairs (token, state): EAGLE-3 and MTP layers.

A pair joins token t_{i+1} with a state of the token before it, stands at position i, and predicts t_{i+2}. The first
token of a draft comes from true pairs, whose states are the target's. Each later one comes from the pair of the token
drafted before it with what the network itself made of the pair before. Keys and values of such pairs are dropped when
the round is over, of accepted tokens too: these come again with the target's states.

A network may have several depths, as checkpoints with several MTP layers do. Depth d reads what depth d - 1 made of
the pair before, so that its pair at position p joins t_{p+1} with a state of depth d - 1 at p - 1, and it has no pair
at positions below d. Draft step k runs depth (k - 1) mod n, which first catches up on the tokens drafted before.
"""

import torch
from torch import Tensor

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.heads.chain_network import ChainNetwork, Pairs
from hf_speculate.draft.heads.compiled_chain import CompiledChain
from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.proposal import Proposal
from hf_speculate.draft.heads.round import HeadDrafter, NewTokens, last_of
from hf_speculate.draft.heads.row_cache import Placed
from hf_speculate.draft.heads.target_parts import shape_of


class ChainDrafter(HeadDrafter[ChainNetwork]):
    """Drafts one token after another with a `ChainNetwork`.

    Args:
        network: the head's.
        spec: of the head.
        setup: of the call; it may ask for compiled drafts.
        device: of the head.
        dtype: of the head.
    """

    def __init__(
        self, network: ChainNetwork, spec: HeadSpec, setup: DrafterSetup, device: torch.device, dtype: torch.dtype
    ):
        super().__init__(network, spec, setup, device, dtype)
        self._compiled: CompiledChain | None = None
        # where the target is not compiled, rows leave the batch, and each number of rows would be compiled
        is_target_eager = shape_of(setup.target.config).num_layers in spec.hidden_layers
        if setup.compilation is not None and network.is_traceable and self.chooser.is_plain and not is_target_eager:
            self._compiled = CompiledChain(network, setup, setup.compilation, self.cache)
            self.is_compiled = self._compiled.is_working

    def propose(self, new: NewTokens, num_draft_tokens: int, proposal: Proposal) -> None:
        """See `HeadDrafter.propose`."""
        for chunk in new.chunks():
            self._read(chunk)
        if self._compiled is not None:
            unrolled = self._compiled.draft(self.newest_outputs[0], self.parts, num_draft_tokens, proposal.keys)
            if unrolled is not None:
                proposal.add_unrolled(unrolled, num_draft_tokens)
                return
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
