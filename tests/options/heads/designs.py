"""Define draft heads with tiny random weights, and write folders in the trainers' formats."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

VOCAB_SIZE = 32
TARGET_WIDTH = 24
NUM_TARGET_LAYERS = 6
AUX_LAYERS = (1, 3, 5)
WEIGHT_SCALE = 0.3
DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Design:
    """Sizes and options of a test head."""

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
DFLASH = Design(
    kind="dflash", num_layers=2, has_head_norms=True, draft_ids=None, options={"mask_token_id": 3}
)
DSPARK = replace(
    DFLASH,
    kind="dspark",
    options={"mask_token_id": 3, "markov_rank": 6, "sample_from_anchor": True},
)
SELECTION = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
DFLASH2 = replace(DFLASH, kind="dflash2", options={"mask_token_id": 3, **SELECTION})
MTP = Design(kind="mtp", has_head_norms=True, draft_ids=None, aux_layers=(NUM_TARGET_LAYERS,))


def make_weights(design: Design, seed: int = 0) -> dict[str, Tensor]:
    """Make float32 weights with the names of the speculators format."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in _shapes(design).items():
        weights[name] = torch.randn(*shape, generator=generator) * WEIGHT_SCALE
        if "norm" in name:
            weights[name] += 1
        if name.startswith(("lm_head", "markov_head.markov_w")):
            weights[name] *= 4  # spread out, so the argmax is certain
    if design.draft_ids is not None:
        ids = torch.tensor(design.draft_ids)
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(design.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def _shapes(design: Design) -> dict[str, tuple[int, ...]]:
    width, joined, options = design.hidden_size, design.joined_width, design.options
    is_eagle, is_mtp = design.kind in ("eagle3", "peagle"), design.kind == "mtp"
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(design.num_layers):
        prefix = f"mtp_layers.{index}." if is_mtp else f"layers.{index}."
        in_width = 2 * width if is_eagle and index == 0 else width
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(design, in_width).items()}
        if design.kind == "dflash2":
            shapes |= {prefix + name: shape for name, shape in _convolution_shapes(design).items()}
    if is_mtp:
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        shapes |= {f"mtp_layers.0.{name}.weight": (width,) for name in norms}
        return shapes | {"mtp_layers.0.input_proj.weight": (width, 2 * width)}
    shapes |= {
        "norm.weight": (width,),
        "layers.0.hidden_norm.weight" if is_eagle else "hidden_norm.weight": (width,),
    }
    if options.get("use_aux_hidden_state", True):
        shapes["fc.weight"] = (width, joined)
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (joined,)
    if options.get("fc_norm"):
        names = [f"fc_norm.{index}.weight" for index in range(len(design.aux_layers))]
        shapes |= dict.fromkeys(names, (design.target_hidden_size,))
    if design.kind == "peagle":
        shapes["mask_hidden"] = (1, 1, joined)
    if options.get("markov_rank"):
        shapes |= _markov_shapes(design, options["markov_rank"])
    if design.kind == "dflash2":
        rank, prefix = options["selector_rank"], "candidate_selector."
        shapes[f"{prefix}hidden_projection.weight"] = (rank, width)
        shapes |= {
            f"{prefix}{name}_codebook": (design.vocab_size, rank)
            for name in ("predecessor", "successor")
        }
    if design.has_embeddings or width != design.target_hidden_size:
        shapes["embed_tokens.weight"] = (design.vocab_size, width)
    if design.draft_ids is not None or width != design.target_hidden_size:
        shapes["lm_head.weight"] = (design.num_draft_ids, width)
    return shapes


def _layer_shapes(design: Design, in_width: int) -> dict[str, tuple[int, ...]]:
    width, inner, head_dim = design.hidden_size, design.intermediate_size, design.head_dim
    rows = {
        "q": design.num_heads * head_dim,
        "k": design.num_kv_heads * head_dim,
        "v": design.num_kv_heads * head_dim,
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}_proj.weight": (num, in_width) for name, num in rows.items()
    }
    shapes["self_attn.o_proj.weight"] = (width, rows["q"])
    shapes |= {"mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width)}
    shapes |= {"mlp.down_proj.weight": (width, inner), "input_layernorm.weight": (width,)}
    shapes["post_attention_layernorm.weight"] = (width,)
    if design.has_head_norms:
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    if design.has_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (num,) for name, num in rows.items()}
    return shapes


def _convolution_shapes(design: Design) -> dict[str, tuple[int, ...]]:
    width, num_taps = design.hidden_size, design.options["conv_kernel_size"]
    num_rows = 2 * num_taps * (width // design.options["conv_group_size"])
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("attention_conv", "mlp_conv"):
        shapes |= {
            f"{name}.base_kernel": (2, num_taps, width),
            f"{name}.kernel_projection.weight": (num_rows, width),
        }
    return shapes


def _markov_shapes(design: Design, rank: int) -> dict[str, tuple[int, ...]]:
    width, prefix = design.hidden_size, "markov_head."
    shapes = {f"{prefix}markov_w1.weight": (design.vocab_size, rank)}
    shapes[f"{prefix}markov_w2.weight"] = (design.num_draft_ids, rank)
    match design.options.get("markov_head_type"):
        case "gated":
            shapes |= {
                f"{prefix}gate_proj.weight": (rank, width + rank),
                f"{prefix}gate_proj.bias": (rank,),
            }
        case "rnn":
            shapes |= {f"{prefix}joint_proj.weight": (3 * rank, width + 2 * rank)}
            shapes |= {f"{prefix}joint_proj.bias": (3 * rank,)}
    if design.options.get("enable_confidence_head"):
        in_width = width + (rank if design.options.get("confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": (1, in_width), "confidence_head.proj.bias": (1,)}
    return shapes


def layer_fields(design: Design) -> dict[str, Any]:
    """Return the part of a config that describes the layers."""
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


def write_speculators(
    folder: Path, design: Design, weights: dict[str, Tensor], **fields: Any
) -> Path:
    """Write a head as vllm-project/speculators saves it."""
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
    if design.kind in ("dflash", "dflash2", "dspark"):
        config |= {
            "aux_hidden_state_layer_ids": list(design.aux_layers),
            "block_size": design.block_size,
        }
    return _write(folder, {**config, **fields}, weights)


def write_original(
    folder: Path,
    design: Design,
    weights: dict[str, Tensor],
    saving: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write an EAGLE-3 head as EAGLE and SpecForge save it: flat config, `midlayer`."""
    config = {**layer_fields(design), "architectures": ["LlamaForCausalLMEagle3"], **design.options}
    config["draft_vocab_size"] = design.num_draft_ids
    config["target_hidden_size"] = design.target_hidden_size
    config["eagle_aux_hidden_state_layer_ids"] = list(design.aux_layers)
    renamed = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    renamed["model.rotary_emb.inv_freq"] = torch.ones(2)
    return _write(folder, {**config, **fields}, renamed, **(saving or {}))


def write_z_lab(
    folder: Path,
    design: Design,
    weights: dict[str, Tensor],
    saving: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write a DFlash head as z-lab saves it, where ids name layers by their outputs."""
    architecture = "DFlash2DraftModel" if design.kind == "dflash2" else "DFlashDraftModel"
    config = {
        **layer_fields(design),
        "architectures": [architecture],
        "num_target_layers": NUM_TARGET_LAYERS,
    }
    config["block_size"] = design.block_size
    config["dflash_config"] = {
        "target_layer_ids": [layer - 1 for layer in design.aux_layers],
        **design.options,
    }
    return _write(folder, {**config, **fields}, weights, **(saving or {}))


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], **saving: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder, **saving)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
