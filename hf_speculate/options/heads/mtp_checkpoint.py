"""MTP layers from a target's checkpoint, run by transformers' own modules.

Some families store these layers after the target's layers, as `model.layers.{L + i}`. In other
families, they are under `mtp.`: attention layers of the target's class that share the input
projection and all norms. transformers ignores them.
"""

import copy
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import MtpLayer

from hf_speculate.compat import CACHE_NAME, attention_name, set_attention_name
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.options.heads.chain import ChainNetwork, Pairs
from hf_speculate.options.heads.layers import windows_of
from hf_speculate.options.heads.load_network import LoadRequest, load_into, naming
from hf_speculate.options.heads.network import TargetParts
from hf_speculate.options.heads.recognise import num_mtp_layers
from hf_speculate.options.heads.row_cache import LayerMask, TransformersCache

_NUMBERED_TARGETS = ("deepseek_v3", "glm4_moe")
_PREFIXED_TARGETS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
SERVED_TARGETS = (*_NUMBERED_TARGETS, *_PREFIXED_TARGETS)
_MASKED_ATTENTIONS = ("eager", "sdpa")  # implementations for our additive masks
_PREFIX = "mtp."
# Name in the checkpoint -> name in transformers' layers, for shared weights and then for the
# weights of a numbered layer.
_SHARED = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "post_norm.weight",
}
_OWN = {name: name for name in ("eh_proj.weight", "enorm.weight", "hnorm.weight")}
_OWN["shared_head.norm.weight"] = "post_norm.weight"
# copies of shared weights in a numbered layer
_OF_TARGET = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
_NUMBERED = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class CheckpointMtpNetwork(ChainNetwork):
    """The MTP layers of a target's checkpoint.

    The next depth and the language modelling head read a layer's normalised output.
    """

    is_traceable = False
    reads_axes = True  # the rotary embedding is the target's

    def __init__(self, layers: nn.ModuleList, config: PreTrainedConfig, vocab_size: int):
        self.num_depths = len(layers)
        windows = windows_of(config) or (None,) * self.num_depths
        super().__init__(DraftVocabulary(vocab_size), windows)
        self.layer_masks = [
            LayerMask(windows[depth], first=depth) for depth in range(self.num_depths)
        ]
        self.layers = layers

    def run(self, depth: int, pairs: Pairs, parts: TargetParts) -> Tensor:
        embeddings = pairs.embedded(parts.embedded(pairs.token_ids))
        return self.layers[depth](  # type: ignore[no-any-return]
            embeddings,
            pairs.states,
            position_embeddings=parts.rotation(embeddings, pairs.positions),
            attention_mask=pairs.view.mask(depth),
            position_ids=pairs.positions if pairs.positions.ndim == 2 else pairs.positions[0],
            **{CACHE_NAME: TransformersCache(pairs.view)},
        )


def load_checkpoint_mtp(request: LoadRequest) -> CheckpointMtpNetwork:
    """Load the MTP layers from the checkpoint in a folder."""
    file, num_layers = request.folder.weights_file, num_mtp_layers(request.folder.config)
    is_prefixed = request.folder.config.get("model_type") in _PREFIXED_TARGETS
    with naming(file, "the weights of the target's MTP layers"):
        stored = _fused(_prefixed_weights(request) if is_prefixed else _numbered_weights(request))
        indices = sorted({int(name.partition(".")[0]) for name in stored})
    if not stored:
        raise UnsupportedModelError(
            f"{file} must hold the weights of the target's MTP layers, got none; use another head, "
            "or the checkpoint "
            "as it was published"
        )
    if indices != list(range(num_layers)):
        raise ConfigError(
            f"{file} must hold the {num_layers} MTP layers that config.json names, got the layers "
            f"{indices}; check "
            "that both belong together, and download or save them again"
        )
    config = _layer_config(request, num_layers, is_prefixed)
    decoder = request.target.get_decoder()
    layer_class, norm_class = type(decoder.layers[-1]), type(decoder.norm)
    with torch.device("meta"):
        layers = nn.ModuleList(
            [MtpLayer(config, layer_class, norm_class, depth) for depth in range(num_layers)]
        )
    load_into(layers, stored, request)
    return CheckpointMtpNetwork(layers, config, request.spec.vocab_size)


def _layer_config(request: LoadRequest, num_layers: int, is_prefixed: bool) -> PreTrainedConfig:
    """Return a copy of the target's config for its MTP layers."""
    config: Any = copy.deepcopy(request.target.config.get_text_config(decoder=True))
    if is_prefixed:
        config.layer_types, config.num_hidden_layers = ["full_attention"] * num_layers, num_layers
    else:
        config.num_mtp_layers = num_layers
        config = config.get_mtp_config()
    if attention_name(config) not in _MASKED_ATTENTIONS:
        set_attention_name(config, "sdpa")
    return config  # type: ignore[no-any-return]


def _numbered_weights(request: LoadRequest) -> dict[str, Tensor]:
    """Read the weights after the target's layers, keyed by depth and name in transformers."""
    num_before = request.spec.num_target_layers or 0
    weights = {}
    for name, weight in request.folder.weights(lambda name: _number(name) >= num_before).items():
        layer_name = name.split(".", 3)[3]
        if layer_name not in _OF_TARGET:
            weights[
                f"{_number(name) - num_before}.{_OWN.get(layer_name, f'mtp_block.{layer_name}')}"
            ] = weight
    return weights


def _number(name: str) -> int:
    """Return the layer number in a weight's name; -1 if it has none."""
    match = _NUMBERED.fullmatch(name)
    return -1 if match is None else int(match[1])


def _prefixed_weights(request: LoadRequest) -> dict[str, Tensor]:
    """Read the weights under `mtp.`, keyed by depth and name in transformers.

    Every layer gets the shared weights.
    """
    stored = request.folder.weights(lambda name: name.startswith(_PREFIX)).items()
    weights, shared = {}, {}
    for name, weight in ((name.removeprefix(_PREFIX), weight) for name, weight in stored):
        if name in _SHARED:
            shared[_SHARED[name]] = weight
        else:
            _, depth, layer_name = (
                name.split(".", 2) if name.startswith("layers.") else ("", "0", name)
            )
            weights[f"{depth}.mtp_block.{layer_name}"] = weight
    depths = {name.partition(".")[0] for name in weights}
    return weights | {
        f"{depth}.{name}": weight for depth in depths for name, weight in shared.items()
    }


def _fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the weights of single experts as in transformers' modules; copy all other weights."""
    experts: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    fused = {}
    for name, weight in weights.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            fused[name] = weight
        else:
            experts[match[1], match[3]][int(match[2])] = weight
    stacked = {
        key: torch.stack([by_number[number] for number in sorted(by_number)])
        for key, by_number in experts.items()
    }
    for name in {name for name, _ in stacked}:
        fused[f"{name}.gate_up_proj"] = torch.cat(
            [stacked[name, "gate"], stacked[name, "up"]], dim=1
        )
        fused[f"{name}.down_proj"] = stacked[name, "down"]
    return fused
