"""Embeddings, language modelling head and sizes of the target that a draft head is used with."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedConfig, PreTrainedModel


class TargetShape(NamedTuple):
    """The numbers of a target that a head must fit."""

    hidden_size: int  # Ht
    num_layers: int  # L
    vocab_size: int  # V
    model_type: str
    name: str  # last part of `name_or_path`; empty if it is a local folder

    @property
    def sizes(self) -> str:
        return f"hidden size {self.hidden_size}, {self.num_layers} layers and {self.vocab_size} tokens"


def shape_of(config: PreTrainedConfig) -> TargetShape:
    """The shape of a target, from its config alone."""
    text = config.get_text_config(decoder=True)
    name = known_name(str(config.name_or_path or ""))
    return TargetShape(text.hidden_size, text.num_hidden_layers, text.vocab_size, config.model_type, name)


def known_name(source: str) -> str:
    """The last part of a repository's id; empty for a local folder, which may have any name."""
    return "" if Path(source).is_dir() else source.rstrip("/").rpartition("/")[2]


class TargetParts:
    """The target's own modules, read by a head on its own device and in its own dtype."""

    def __init__(self, target: PreTrainedModel, device: torch.device, dtype: torch.dtype):
        self._embeddings: Any = target.get_input_embeddings()
        self._head: Any = target.get_output_embeddings()
        self.device, self.dtype = device, dtype

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[..., Ht] embeddings of ids [...] int64, a scale of the family included and a norm left out."""
        if hasattr(self._embeddings, "embed_norm"):
            return self._rows(token_ids)
        embeddings: Tensor = self._embeddings(token_ids.to(self._embeddings.weight.device))
        return embeddings.to(self.device, self.dtype)

    def raw_embedded(self, token_ids: Tensor) -> Tensor:
        """[..., Ht] rows of the embedding table, without the scale that some families apply."""
        return self._rows(token_ids) if hasattr(self._embeddings, "embed_scale") else self.embedded(token_ids)

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] of states [..., Ht] after a final norm."""
        weight = self._head.weight
        logits: Tensor = self._head(states.to(weight.device, weight.dtype))
        return logits.to(self.device, self.dtype)

    def _rows(self, token_ids: Tensor) -> Tensor:
        weight = self._embeddings.weight
        return embedding(token_ids.to(weight.device), weight).to(self.device, self.dtype)
