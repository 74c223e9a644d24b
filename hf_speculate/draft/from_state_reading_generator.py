"""State-reading adapter: drafts with a `CandidateGenerator` that reads the target's hidden states."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.from_candidate_generator import CandidateGeneratorDrafter
from hf_speculate.errors import ShapeError
from hf_speculate.types import DraftOut


class StateReadingGeneratorDrafter(CandidateGeneratorDrafter):
    """A `Drafter` for one row over a generator such as transformers' for MTP or DFlash.

    The generator is shown the tokens that the target has read in this call, without padding. After each round it is
    told, as by transformers, the states of the emitted tokens and how many drafted tokens were among them.

    Args:
        generator: proposes tokens; made for this sequence.
        layers: layers whose states it reads, numbered as in the target's `output_hidden_states`.
    """

    def __init__(self, generator: CandidateGenerator, layers: Sequence[int]):
        super().__init__(generator)
        self._layers = list(layers)
        self.hidden_layers = self._layers

    def draft(self, request: DraftRequest) -> DraftOut:
        """See `CandidateGeneratorDrafter.draft`; `kept` holds the states of the layers, concatenated along D."""
        request.check()
        query, kept = request.query_token_ids, request.kept
        if query.shape[0] != 1:
            raise ShapeError(f"query_token_ids must be [1, Q] for candidates, got {list(query.shape)}")
        if kept is None or kept.hidden_states is None:
            raise ShapeError("kept must hold hidden states, got none; pass the emitted tokens with them")
        num = int(kept.num_emitted[0])
        new_ids = kept.token_ids[:, :num]
        is_first = self._text is None
        before = query[:, -num - 1 : -num] if self._text is None else self._text
        text = torch.cat([before, new_ids.to(before.device)], dim=1)  # [1, T]
        states = kept.hidden_states[:, :num].chunk(len(self._layers), dim=-1)
        columns = torch.arange(text.shape[1], device=text.device)[None]  # [1, T]
        return self._draft(
            text,
            request.num_draft_tokens,
            model_kwargs={"position_ids": columns, "attention_mask": torch.ones_like(columns)},
            model_outputs=SimpleNamespace(hidden_states=_ByLayer(self._layers, states)),
            is_first_iteration=False,  # transformers' first round drafts nothing: it has no states yet
            n_last_matches=0 if is_first else num - 1,
        )


class _ByLayer:
    """The hidden states of some layers, indexed like a model's tuple of all of them."""

    def __init__(self, layers: Sequence[int], states: Sequence[Tensor]):
        self._states = dict(zip(layers, states, strict=True))
        self._states[-1] = states[-1]  # transformers 5.17 asks for the last layer by its number

    def __getitem__(self, layer: int) -> Tensor:
        return self._states[layer]
