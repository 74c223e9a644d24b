"""Draft heads of tiny random weights, and writers of the folders that trainers leave."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB_SIZE = 32
TARGET_WIDTH = 24
NUM_TARGET_LAYERS = 6
AUX_LAYERS = (1, 3, 5)
WEIGHT_SCALE = 0.3
DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Design:
    """What a head of tests looks like."""

    kind: str = "eagle3"
    hidden_size: int = TARGET_WIDTH
    target_hidden_size: int = TARGET_WIDTH
    vocab_size: int = VOCAB_SIZE
    draft_ids: tuple[int, ...] | None = (1, 2, 5, 6, 9, 11, 14, 19, 20, 23, 27, 30)
    num_layers: int = 1
    aux_layers: tuple[int, ...] = AUX_LAYERS
    has_head_norms: bool = False
    has_embeddings: bool = False
    has_bias: bool = False
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 40
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 1000.0})
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    block_size: int = 5
    options: dict[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> "Design":
        return replace(self, options={**self.options, **options})

    @property
    def num_draft_ids(self) -> int:
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids)

    @property
    def joined_width(self) -> int:
        return len(self.aux_layers) * self.target_hidden_size


EAGLE3 = Design()
PEAGLE = Design(kind="peagle", num_layers=2, has_embeddings=True, options={"mask_token_id": 3})
DFLASH = Design(kind="dflash", num_layers=2, has_head_norms=True, draft_ids=None, options={"mask_token_id": 3})
DSPARK = replace(DFLASH, kind="dspark", options={"mask_token_id": 3, "markov_rank": 6, "sample_from_anchor": True})
MTP = Design(kind="mtp", has_head_norms=True, draft_ids=None, aux_layers=(NUM_TARGET_LAYERS,))


def make_weights(design: Design, seed: int = 0) -> dict[str, Tensor]:
    """Weights in float32 under the names of the speculators format."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * WEIGHT_SCALE

    def norm(width: int) -> Tensor:
        return 1 + drawn(width)

    width, inner = design.hidden_size, design.intermediate_size
    q_width, kv_width = design.num_heads * design.head_dim, design.num_kv_heads * design.head_dim
    is_eagle = design.kind in ("eagle3", "peagle")
    weights = {"norm.weight": norm(width)}
    for index in range(design.num_layers):
        in_width = 2 * width if is_eagle and index == 0 else width
        layer = {
            "self_attn.q_proj.weight": drawn(q_width, in_width),
            "self_attn.k_proj.weight": drawn(kv_width, in_width),
            "self_attn.v_proj.weight": drawn(kv_width, in_width),
            "self_attn.o_proj.weight": drawn(width, q_width),
            "mlp.gate_proj.weight": drawn(inner, width),
            "mlp.up_proj.weight": drawn(inner, width),
            "mlp.down_proj.weight": drawn(width, inner),
            "input_layernorm.weight": norm(width),
            "post_attention_layernorm.weight": norm(width),
        }
        if design.has_head_norms:
            layer |= {f"self_attn.{name}_norm.weight": norm(design.head_dim) for name in "qk"}
        if design.has_bias:
            layer |= {f"self_attn.{name}_proj.bias": drawn(q_width if name == "q" else kv_width) for name in "qkv"}
        if is_eagle and index == 0:
            layer["hidden_norm.weight"] = norm(width)
        weights |= {f"layers.{index}.{name}": weight for name, weight in layer.items()}
    if design.kind == "mtp":
        return _as_mtp(weights, drawn(width, 2 * width), norm(width), norm(width))
    if design.options.get("use_aux_hidden_state", True):
        weights["fc.weight"] = drawn(width, design.joined_width)
    if design.options.get("norm_before_fc"):
        weights["input_norm.weight"] = norm(design.joined_width)
    if design.options.get("fc_norm"):
        names = [f"fc_norm.{index}.weight" for index in range(len(design.aux_layers))]
        weights |= {name: norm(design.target_hidden_size) for name in names}
    if design.kind == "peagle":
        weights["mask_hidden"] = drawn(1, 1, design.joined_width)
    if not is_eagle:
        weights["hidden_norm.weight"] = norm(width)
        weights |= _markov(design, drawn)
    if design.has_embeddings or width != design.target_hidden_size:
        weights["embed_tokens.weight"] = drawn(design.vocab_size, width)
    if design.draft_ids is not None or width != design.target_hidden_size:
        weights["lm_head.weight"] = drawn(design.num_draft_ids, width) * 4  # apart, so that the argmax is certain
    if design.draft_ids is not None:
        ids = torch.tensor(design.draft_ids)
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(design.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def _markov(design: Design, drawn: Any) -> dict[str, Tensor]:
    rank = design.options.get("markov_rank")
    if not rank:
        return {}
    weights = {
        "markov_head.markov_w1.weight": drawn(design.vocab_size, rank) * 4,
        "markov_head.markov_w2.weight": drawn(design.num_draft_ids, rank) * 4,
    }
    width = design.hidden_size
    match design.options.get("markov_head_type"):
        case "gated":
            weights["markov_head.gate_proj.weight"] = drawn(rank, width + rank)
            weights["markov_head.gate_proj.bias"] = drawn(rank)
        case "rnn":
            weights["markov_head.joint_proj.weight"] = drawn(3 * rank, width + 2 * rank)
            weights["markov_head.joint_proj.bias"] = drawn(3 * rank)
    if design.options.get("enable_confidence_head"):
        reads_markov = design.options.get("confidence_head_with_markov")
        weights["confidence_head.proj.weight"] = drawn(1, width + (rank if reads_markov else 0))
        weights["confidence_head.proj.bias"] = drawn(1)
    return weights


def _as_mtp(weights: dict[str, Tensor], projection: Tensor, *norms: Tensor) -> dict[str, Tensor]:
    layer = {name.replace("layers.", "mtp_layers."): weight for name, weight in weights.items() if "layers." in name}
    layer["mtp_layers.0.final_layernorm.weight"] = weights["norm.weight"]
    layer["mtp_layers.0.input_proj.weight"] = projection
    layer["mtp_layers.0.token_layernorm.weight"], layer["mtp_layers.0.hidden_layernorm.weight"] = norms
    return layer


def layer_fields(design: Design) -> dict[str, Any]:
    """The part of a config that describes layers."""
    fields = {
        "model_type": "qwen3" if design.has_head_norms else "llama",
        "hidden_size": design.hidden_size,
        "intermediate_size": design.intermediate_size,
        "num_hidden_layers": design.num_layers,
        "num_attention_heads": design.num_heads,
        "num_key_value_heads": design.num_kv_heads,
        "head_dim": design.head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": design.vocab_size,
        "max_position_embeddings": 512,
        **design.rope,
    }
    if design.layer_types is not None:
        fields |= {"layer_types": list(design.layer_types), "sliding_window": design.sliding_window}
    return fields


def write_speculators(folder: Path, design: Design, weights: dict[str, Tensor], **fields: Any) -> Path:
    """A head as vllm-project/speculators saves it."""
    config = {
        "speculators_model_type": design.kind,
        "architectures": ["SomeSpeculator"],
        "transformer_layer_config": layer_fields(design),
        "target_hidden_size": design.target_hidden_size,
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFT_TOKENS}],
            "verifier": {"name_or_path": ""},
        },
        **design.options,
    }
    if design.kind != "mtp":
        config["draft_vocab_size"] = design.num_draft_ids
    if design.kind in ("eagle3", "peagle"):
        config["eagle_aux_hidden_state_layer_ids"] = list(design.aux_layers)
    if design.kind in ("dflash", "dspark"):
        config |= {"aux_hidden_state_layer_ids": list(design.aux_layers), "block_size": design.block_size}
    return _write(folder, {**config, **fields}, weights)


