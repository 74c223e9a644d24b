"""EAGLE-3, EAGLE-3.1 and P-EAGLE heads: a layer that reads embeddings beside fused states of three target layers.

They are read in the original and the speculators format.

Source:
    EAGLE-3: Li et al. (arXiv:2503.01840).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_speculate.draft.heads.chain import ChainDrafter, Pairs
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.layers import DecoderLayer, LayerConfig, RMSNorm, Rotary, Rotation, read_layer_config
from hf_speculate.draft.heads.load_network import ConfigSource, HeadConfig, LoadRequest, load_network, shapes_of
from hf_speculate.draft.heads.parallel import ParallelDrafter, SlotInputs
from hf_speculate.draft.heads.row_cache import Placed, StateStore
from hf_speculate.draft.heads.target_parts import TargetParts
from hf_speculate.draft.heads.vocabulary import DraftVocabulary
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.models.layer_capture import FINAL_STATE

_TABLE, _HEAD = "embed_tokens.weight", "lm_head.weight"
_QUERY_NORM = "layers.0.self_attn.q_norm.weight"


@dataclass(frozen=True)
class Eagle3Options:
    """How a head's forward differs from the plain one."""

    num_states: int = 3  # A, target states that are concatenated for each token
    # whether the states are those of inner layers, which `fc` fuses; otherwise the head reads the target's last state
    # as it is
    reads_aux: bool = True
    norm_before_residual: bool = False  # whether the residual stream begins with the normalised state
    norm_before_fc: bool = False  # whether the concatenated states are normalised together before `fc`
    fc_norm: bool = False  # whether they are normalised one by one before `fc`
    norm_output: bool = False  # whether the next pair gets the state after the final norm (EAGLE-3.1)
    logit_scale: float = 1.0  # factor on the logits
    mask_token_id: int | None = None  # of P-EAGLE's slots; None for other heads


