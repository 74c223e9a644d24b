"""MTP layers: those in a target's checkpoint, run by transformers' own modules, and speculators "mtp" heads."""

import copy
import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_layers import MtpLayer, MtpModel

from hf_speculate.compat import CACHE_NAME, attention_name, set_attention_name
from hf_speculate.draft.heads.chain import ChainNetwork, Pairs
from hf_speculate.draft.heads.folder import text_fields, unserved
from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.layers import DecoderLayer, Rotary, Rotation, read_layer_config, windows_of
from hf_speculate.draft.heads.load_network import ConfigSource, LoadRequest, load_into, load_network
from hf_speculate.draft.heads.network import SHARED_TABLES, HeadNetwork, NetworkPlan, TargetParts
from hf_speculate.draft.heads.row_cache import LayerMask, Placed, PlacedCache
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.models.layer_capture import FINAL_STATE


class CheckpointMtpNetwork(ChainNetwork):
    """The MTP layers of a target's checkpoint; the next depth and the head read a layer's normalised output."""

    is_traceable = False

    def __init__(self, model: MtpModel | SimpleNamespace, vocab_size: int):
        self.num_depths = len(model.layers)
        windows = windows_of(model.config) or (None,) * self.num_depths
        super().__init__(DraftVocabulary(vocab_size), windows)
        self.layer_masks = [LayerMask(windows[depth], first=depth) for depth in range(self.num_depths)]
        self.layers = model.layers
        self.shared_post_norm: Any = getattr(model, "shared_post_norm", None)  # which transformers makes if it is used
        self._shared = (model,)  # in a tuple, so that the target's modules are none of ours

    def run(self, depth: int, pairs: Pairs, parts: TargetParts) -> Tensor:
        model: Any = self._shared[0]
        embeddings = model.embed_tokens(pairs.token_ids)
        has_kinds = getattr(model, "has_per_layer_rope", False)
        rotary = {"layer_type": model.config.layer_types[depth]} if has_kinds else {}
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
            **{CACHE_NAME: PlacedCache(pairs.placed)},
        )
        return states if self.shared_post_norm is None else self.shared_post_norm(states)


class SpeculatorsMtpLayer(DecoderLayer):
    """A decoder layer after a projection of embedding and state, and before a norm."""

    def __init__(self, plan: NetworkPlan):
        super().__init__(plan.options, plan.has_head_norms)
        width, eps = plan.options.hidden_size, plan.options.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(width, eps)
        self.hidden_layernorm = nn.RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = nn.RMSNorm(width, eps)

    def forward(  # type: ignore[override]  # reads embeddings too
        self, embeddings: Tensor, states: Tensor, rotation: Rotation, placed: Placed
    ) -> Tensor:
        joined = torch.cat([self.token_layernorm(embeddings), self.hidden_layernorm(states)], dim=-1)  # [B, N, 2H]
        return self.final_layernorm(super().forward(self.input_proj(joined), rotation, placed, 0))  # type: ignore[no-any-return]


class SpeculatorsMtpNetwork(ChainNetwork):
    """The network of a speculators "mtp" head: one layer, applied again to its own output."""

    def __init__(self, plan: NetworkPlan):
        super().__init__(plan.vocabulary, windows_of(plan.options))
        self.layers = nn.ModuleList([SpeculatorsMtpLayer(plan)])
        self.rotary = Rotary(plan.options, plan.device)

    def run(self, depth: int, pairs: Pairs, parts: TargetParts) -> Tensor:
        embeddings = parts.embedded(pairs.token_ids)
        rotation = self.rotary(pairs.positions, embeddings.dtype)
        return self.layers[0](embeddings, pairs.states, rotation, pairs.placed)  # type: ignore[no-any-return]


