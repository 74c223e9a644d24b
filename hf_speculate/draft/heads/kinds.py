"""Recognises the kind and the format of a draft head, and refuses by name those that are not supported."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from hf_speculate.errors import UnsupportedModelError

SERVED = "EAGLE-3 and 3.1, P-EAGLE, DFlash, DSpark, PARD, and MTP layers"
SPECULATORS_KINDS = ("eagle3", "peagle", "dflash", "dspark", "mtp")
_PLAIN_WEIGHTS = "weights in float16, bfloat16 or float32"
_DENSE = "dense Llama or Qwen 3 layers"
_QUANTISED = ("_scale", ".scales", "qweight", "weight_packed")
_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_UNCOUNTED_MTP = ("qwen3_next",)  # families with one MTP layer that their configs do not name
_HEAD_NAMES = ("Eagle", "DFlash", "DSpark")  # in `architectures`
_BLOCK_FIELDS = {"block_size", "mask_token_id", "target_layer_ids"}  # of DFlash heads that have them at the top level


class HeadKind(NamedTuple):
    """Kind and format of the head in a folder."""

    kind: str  # "eagle3", "peagle", "dflash", "dspark", "mtp" or "pard"
    format: str  # "original", "speculators" or "z-lab"; "transformers" for layers inside a target's checkpoint


def recognise(config: dict[str, Any], weight_names: Callable[[], Collection[str]], target_type: str | None) -> HeadKind:
    """The kind of head that a folder holds, by its config first and by its weights where that does not tell.

    `architectures` is not relied on: trainers write a dozen different names for the same network. The folder may be the
    checkpoint of a target of `target_type`.
    """
    _check_served(config)
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in SPECULATORS_KINDS:
            raise unserved(f"the speculators model type {kind!r}", f"one of {', '.join(SPECULATORS_KINDS)}")
        return HeadKind(kind, "speculators")
    architectures = " ".join(config.get("architectures") or ())
    if "dflash_config" in config or "DFlash" in architectures or config.keys() >= _BLOCK_FIELDS:
        return HeadKind("dflash", "z-lab")
    if "pard_token" in config:
        return HeadKind("pard", "original")
    if "draft_vocab_size" in config or "Eagle3" in architectures:
        return HeadKind("eagle3", "original")
    if is_mtp_checkpoint(config, target_type):
        if config.get("quantization_config"):
            raise unserved("MTP layers of a quantised checkpoint (quantization_config)", _PLAIN_WEIGHTS)
        return HeadKind("mtp", "transformers")
    return _by_weights(config, weight_names())


def is_head(config: dict[str, Any]) -> bool:
    """Whether a config is that of a draft head, of a served kind or not, rather than of an ordinary model."""
    # MTP layers have no config of their own, and a few early heads have that of an ordinary model.
    fields = {"speculators_model_type", "dflash_config", "pard_token", "draft_vocab_size"}
    architectures = " ".join(config.get("architectures") or ())
    has_fields = bool(fields & config.keys()) or config.keys() >= _BLOCK_FIELDS
    return has_fields or any(name in architectures for name in _HEAD_NAMES)


def is_mtp_checkpoint(config: dict[str, Any], target_type: str | None) -> bool:
    """Whether the config is that of a target with layers for multi-token prediction in its checkpoint."""
    text = text_fields(config)
    if target_type is None or target_type not in (config.get("model_type"), text.get("model_type")):
        return False
    return target_type in _UNCOUNTED_MTP or any(text.get(name) for name in _MTP_COUNTS)


def check_weight_names(names: Collection[str]) -> None:
    """Refuse quantised weights."""
    found = sorted(name for name in names if name.endswith(_QUANTISED))
    if found:
        raise unserved(f"quantised weights ({found[0]})", _PLAIN_WEIGHTS)


def unserved(found: str, allowed: str) -> UnsupportedModelError:
    """The error for a head that is recognised and not served; `allowed` is what is served in its place."""
    return UnsupportedModelError(
        f"a draft head must be of a served kind ({SERVED}) with {allowed}, got {found}; use another head, or "
        "load an ordinary draft model and pass it as assistant_model"
    )


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a `config.json` that describes the text decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _by_weights(config: dict[str, Any], names: Collection[str]) -> HeadKind:
    short = {name.removeprefix("model.") for name in names}
    if "fc.weight" in short and ("d2t" in short or any(name.startswith("midlayer.") for name in short)):
        return HeadKind("eagle3", "original")
    if "fc.weight" in short and "layers.0.self_attn.q_proj.weight" in short and "lm_head.weight" not in short:
        raise unserved("an EAGLE-1 or EAGLE-2 head", "EAGLE-3's three target states")
    kind = config.get("model_type")
    architectures = config.get("architectures")
    raise unserved(f"model_type {kind!r} with architectures {architectures}", "a config that names the kind")


def _check_served(config: dict[str, Any]) -> None:
    """Refuse by name what is close to a served kind."""
    layer = config.get("transformer_layer_config") or config
    dflash = config.get("dflash_config") or {}
    architectures = " ".join(config.get("architectures") or ())
    is_head = "speculators_model_type" in config or "draft_vocab_size" in config or "Eagle3" in architectures
    projector = dflash.get("projector_type") or config.get("projector_type") or "dflash"
    has_experts = layer.get("num_experts") or layer.get("num_local_experts")
    has_sinks = dflash.get("attention_sink_bias") or config.get("add_swa_attention_sink_bias")
    is_dflash2 = "DFlash2" in architectures or "selector_rank" in dflash
    is_dspark = "DSpark" in architectures and "speculators_model_type" not in config
    is_quantised = config.get("quantization_config") and (is_head or dflash)
    for is_found, found, allowed in (
        (is_head and layer.get("kv_lora_rank"), "a draft with latent attention (MLA, kv_lora_rank)", _DENSE),
        (is_head and has_experts, "a draft with experts", _DENSE),
        (is_quantised, "a quantised head (quantization_config)", _PLAIN_WEIGHTS),
        (projector != "dflash", f"a DFlash variant with projector_type {projector!r}", "projector_type 'dflash'"),
        (is_dflash2, "a DFlash 2 head (candidate selector and convolutions)", "DFlash's plain layers"),
        (has_sinks, "a DFlash head with attention sinks", "attention without sinks"),
        (is_dspark, "a DSpark head outside the speculators format", "speculators_model_type 'dspark'"),
    ):
        if is_found:
            raise unserved(found, allowed)
