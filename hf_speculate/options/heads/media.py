"""The target's image and audio embeddings, in place of the embeddings of placeholder tokens.

A pair joins token t_{i+1} with the state of token t_i. The input of the target's first layer at t_i
is captured together with that state. Hence the embedding of t_{i+1} is captured one token later in
the same row.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.options.heads.head import HeadSpec
from hf_speculate.options.heads.round import MergedEmbeddings, NewTokens

FIRST_INPUT = 0  # id of the first layer's input, see `Drafter.hidden_layers`
_NAMES = [
    f"{modality}_token_{end}" for modality in ("image", "video", "audio") for end in ("id", "index")
]


def media_token_ids(config: PreTrainedConfig) -> list[int]:
    """Return the ids of placeholder tokens for images and audio."""
    ids: list[Any] = [getattr(config, name, None) for name in _NAMES]
    return sorted({token_id for token_id in ids if isinstance(token_id, int)})


class MediaEmbeddings:
    """Image and audio embeddings, stored with a head's states."""

    def __init__(self, token_ids: Tensor, width: int):
        self._token_ids = token_ids  # [M] int64, placeholders of images and audio
        self._width = width  # Ht

    @classmethod
    def of(
        cls, setup: DrafterSetup, spec: HeadSpec, device: torch.device
    ) -> "MediaEmbeddings | None":
        """Make the embeddings of one call; return None if the head reads only token embeddings."""
        ids = media_token_ids(setup.target.config)
        if not (spec.merges_media and setup.has_media and ids):
            return None
        return cls(torch.tensor(ids, device=device), spec.target_hidden_size)

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split joined states [..., D + Ht] into states [..., D] and layer inputs [..., Ht]."""
        return states[..., : -self._width], states[..., -self._width :]

    def join(self, states: Tensor, inputs: Tensor) -> Tensor:
        """Join states [..., D] and layer inputs [..., Ht] to [..., D + Ht] for `split`."""
        return torch.cat([states, inputs.to(states)], dim=-1)

    def read(self, new: NewTokens) -> NewTokens:
        """Split the joined states of new tokens into states and media embeddings."""
        if new.states is None:
            return new
        states, inputs = self.split(new.states)
        # [B, N, Ht], embedding of each pair's token
        following = torch.cat([inputs[:, 1:], inputs[:, -1:]], dim=1)
        # The target has not yet computed the state of a row's newest token.
        has_state = torch.arange(new.width, device=inputs.device) < new.lens[:, None] - 1  # [B, N]
        is_media = has_state & torch.isin(new.token_ids, self._token_ids)
        return new._replace(states=states, merged=MergedEmbeddings(following, is_media[:, :, None]))