# Families whose MTP layers lie under "mtp." in the checkpoint, where transformers ignores them. These are attention
# layers of the target's own class, which share the input projection and all norms.
_PREFIXED_TARGETS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
SERVED_TARGETS = ("deepseek_v3", "glm4_moe", *_PREFIXED_TARGETS)
_DENSE_LAYERS = ("llama", "mistral", "qwen2", "qwen3")
_MASKED_ATTENTIONS = ("eager", "sdpa")  # implementations that take our additive masks
_PREFIX = "mtp."
# Name in the checkpoint -> in each of transformers' layers.
_SHARED = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "post_norm.weight",
}
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def read_mtp(source: ConfigSource) -> tuple[HeadSpec, Qwen3Config | None]:
    """The MTP layers that the config of a speculators head or of a target describes."""
    source.check_no_layers("MTP layers, which read the last state")
    fields = source.layer_fields
    if source.found.format == "speculators":
        if fields.get("model_type") not in _DENSE_LAYERS:
            raise unserved(f"an MTP layer of {fields.get('model_type')!r}", f"a layer of {', '.join(_DENSE_LAYERS)}")
        return source.spec(fields, (FINAL_STATE,)), read_layer_config({**fields, "num_hidden_layers": 1})
    model_type, text = fields.get("model_type"), text_fields(fields)
    if model_type not in SERVED_TARGETS:
        raise unserved(f"MTP layers of {model_type!r}", f"MTP layers of {' or '.join(SERVED_TARGETS)}")
    num_layers = int(text["num_hidden_layers"])
    return source.spec(text, (FINAL_STATE,), num_target_layers=num_layers, max_position_embeddings=None), None


def load_mtp(request: LoadRequest) -> HeadNetwork:
    """MTP layers in either format."""
    if request.options is not None:
        return load_network(SpeculatorsMtpNetwork, request, ignored=SHARED_TABLES)
    target = request.target
    if request.dtype != target.dtype or request.device != target.device:
        raise ConfigError(
            f"dtype and device must be the target's for MTP layers of its checkpoint, {target.dtype} and "
            f"{target.device}, got {request.dtype} and {request.device}; leave both out"
        )
    is_prefixed = request.folder.config.get("model_type") in _PREFIXED_TARGETS
    model = _load_prefixed(request) if is_prefixed else _load_by_transformers(request)
    if attention_name(model.config) not in _MASKED_ATTENTIONS:
        set_attention_name(model.config, "sdpa")  # its own copy
    return CheckpointMtpNetwork(model, vocab_size_of(target))


def _load_by_transformers(request: LoadRequest) -> MtpModel:
    twin, config = copy.copy(request.target), copy.copy(request.target.config)  # the target stays as it is
    twin.config, config.name_or_path = config, request.folder.source
    try:
        return MtpModel.from_pretrained(twin, device_map={"": request.device})
    except (OSError, RuntimeError, ValueError) as error:  # transformers' words for weights that are not there
        raise UnsupportedModelError(
            f"{request.folder.source} must hold the weights of the target's MTP layers, got none that load; use "
            f"another head ({error})"
        ) from error


def _load_prefixed(request: LoadRequest) -> SimpleNamespace:
    """The layers, with the target's embeddings and rotary embedding, under the names of transformers' `MtpModel`."""
    weights = {name.removeprefix(_PREFIX): weight for name, weight in request.folder.weights(_PREFIX).items()}
    num_layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    if not num_layers:
        raise UnsupportedModelError(
            f"{request.folder.source} must hold the weights of the target's MTP layers, got no {_PREFIX}layers; use "
            "another head"
        )
    decoder = request.target.get_decoder()
    config = copy.deepcopy(request.target.config.get_text_config(decoder=True))
    config.layer_types, config.num_hidden_layers = ["full_attention"] * num_layers, num_layers
    kinds = type(decoder.layers[0]), type(decoder.norm)
    with torch.device("meta"):
        layers = nn.ModuleList([MtpLayer(config, *kinds, index) for index in range(num_layers)])
    load_into(layers, _by_layer(_fused(weights), num_layers), request)
    shared = {"embed_tokens": request.target.get_input_embeddings(), "rotary_emb": decoder.rotary_emb}
    return SimpleNamespace(layers=layers, config=config, **shared)


def _by_layer(weights: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Under the names of the modules; every layer has the shared weights."""
    named: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name in _SHARED:
            named |= {f"{index}.{_SHARED[name]}": weight for index in range(num_layers)}
        else:
            _, index, rest = name.split(".", 2) if name.startswith("layers.") else ("", "0", name)
            named[f"{index}.mtp_block.{rest}"] = weight
    return named


def _fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of single experts stacked as in transformers' modules; others as they are."""
    experts: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    fused = {}
    for name, weight in weights.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            fused[name] = weight
        else:
            experts[match[1], match[3]][int(match[2])] = weight
    stacked = {key: torch.stack([parts[number] for number in sorted(parts)]) for key, parts in experts.items()}
    for name in {name for name, _ in stacked}:
        fused[f"{name}.gate_up_proj"] = torch.cat([stacked[name, "gate"], stacked[name, "up"]], dim=1)
        fused[f"{name}.down_proj"] = stacked[name, "down"]
    return fused
