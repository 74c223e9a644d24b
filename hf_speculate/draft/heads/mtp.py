"""MTP layers: those in a target's checkpoint, run by transformers' own modules, and speculators "mtp" heads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_layers import MtpModel

from hf_speculate.draft.heads.chain import Pairs
from hf_speculate.draft.heads.layer_config import LayerConfig
from hf_speculate.draft.heads.layers import DecoderLayer, RMSNorm, Rotary, Rotation
from hf_speculate.draft.heads.row_cache import Placed, StateStore
from hf_speculate.draft.heads.target_parts import TargetParts
from hf_speculate.draft.heads.vocabulary import DraftVocabulary


class PlacedCache(Cache):
    """A transformers `Cache` for one forward over a `RowCache`."""

    def __init__(self, cache: StateStore, placed: Placed):
        super().__init__(layers=[])
        self._cache, self._placed = cache, placed

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store states [B, H, N, D]; those of all columns that attention reads."""
        return self._cache.write(layer_idx, key_states, value_states, self._placed)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that attention reads: a row's own length is in no Python number."""
        return self._placed.width


class MtpModules(NamedTuple):
    """MTP layers and what they share with the target, under the names of transformers' `MtpModel`."""

    layers: nn.ModuleList  # of transformers' `MtpLayer`
    config: PreTrainedConfig  # its `layer_types` are those of the MTP layers
    embed_tokens: nn.Module
    rotary_emb: nn.Module | None
    use_shared_post_norm: bool = False
    shared_post_norm: nn.Module | None = None
    has_per_layer_rope: bool = False


class CheckpointMtpNetwork(nn.Module):
    """The MTP layers of a target's checkpoint; the next depth and the head read a layer's normalised output."""

    def __init__(self, model: MtpModel | MtpModules, vocab_size: int):
        super().__init__()
        self.layers = model.layers
        self.shared_post_norm = model.shared_post_norm if model.use_shared_post_norm else None
        self.num_depths, self.is_traceable = len(model.layers), False
        self.vocabulary = DraftVocabulary(vocab_size)
        self.windows = tuple(_window_of(model.config, depth) for depth in range(self.num_depths))
        self._shared = (model,)  # in a tuple, so that the target's modules are none of ours

    def project(self, states: Tensor) -> Tensor:
        return states

    def run(self, depth: int, pairs: Pairs, cache: StateStore, parts: TargetParts) -> Tensor:
        model: Any = self._shared[0]
        embeddings = model.embed_tokens(pairs.token_ids)
        rotary = {}
        if getattr(model, "has_per_layer_rope", False):
            rotary["layer_type"] = model.config.layer_types[depth]
        rotation = None
        if model.rotary_emb is not None:
            positions = pairs.positions
            if hasattr(model.rotary_emb, "mrope_section"):  # older versions of transformers want one for each axis
                positions = positions.expand(3, -1, -1)
            rotation = model.rotary_emb(embeddings, position_ids=positions, **rotary)
        states: Tensor = self.layers[depth](
            embeddings,
            pairs.states,
            position_embeddings=rotation,
            attention_mask=pairs.placed.mask(depth),
            position_ids=pairs.positions,
            past_key_values=PlacedCache(cache, pairs.placed),
        )
        return states if self.shared_post_norm is None else self.shared_post_norm(states)

    def read(self, outputs: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        return parts.logits(outputs), outputs


class MtpLayer(nn.Module):
    """A speculators MTP layer: a projection of embedding and state, an ordinary decoder layer, a norm."""

    def __init__(self, config: LayerConfig, has_norms: bool):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        block = DecoderLayer(config, has_norms)
        self.token_layernorm = RMSNorm(width, eps)
        self.hidden_layernorm = RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = RMSNorm(width, eps)
        # in the checkpoint, the decoder layer's parts lie beside the projection
        self.self_attn, self.mlp = block.self_attn, block.mlp
        self.input_layernorm, self.post_attention_layernorm = block.input_layernorm, block.post_attention_layernorm

    def forward(
        self, embeddings: Tensor, states: Tensor, rotation: Rotation, cache: StateStore, placed: Placed
    ) -> Tensor:
        """[B, N, H] of embeddings [B, N, H] and states [B, N, H]."""
        joined = torch.cat([self.token_layernorm(embeddings), self.hidden_layernorm(states)], dim=-1)
        output: Tensor = self.input_proj(joined)
        output = output + self.self_attn(self.input_layernorm(output), rotation, cache, 0, placed)
        output = output + self.mlp(self.post_attention_layernorm(output))
        return self.final_layernorm(output)  # type: ignore[no-any-return]


class SpeculatorsMtpNetwork(nn.Module):
    """The network of a speculators "mtp" head: one layer, applied again to its own output."""

    num_depths, is_traceable = 1, True

    def __init__(self, config: LayerConfig, has_norms: bool, vocab_size: int, rotary: Rotary):
        super().__init__()
        self.layers = nn.ModuleList([MtpLayer(config, has_norms)])
        self.vocabulary, self.windows = DraftVocabulary(vocab_size), config.windows
        self._rotary = rotary

    def project(self, states: Tensor) -> Tensor:
        return states

    def run(self, depth: int, pairs: Pairs, cache: StateStore, parts: TargetParts) -> Tensor:
        embeddings = parts.embedded(pairs.token_ids)
        rotation = self._rotary(pairs.positions, embeddings.dtype)
        return self.layers[0](embeddings, pairs.states, rotation, cache, pairs.placed)  # type: ignore[no-any-return]

    def read(self, outputs: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        return parts.logits(outputs), outputs


def _window_of(config: Any, depth: int) -> int | None:
    """How many tokens an MTP layer attends to; None if all."""
    types = getattr(config, "layer_types", None)
    is_sliding = types is not None and types[depth] == "sliding_attention"
    return int(config.sliding_window) if is_sliding else None
