"""EAGLE-3, EAGLE-3.1 and P-EAGLE heads: one layer over embeddings and fused target states.

Source:
    EAGLE-3: Li et al. (arXiv:2503.01840).
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from hf_speculate.errors import ConfigError
from hf_speculate.options.heads.chain import ChainNetwork, Pairs
from hf_speculate.options.heads.head import HeadSpec
from hf_speculate.options.heads.layer_capture import FINAL_STATE
from hf_speculate.options.heads.layers import DecoderLayer, Rotation, read_layer_config
from hf_speculate.options.heads.load_network import ConfigSource
from hf_speculate.options.heads.network import FusingNetwork, NetworkPlan, TargetParts
from hf_speculate.options.heads.parallel import SlotInputs, SlotNetwork
from hf_speculate.options.heads.row_cache import CacheView


@dataclass(frozen=True)
class Eagle3Options:
    """Options of an EAGLE-3 or P-EAGLE network."""

    layers: Qwen3Config
    num_states: int = 3  # A, number of target states concatenated for each token
    reads_aux: bool = True  # whether `fc` fuses states of inner layers; else only the last is read
    norm_before_residual: bool = False  # whether the residual stream starts with normalised states
    norm_before_fc: bool = False  # whether the concatenated states are normalised before `fc`
    fc_norm: bool = False  # whether each state is normalised separately before `fc`
    norm_output: bool = False  # whether the next pair reads the normed output (EAGLE-3.1)
    logit_scale: float = 1.0  # factor on the logits
    mask_token_id: int | None = None  # the token in P-EAGLE's slots; None for other heads


class FirstLayer(DecoderLayer):
    """The first layer of an EAGLE-3 head.

    Its attention reads embeddings and states; its residual stream starts from the states.
    """

    def __init__(self, config: Qwen3Config, has_norms: bool, norm_before_residual: bool):
        super().__init__(config, has_norms, 2 * config.hidden_size)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(  # type: ignore[override]  # reads embeddings too
        self, embeddings: Tensor, states: Tensor, rotation: Rotation, view: CacheView
    ) -> Tensor:
        normed = self.hidden_norm(states)
        joined = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)  # [B, N, 2H]
        residual = normed if self.norm_before_residual else states
        return self.finish(residual, self.self_attn(joined, rotation, view, 0))


class Eagle3Network(FusingNetwork, ChainNetwork, SlotNetwork):
    """The network of an EAGLE-3 or P-EAGLE head.

    EAGLE-3 drafts a chain, P-EAGLE fills slots.
    """

    layers: Any  # an `nn.ModuleList`

    def __init__(self, plan: NetworkPlan):
        super().__init__(plan)
        options: Eagle3Options = plan.options
        layers, has_norms = options.layers, plan.has_head_norms
        joined, eps = options.num_states * plan.target_hidden_size, layers.rms_norm_eps
        self.fc = nn.Linear(joined, layers.hidden_size, bias=False) if options.reads_aux else None
        has_input_norm = options.norm_before_fc or "input_norm.weight" in plan.shapes
        self.input_norm = nn.RMSNorm(joined, eps) if has_input_norm else None
        has_fc_norm = options.fc_norm or "fc_norm.0.weight" in plan.shapes
        norms = [
            nn.RMSNorm(plan.target_hidden_size, eps)
            for _ in range(options.num_states if has_fc_norm else 0)
        ]
        self.fc_norm = nn.ModuleList(norms)
        first = FirstLayer(layers, has_norms, options.norm_before_residual)
        others = [DecoderLayer(layers, has_norms) for _ in range(1, layers.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *others])
        is_parallel = options.mask_token_id is not None
        self.mask_hidden = (
            nn.Parameter(torch.empty(1, 1, joined, device="meta")) if is_parallel else None
        )
        self.reads_axes = self.rotary.has_axes
        self.mask_token_id, self.feeds_normed = options.mask_token_id or 0, options.norm_output

    @property
    def least_vocab_size(self) -> int:
        has_slots = self.mask_hidden is not None and self.embed_tokens is None
        return self.mask_token_id + 1 if has_slots else 0

    def project(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return states if self.fc is None else self.fc(states)

    def run(self, depth: int, pairs: Pairs, parts: TargetParts) -> Tensor:
        if self.embed_tokens is None:
            embeddings = parts.embedded(pairs.token_ids, is_scaled=False)
        else:
            embeddings = self.embed_tokens(
                parts.known(pairs.token_ids, self.embed_tokens.num_embeddings)
            )
        embeddings = pairs.embedded(embeddings)
        rotation = self.rotary(pairs.positions, embeddings.dtype)
        outputs: Tensor = self.layers[0](embeddings, pairs.states, rotation, pairs.view)
        for index, layer in enumerate(list(self.layers)[1:], start=1):
            outputs = layer(outputs, rotation, pairs.view, index)
        return outputs

    def read(self, outputs: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        normed = self.norm(outputs)
        return self.logits(normed, parts), normed if self.feeds_normed else outputs

    def fill(self, inputs: SlotInputs, parts: TargetParts) -> Tensor:
        """Fill slots, each of which joins the mask token with the learnt state `mask_hidden`."""
        token_ids = inputs.token_ids.masked_fill(inputs.is_slot, self.mask_token_id)
        # a P-EAGLE head has both
        empty, states = cast(Tensor, self.mask_hidden), cast(Tensor, inputs.states)
        states = torch.where(inputs.is_slot[:, :, None], self.project(empty), states)
        outputs = self.run(0, Pairs(token_ids, states, inputs.view.columns, inputs.view), parts)
        return self.norm(outputs)  # type: ignore[no-any-return]


def read_eagle3(source: ConfigSource) -> tuple[HeadSpec, Eagle3Options]:
    """Read the spec and options of an EAGLE-3 or P-EAGLE head from its config."""
    config, head = source.config, source.recognised
    if head.kind == "peagle" and config.get("mask_token_id") is None:
        raise ConfigError(
            "mask_token_id must be set for a P-EAGLE head, got none; add it to its config.json"
        )
    eagle: dict[str, Any] = config.get("eagle_config") or {}
    flags = eagle | config
    reads_aux = bool(eagle.get("use_aux_hidden_state", True))
    ids = source.hidden_layers or _layer_ids(config, eagle, source.shape.num_layers)
    options = Eagle3Options(
        layers=read_layer_config(source.layer_fields),
        num_states=len(ids) if reads_aux else 1,
        reads_aux=reads_aux,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(flags.get("norm_before_fc")),
        fc_norm=bool(flags.get("fc_norm")),
        norm_output=bool(flags.get("norm_output")),
        logit_scale=float(config.get("logit_scale") or 1.0),
        mask_token_id=int(config["mask_token_id"]) if head.kind == "peagle" else None,
    )
    if options.norm_before_fc and options.fc_norm:
        raise ConfigError(
            f"norm_before_fc and fc_norm must not both be set, got both in {source.name}; keep the "
            "one that the "
            "head was trained with"
        )
    notes = []
    if (
        options.norm_output
        and head.format == "original"
        and not (options.fc_norm or options.norm_before_fc)
    ):
        notes.append(
            "it sets norm_output without fc_norm, as some trainers wrote for heads that do not "
            "feed back the "
            "normalised state; if the acceptance rate is low, set norm_output to false in its "
            "config.json"
        )
    spec = source.spec(
        source.layer_fields, ids if reads_aux else (FINAL_STATE,), notes=tuple(notes)
    )
    return spec, options


def _layer_ids(config: dict[str, Any], eagle: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the ids of the target states, counted as inputs of layers."""
    name = "eagle_aux_hidden_state_layer_ids"
    if config.get(name):
        return tuple(int(layer) for layer in config[name])
    if eagle.get(name):  # counted as outputs of layers if the first id is 1, as in published heads
        ids = [int(layer) for layer in eagle[name]]
        return tuple(layer + 1 for layer in ids) if ids[0] == 1 else tuple(ids)
    return (2, num_layers // 2, num_layers - 3)