class FirstLayer(DecoderLayer):
    """The layer that joins embeddings with states: its attention reads both, its residual stream the states."""

    def __init__(self, config: LayerConfig, has_norms: bool, norm_before_residual: bool):
        super().__init__(config, has_norms, 2 * config.hidden_size)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(  # type: ignore[override]  # reads embeddings too
        self, embeddings: Tensor, states: Tensor, rotation: Rotation, cache: StateStore, layer: int, placed: Placed
    ) -> Tensor:
        """[B, N, H] of embeddings [B, N, H] and states [B, N, H]."""
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        joined = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)  # [B, N, 2H]
        residual = residual + self.self_attn(joined, rotation, cache, layer, placed)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class Eagle3Network(nn.Module):
    """A `ChainNetwork` of one depth, and a `SlotNetwork` for P-EAGLE; the weights' names say what it has of its own."""

    num_depths, is_traceable = 1, True

    def __init__(
        self,
        config: LayerConfig,
        options: Eagle3Options,
        shapes: Mapping[str, Sequence[int]],
        target_hidden_size: int,
        vocabulary: DraftVocabulary,
        rotary: Rotary,
    ):
        super().__init__()
        self.options, self.vocabulary, self.windows = options, vocabulary, config.windows
        width, eps = config.hidden_size, config.rms_norm_eps
        joined = options.num_states * target_hidden_size
        self.fc = nn.Linear(joined, width, bias=False) if options.reads_aux else None
        self.input_norm = RMSNorm(joined, eps) if options.norm_before_fc else None
        norms = [RMSNorm(target_hidden_size, eps) for _ in range(options.num_states)] if options.fc_norm else None
        self.fc_norm = None if norms is None else nn.ModuleList(norms)
        has_norms = _QUERY_NORM in shapes
        first = FirstLayer(config, has_norms, options.norm_before_residual)
        others = [DecoderLayer(config, has_norms) for _ in range(1, config.num_layers)]
        self.layers = nn.ModuleList([first, *others])
        self.norm = RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(shapes[_TABLE][0], width) if _TABLE in shapes else None
        self.lm_head = nn.Linear(width, shapes[_HEAD][0], bias=False) if _HEAD in shapes else None
        is_parallel = options.mask_token_id is not None
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, joined, device="meta")) if is_parallel else None
        self._rotary = rotary

    def project(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(self.options.num_states, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return states if self.fc is None else self.fc(states)

    def run(self, depth: int, pairs: Pairs, cache: StateStore, parts: TargetParts) -> Tensor:
        if self.embed_tokens is None:
            embeddings = parts.raw_embedded(pairs.token_ids)
        else:
            embeddings = self.embed_tokens(pairs.token_ids)
        rotation = self._rotary(pairs.positions, embeddings.dtype)
        outputs: Tensor = self.layers[0](embeddings, pairs.states, rotation, cache, 0, pairs.placed)
        for index, layer in enumerate(list(self.layers)[1:], start=1):
            outputs = layer(outputs, rotation, cache, index, pairs.placed)
        return outputs

    def read(self, outputs: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        normed = self.norm(outputs)
        return self._scored(normed, parts), normed if self.options.norm_output else outputs

    def fill(self, inputs: SlotInputs, cache: StateStore, parts: TargetParts) -> Tensor:
        """See `SlotNetwork.fill`: a slot joins the mask token with the learnt state `mask_hidden`."""
        token_ids = inputs.token_ids.masked_fill(inputs.is_slot, self.options.mask_token_id or 0)
        given, empty = inputs.states, self.mask_hidden
        if given is None or empty is None:
            raise ShapeError("slots must have states to stand beside, got none; hand the target's states over")
        states = torch.where(inputs.is_slot[:, :, None], self.project(empty), given)
        return self.run(0, Pairs(token_ids, states, inputs.placed.columns, inputs.placed), cache, parts)

    def logits(self, outputs: Tensor, parts: TargetParts) -> Tensor:
        return self._scored(self.norm(outputs), parts)

    def _scored(self, normed: Tensor, parts: TargetParts) -> Tensor:
        logits: Tensor = parts.logits(normed) if self.lm_head is None else self.lm_head(normed)
        return logits if self.options.logit_scale == 1.0 else logits * self.options.logit_scale


def read_eagle3(source: ConfigSource) -> HeadConfig[Eagle3Options]:
    """The EAGLE-3 or P-EAGLE head that a config describes."""
    config, found = source.config, source.found
    if found.kind == "peagle" and config.get("mask_token_id") is None:
        raise ConfigError("mask_token_id must be set for a P-EAGLE head, got none; add it to its config.json")
    eagle: dict[str, Any] = config.get("eagle_config") or {}
    reads_aux = bool(eagle.get("use_aux_hidden_state", True))
    ids = source.hidden_layers or _layer_ids(config, eagle, source.shape.num_layers)
    options = Eagle3Options(
        num_states=len(ids) if reads_aux else 1,
        reads_aux=reads_aux,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=_flag(config, eagle, "norm_before_fc"),
        fc_norm=_flag(config, eagle, "fc_norm"),
        norm_output=_flag(config, eagle, "norm_output"),
        logit_scale=float(config.get("logit_scale") or 1.0),
        mask_token_id=int(config["mask_token_id"]) if found.kind == "peagle" else None,
    )
    if options.norm_before_fc and options.fc_norm:
        raise ConfigError(
            f"norm_before_fc and fc_norm must not both be set, got both in {source.name}; keep the one that the "
            "head was trained with"
        )
    notes = []
    if options.norm_output and found.format == "original" and not (options.fc_norm or options.norm_before_fc):
        notes.append(
            "it sets norm_output without fc_norm, as some trainers wrote for heads that do not feed back the "
            "normalised state; if the acceptance rate is low, set norm_output to false in its config.json"
        )
    layers, ids = read_layer_config(source.layer_fields), ids if reads_aux else (FINAL_STATE,)
    spec = source.spec(source.layer_fields, ids, notes=tuple(notes))
    return HeadConfig(spec, layers, options)


def _layer_ids(config: dict[str, Any], eagle: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Ids of target states as inputs of layers.

    At the top level they are that already. Nested in `eagle_config` they name layers by their outputs if the first id
    is 1, and by their inputs otherwise: trainers differ, and this rule is right for the heads that are published.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if config.get(name):
        return tuple(int(layer) for layer in config[name])
    if eagle.get(name):
        ids = [int(layer) for layer in eagle[name]]
        return tuple(layer + 1 for layer in ids) if ids[0] == 1 else tuple(ids)
    return (2, num_layers // 2, num_layers - 3)


def _flag(config: dict[str, Any], eagle: dict[str, Any], name: str) -> bool:
    return bool(config.get(name, eagle.get(name, False)))


def load_eagle3(request: LoadRequest) -> DraftHead:
    """An EAGLE-3, EAGLE-3.1 or P-EAGLE head."""
    spec, layers, options = read_eagle3(request.source)
    shapes = shapes_of(request.folder)
    options = replace(
        options,
        fc_norm=options.fc_norm or "fc_norm.0.weight" in shapes,
        norm_before_fc=options.norm_before_fc or "input_norm.weight" in shapes,
    )
    network = load_network(request, Eagle3Network, HeadConfig(spec, layers, options))
    drafter = ChainDrafter if options.mask_token_id is None else ParallelDrafter
    return request.head(spec, network, drafter)
