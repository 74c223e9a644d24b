"""Base classes of the networks of draft heads, whose modules have the checkpoints' names."""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from hf_speculate.draft.heads.layers import Rotary, windows_of
from hf_speculate.draft.heads.row_cache import LayerMask
from hf_speculate.draft.vocab_mapping import DraftVocabulary

SHARED_TABLES = _TABLE, _HEAD = "embed_tokens.weight", "lm_head.weight"


class TargetParts:
    """The target's own modules, read by a head on its own device and in its own dtype."""

    def __init__(self, target: PreTrainedModel, device: torch.device, dtype: torch.dtype):
        self._embeddings: Any = target.get_input_embeddings()
        self._head: Any = target.get_output_embeddings()
        self.device, self.dtype = device, dtype

    def embedded(self, token_ids: Tensor, is_scaled: bool = True) -> Tensor:
        """[..., Ht] embeddings of ids [...] int64, without a norm, and with a scale of the family if `is_scaled`."""
        weight = self._embeddings.weight
        token_ids = token_ids.to(weight.device)
        left_out = ("embed_norm",) if is_scaled else ("embed_norm", "embed_scale")
        is_bare = any(hasattr(self._embeddings, name) for name in left_out)
        rows: Tensor = embedding(token_ids, weight) if is_bare else self._embeddings(token_ids)
        return rows.to(self.device, self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] of states [..., Ht] after a final norm."""
        weight = self._head.weight
        logits: Tensor = self._head(states.to(weight.device, weight.dtype))
        return logits.to(self.device, self.dtype)


class HeadNetwork(nn.Module, ABC):
    """What a `HeadDrafter` drafts with."""

    def __init__(self, vocabulary: DraftVocabulary, windows: Sequence[int | None]):
        super().__init__()
        self.vocabulary = vocabulary
        self.layer_masks = [LayerMask(window) for window in windows]  # by layer that writes to the cache

    def project(self, states: Tensor) -> Tensor:
        """[B, N, H] of the target's concatenated states [B, N, A * Ht]."""
        return states

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        """[..., Vd] of states [..., H] after the final norm."""
        return parts.logits(normed)


class NetworkPlan(NamedTuple):
    """What a network is built from."""

    options: Any  # of the kind of head
    shapes: Mapping[str, Sequence[int]]  # of the checkpoint's weights by name, which say what it has of its own
    target_hidden_size: int  # Ht
    vocabulary: DraftVocabulary
    device: torch.device

    @property
    def has_head_norms(self) -> bool:
        return "layers.0.self_attn.q_norm.weight" in self.shapes


class FusingNetwork(HeadNetwork):
    """A network that fuses several states of the target; tables that its checkpoint lacks are the target's."""

    def __init__(self, plan: NetworkPlan):
        layers, shapes = plan.options.layers, plan.shapes
        width = layers.hidden_size
        super().__init__(plan.vocabulary, windows_of(layers))
        self.rotary = Rotary(layers, plan.device)
        self.norm = nn.RMSNorm(width, layers.rms_norm_eps)
        self.embed_tokens = nn.Embedding(shapes[_TABLE][0], width) if _TABLE in shapes else None
        self.lm_head = nn.Linear(width, shapes[_HEAD][0], bias=False) if _HEAD in shapes else None
        self.logit_scale: float = plan.options.logit_scale

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        logits: Tensor = parts.logits(normed) if self.lm_head is None else self.lm_head(normed)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale
