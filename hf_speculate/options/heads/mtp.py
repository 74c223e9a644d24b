"""MTP layers in both formats: speculators "mtp" heads and layers in a target's checkpoint."""

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from hf_speculate.options.heads.chain import ChainNetwork, Pairs
from hf_speculate.options.heads.head import HeadSpec
from hf_speculate.options.heads.layer_capture import FINAL_STATE
from hf_speculate.options.heads.layers import (
    DecoderLayer,
    Rotary,
    Rotation,
    read_layer_config,
    windows_of,
)
from hf_speculate.options.heads.load_network import ConfigSource, LoadRequest, load_network
from hf_speculate.options.heads.mtp_checkpoint import SERVED_TARGETS, load_checkpoint_mtp
from hf_speculate.options.heads.network import SHARED_TABLES, HeadNetwork, NetworkPlan, TargetParts
from hf_speculate.options.heads.recognise import text_fields
from hf_speculate.options.heads.row_cache import CacheView
from hf_speculate.options.heads.served import unserved

_DENSE_LAYERS = ("llama", "mistral", "qwen2", "qwen3")


class SpeculatorsMtpLayer(DecoderLayer):
    """A decoder layer of a speculators "mtp" head.

    A projection of embedding and state comes before it, a norm after it.
    """

    def __init__(self, plan: NetworkPlan):
        super().__init__(plan.options, plan.has_head_norms)
        width, eps = plan.options.hidden_size, plan.options.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(width, eps)
        self.hidden_layernorm = nn.RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = nn.RMSNorm(width, eps)

    def forward(  # type: ignore[override]  # reads embeddings too
        self, embeddings: Tensor, states: Tensor, rotation: Rotation, view: CacheView
    ) -> Tensor:
        # [B, N, 2H]
        joined = torch.cat(
            [self.token_layernorm(embeddings), self.hidden_layernorm(states)], dim=-1
        )
        output = super().forward(self.input_proj(joined), rotation, view, 0)
        return self.final_layernorm(output)  # type: ignore[no-any-return]


class SpeculatorsMtpNetwork(ChainNetwork):
    """The network of a speculators "mtp" head.

    It applies a single layer repeatedly to its own output.
    """

    def __init__(self, plan: NetworkPlan):
        super().__init__(plan.vocabulary, windows_of(plan.options))
        self.layers = nn.ModuleList([SpeculatorsMtpLayer(plan)])
        self.rotary = Rotary(plan.options, plan.device)
        self.reads_axes = self.rotary.has_axes

    def run(self, depth: int, pairs: Pairs, parts: TargetParts) -> Tensor:
        embeddings = pairs.embedded(parts.embedded(pairs.token_ids))
        rotation = self.rotary(pairs.positions, embeddings.dtype)
        states: Tensor = self.layers[0](embeddings, pairs.states, rotation, pairs.view)
        return states


def read_mtp(source: ConfigSource) -> tuple[HeadSpec, Qwen3Config | None]:
    """Read the spec and layers of MTP layers from the config of a head or of a target."""
    source.check_no_layers("MTP layers, which read the last state")
    fields = source.layer_fields
    if source.recognised.format == "speculators":
        if fields.get("model_type") not in _DENSE_LAYERS:
            raise unserved(
                f"an MTP layer of {fields.get('model_type')!r}",
                f"a layer of {', '.join(_DENSE_LAYERS)}",
            )
        spec = source.spec(fields, (FINAL_STATE,), merges_media=True)
        return spec, read_layer_config({**fields, "num_hidden_layers": 1})
    model_type, text = fields.get("model_type"), text_fields(fields)
    if model_type not in SERVED_TARGETS:
        raise unserved(
            f"MTP layers of {model_type!r}", f"MTP layers of {' or '.join(SERVED_TARGETS)}"
        )
    num_layers = int(text["num_hidden_layers"])
    others = {
        "num_target_layers": num_layers,
        "max_position_embeddings": None,
        "merges_media": True,
    }
    return source.spec(text, (FINAL_STATE,), **others), None


def load_mtp(request: LoadRequest) -> HeadNetwork:
    """Load MTP layers of either format."""
    if request.options is None:
        return load_checkpoint_mtp(request)
    return load_network(SpeculatorsMtpNetwork, request, ignored=SHARED_TABLES)
