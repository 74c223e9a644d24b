"""Draft all tokens of a round in one forward over mask-token slots: P-EAGLE and PARD.

The slots follow each row's newest tokens. The newest token predicts the first drafted token, and
slot k predicts drafted token k + 1. Drafted tokens do not depend on each other, so sampling them
one by one samples from the product of their distributions.

Source:
    PARD: An et al. (arXiv:2504.18583).
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.draft.token_choice import RoundDraft
from hf_speculate.options.heads.network import HeadNetwork, TargetParts
from hf_speculate.options.heads.round import HeadDrafter, NewTokens, last_of
from hf_speculate.options.heads.row_cache import CacheView


class SlotInputs(NamedTuple):
    """Tokens of each row, followed by slots."""

    token_ids: Tensor  # [B, N] int64; undefined in slots
    states: Tensor | None  # [B, N, H], the target's after `project`; undefined in slots
    is_slot: Tensor  # [B, N] bool, true in slots and in columns after them
    view: CacheView  # columns are positions


class SlotNetwork(HeadNetwork):
    """A network with mask-token slots."""

    @abstractmethod
    def fill(self, inputs: SlotInputs, parts: TargetParts) -> Tensor:
        """Run tokens and slots; return outputs [B, N, H] after the final norm."""


class ParallelDrafter(HeadDrafter[SlotNetwork]):
    """A drafter with one `SlotNetwork` forward per round.

    Prompts take one forward per chunk.
    """

    def propose(self, new: NewTokens, num_draft_tokens: int, draft: RoundDraft) -> None:
        *before, last = new.chunks()
        for chunk in before:
            self.read_new(chunk)
        outputs = self._fill(last, num_draft_tokens - 1)
        first = self.newest_outputs.get(0, torch.zeros_like(outputs[:, 0]))
        joined = torch.cat([first[:, None], outputs], dim=1)  # [B, 1 + N, H]
        index = last.lens[:, None] + torch.arange(num_draft_tokens, device=self.device)  # [B, K]
        chosen = joined.gather(1, index[:, :, None].expand(-1, -1, joined.shape[2]))  # [B, K, H]
        self.newest_outputs[0] = chosen[:, 0]
        draft.choose_all(self.network.logits(chosen, self.parts))

    def read_new(self, new: NewTokens) -> None:
        self.newest_outputs[0] = last_of(self._fill(new, 0), new, self.newest_outputs.get(0))

    def _fill(self, new: NewTokens, num_slots: int) -> Tensor:
        """Run new tokens with slots after each row's last token; return outputs [B, N, H].

        Only the tokens stay in the cache.
        """
        width = new.width + num_slots
        is_slot = torch.arange(width, device=self.device) >= new.lens[:, None]  # [B, N]
        token_ids = torch.nn.functional.pad(new.token_ids, (0, num_slots))
        states = (
            None
            if new.states is None
            else torch.nn.functional.pad(new.states, (0, 0, 0, num_slots))
        )
        view = self.cache.view(width)
        outputs = self.network.fill(SlotInputs(token_ids, states, is_slot, view), self.parts)
        self.cache.advance(new.counts, new.lens)
        return outputs