def write_original(
    folder: Path, design: Design, weights: dict[str, Tensor], *, container: str = "safetensors", **fields: Any
) -> Path:
    """An EAGLE-3 head as EAGLE and SpecForge save it: flat config, `midlayer`, names with or without "model."."""
    config = {**layer_fields(design), "architectures": ["LlamaForCausalLMEagle3"], **design.options}
    config["draft_vocab_size"] = design.num_draft_ids
    config["target_hidden_size"] = design.target_hidden_size
    config["eagle_aux_hidden_state_layer_ids"] = list(design.aux_layers)
    renamed = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    renamed["model.rotary_emb.inv_freq"] = torch.ones(2)
    return _write(folder, {**config, **fields}, renamed, container)


def write_z_lab(folder: Path, design: Design, weights: dict[str, Tensor], **fields: Any) -> Path:
    """A DFlash head as z-lab saves it, whose ids name layers by their outputs."""
    config = {**layer_fields(design), "architectures": ["DFlashDraftModel"], "num_target_layers": NUM_TARGET_LAYERS}
    config["block_size"] = design.block_size
    config["dflash_config"] = {"target_layer_ids": [layer - 1 for layer in design.aux_layers], **design.options}
    return _write(folder, {**config, **fields}, weights)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], container: str = "safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    match container:
        case "safetensors":
            save_file(weights, folder / "model.safetensors")
        case "bin":
            torch.save(weights, folder / "pytorch_model.bin")
        case "sharded":
            names = sorted(weights)
            shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
            for file, owned in shards.items():
                save_file({name: weights[name] for name in owned}, folder / file)
            index = {name: file for file, owned in shards.items() for name in owned}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder
