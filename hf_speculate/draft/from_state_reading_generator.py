"""Drafts with a transformers `CandidateGenerator` that reads the target's hidden states."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.base import check_request
from hf_speculate.draft.from_candidate_generator import ForeignDrafter
from hf_speculate.errors import ShapeError
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy


class StateReadingDrafter(ForeignDrafter):
    """A `Drafter` of one row over a generator such as transformers' for MTP or DFlash.

    The generator is shown the tokens that the target has read with it, without padding and without those that a passed
    cache held, and is told of each round as transformers tells it: states of the tokens that were kept, and how many
    drafts were among them.

    Args:
        generator: proposes; made for this text.
        layers: whose states it reads, as the target's forward numbers them.
    """

    def __init__(self, generator: CandidateGenerator, layers: Sequence[int]):
        super().__init__(generator)
        self.layers = list(layers)

    def draft(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | None,
        num_draft_tokens: int,
        sample_strategy: SampleStrategy,
        *,
        keys: NoiseKeys | None = None,
        kept: Kept | None = None,
    ) -> DraftOut:
        """See `ForeignDrafter.draft`; `kept` holds the states of the layers, joined along D.

        Raises:
            ShapeError: there is more than one row, or no hidden states.
        """
        check_request(query_token_ids, num_draft_tokens, sample_strategy, keys)
        if query_token_ids.shape[0] != 1:
            raise ShapeError(f"query_token_ids must be [1, Q] for candidates, got {list(query_token_ids.shape)}")
        if kept is None or kept.hidden_states is None:
            raise ShapeError("kept must hold hidden states, got none; say what was emitted with them")
        num = int(kept.num_emitted[0])
        new_ids = kept.token_ids[:, :num]
        is_first = self._text is None
        before = query_token_ids[:, -num - 1 : -num] if self._text is None else self._text
        text = torch.cat([before, new_ids.to(before.device)], dim=1)  # [1, T]
        states = kept.hidden_states[:, :num].chunk(len(self.layers), dim=-1)
        columns = torch.arange(text.shape[1], device=text.device)[None]  # [1, T]
        return self._draft(
            text,
            num_draft_tokens,
            model_kwargs={"position_ids": columns, "attention_mask": torch.ones_like(columns)},
            model_outputs=SimpleNamespace(hidden_states=_ByLayer(self.layers, states)),
            is_first_iteration=False,  # transformers' first round drafts nothing: it has no states yet
            n_last_matches=0 if is_first else num - 1,
        )


class _ByLayer:
    """Hidden states in the place of a model's, of which the generator reads those that it asked for."""

    def __init__(self, layers: Sequence[int], states: Sequence[Tensor]):
        self._states = dict(zip(layers, states, strict=True))
        self._states[-1] = states[-1]  # transformers 5.17 asks for the last layer by its number

    def __getitem__(self, layer: int) -> Tensor:
        return self._states[layer]
