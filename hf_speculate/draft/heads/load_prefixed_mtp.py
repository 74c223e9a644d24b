"""Loads MTP layers under "mtp." in a target's checkpoint (Qwen3.5, Qwen3-Next), which transformers ignores.

The layers are attention layers of the target's own class. Their inputs are projections of the normalised embedding and
the normalised state, concatenated in this order; the projection and all norms are shared by the layers.
"""

import copy
import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import MtpLayer

from hf_speculate.compat import attention_name, set_attention_name
from hf_speculate.draft.heads.kinds import check_weight_names
from hf_speculate.draft.heads.load_request import LoadRequest
from hf_speculate.draft.heads.mtp import MtpModules
from hf_speculate.draft.heads.weights import load_into
from hf_speculate.errors import UnsupportedModelError

MASKED_ATTENTIONS = ("eager", "sdpa")  # implementations that take our additive masks
_PREFIX = "mtp."
# Name in the checkpoint -> in each of transformers' layers.
_SHARED = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "post_norm.weight",
}
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load_prefixed_mtp(request: LoadRequest) -> MtpModules:
    """The layers, with the target's embeddings and rotary embedding.

    Args:
        request: what is to be loaded.

    Raises:
        UnsupportedModelError: the checkpoint has no such layers, or weights do not fit.
    """
    found = request.folder.weights_under(_PREFIX)
    check_weight_names(found)
    weights = {name.removeprefix(_PREFIX): weight for name, weight in found.items()}
    num_layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    if not num_layers:
        raise UnsupportedModelError(
            f"{request.folder.source} must hold the weights of the target's MTP layers, got no {_PREFIX}layers; use "
            "another head"
        )
    decoder = request.target.get_decoder()
    config = _layers_config(request.target.config.get_text_config(decoder=True), num_layers)
    kinds = type(decoder.layers[0]), type(decoder.norm)
    with torch.device("meta"):
        layers = nn.ModuleList([MtpLayer(config, *kinds, index) for index in range(num_layers)])
    load_into(layers, _by_layer(_fused(weights), num_layers), request.folder.source, request.device, request.dtype)
    return MtpModules(layers, config, request.target.get_input_embeddings(), decoder.rotary_emb)


def _layers_config(target_config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of the target's config for layers that are all attention layers."""
    config = copy.deepcopy(target_config)
    config.layer_types = ["full_attention"] * num_layers
    config.num_hidden_layers = num_layers
    if attention_name(config) not in MASKED_ATTENTIONS:
        set_attention_name(config, "sdpa")
    return config


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
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    fused = {}
    for name, weight in weights.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            fused[name] = weight
        else:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = weight
    for name, by_number in experts.items():
        parts = [by_number[number] for number in sorted(by_number)]
        fused[f"{name}.gate_up_proj"] = torch.stack([torch.cat([part["gate"], part["up"]]) for part in parts])
        fused[f"{name}.down_proj"] = torch.stack([part["down"] for part in parts])
    return fused
