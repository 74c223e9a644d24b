"""Supported kinds of draft heads, unsupported options, and the error for other kinds."""

from typing import Any

from hf_speculate.errors import UnsupportedModelError

SERVED = "EAGLE-3 and 3.1, P-EAGLE, DFlash, DFlash 2, DSpark, PARD, and MTP layers"
PLAIN_WEIGHTS = "weights in float16, bfloat16 or float32"
_PROJECTORS = ("dflash", "dflash2")
_DENSE = "dense Llama or Qwen 3 layers"


def unserved(got: str, allowed: str = "") -> UnsupportedModelError:
    """Return the error for a head of an unsupported kind; `allowed` names the alternatives."""
    return UnsupportedModelError(
        f"a draft head must be of a served kind ({SERVED}){' with ' if allowed else ''}{allowed}, "
        f"got {got}; use "
        "another head, or load an ordinary draft model and pass it as assistant_model"
    )


def architectures_of(config: dict[str, Any]) -> str:
    """Return the names of the architectures in a config, joined by spaces."""
    names = config.get("architectures")
    return " ".join(map(str, names)) if isinstance(names, list) else ""


def check_config(config: dict[str, Any]) -> None:
    """Check that a config has no option that changes the meaning of known tensors.

    Unknown kinds are detected later, from missing or unexpected weights.

    Raises:
        UnsupportedModelError: the config has such an option.
    """
    layer, dflash = (
        _nested(config, "transformer_layer_config") or config,
        _nested(config, "dflash_config"),
    )
    fields, architectures = config | dflash, architectures_of(config)
    is_head = (
        "speculators_model_type" in config
        or "draft_vocab_size" in config
        or "Eagle3" in architectures
    )
    if is_head and layer.get("kv_lora_rank"):
        raise unserved("a draft with latent attention (MLA, kv_lora_rank)", _DENSE)
    has_experts = layer.get("num_experts") or layer.get("num_local_experts")
    if (is_head and has_experts) or fields.get("draft_ffn_type") == "moe":
        raise unserved("a draft with experts", _DENSE)
    if config.get("quantization_config") and (is_head or dflash):
        raise unserved("a quantised head (quantization_config)", PLAIN_WEIGHTS)
    projector = fields.get("projector_type") or "dflash"
    if projector not in _PROJECTORS:
        raise unserved(
            f"a DFlash variant with projector_type {projector!r}",
            f"projector_type {' or '.join(map(repr, _PROJECTORS))}",
        )
    if fields.get("fusion_mode") == "flare":
        raise unserved(
            "a DFlash variant with fusion_mode 'flare'", "states of layers that fc.weight joins"
        )
    if dflash.get("attention_sink_bias") or config.get("add_swa_attention_sink_bias"):
        raise unserved("a DFlash head with attention sinks", "attention without sinks")
    if "DSpark" in architectures and "speculators_model_type" not in config:
        raise unserved(
            "a DSpark head outside the speculators format", "speculators_model_type 'dspark'"
        )


def _nested(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}
