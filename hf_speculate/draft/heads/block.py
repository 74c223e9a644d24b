"""Drafts all tokens of a round from one block of mask tokens: DFlash and DSpark."""

import torch
from torch import Tensor

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.heads.dflash import DFlashNetwork
from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.proposal import Proposal
from hf_speculate.draft.heads.round import HeadDrafter, NewTokens


class BlockDrafter(HeadDrafter[DFlashNetwork]):
    """Drafts with one block a round, whatever K is; a shorter draft is the beginning of the block's.

    A DFlash block gives each token a distribution that depends on none of the others. DSpark's Markov head makes it
    depend on the token before, so its tokens are chosen from left to right. If the call sets a confidence threshold
    and the head has a confidence head, a row's draft ends before the first token at which the product of the
    estimates falls below it; otherwise the threshold is on the probability of the drafted token, as for draft models.

    Args:
        network: the head's.
        spec: of the head.
        setup: of the call.
        device: of the head.
        dtype: of the head.
    """

    def __init__(
        self, network: DFlashNetwork, spec: HeadSpec, setup: DrafterSetup, device: torch.device, dtype: torch.dtype
    ):
        super().__init__(network, spec, setup, device, dtype)
        self._threshold = 0.0
        if network.confidence_head is not None:
            self._threshold, self.chooser.threshold = self.chooser.threshold, 0.0

    def propose(self, new: NewTokens, num_draft_tokens: int, proposal: Proposal) -> Tensor | None:
        """See `HeadDrafter.propose`."""
        network, options = self.network, self.network.options
        if new.states is not None and new.width:
            network.read(new.states, self.cache, self.cache.place(new.width, network.windows, self.dtype))
            self.cache.advance(new.counts, new.lens)
        placed = self.cache.place(options.block_size, network.windows, self.dtype, is_causal=options.is_causal)
        block = network.fill(new.newest_ids, self.cache, placed, self.parts)  # [B, b, H]
        first = 0 if options.samples_from_anchor else 1
        states = block[:, first : first + num_draft_tokens]  # [B, K, H]
        logits = network.logits(states, self.parts)  # [B, K, Vd]
        if network.markov_head is None and not self._threshold:
            proposal.add_all(logits)
            return None
        return self._from_left_to_right(new.newest_ids, states, logits, proposal)

    def _from_left_to_right(
        self, newest_ids: Tensor, states: Tensor, logits: Tensor, proposal: Proposal
    ) -> Tensor | None:
        """Choose tokens that depend on the one before; [B] how many count, or None if all do."""
        network = self.network
        previous, memory = newest_ids, None
        product = torch.ones(len(newest_ids), device=self.device)
        lens = torch.zeros(len(newest_ids), dtype=torch.int32, device=self.device)
        for step in range(logits.shape[1]):
            scores, features = logits[:, step], states[:, step]
            if network.markov_head is not None:
                embeddings = network.markov_head.embedded(previous)
                bias, memory = network.markov_head(embeddings, features, memory)
                scores = scores + bias
                if network.options.markov_reaches_confidence:
                    features = torch.cat([features, embeddings], dim=-1)
            previous = proposal.add(scores)
            if self._threshold and network.confidence_head is not None:
                product = product * network.confidence_head(features)
                lens += (product >= self._threshold).to(torch.int32)
        return lens if self._threshold else None
