"""Draft heads that are not served, by name: their config or weights tell them apart, also where their tensors fit."""

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from hf_speculate.errors import UnsupportedModelError

SERVED = "EAGLE-3 and 3.1, P-EAGLE, DFlash, DFlash 2, DSpark, PARD, and MTP layers"
PLAIN_WEIGHTS = "weights in float16, bfloat16 or float32"
_PROJECTORS = ("dflash", "dflash2")
_DENSE = "dense Llama or Qwen 3 layers"


class Unserved(NamedTuple):
    """A kind of head that is not served, and what only its folders have."""

    kind: str  # as errors name it
    word: str  # in a name that the config gives, in lower case and without marks
    fields: tuple[str, ...] = ()  # fields of the config or its `dflash_config`
    weights: tuple[str, ...] = ()  # beginnings of names


UNSERVED_KINDS = (
    Unserved("a LiLiCorr head", "lilicorr", (), ("lilicorr.",)),
    Unserved("an XPress head", "xpress", ("xpress_rank",), ("xpress_head.",)),
    Unserved("a Domino head", "domino", ("gru_hidden_dim",), ("prefix_gru.", "embed_proj.")),
    Unserved("a Domino head", "causalv5"),
    Unserved("a DFlare head", "flare"),
    Unserved("a DFlash head with linear attention", "dflashlinear"),
    Unserved("a DSpine head", "dspine"),
    Unserved("an HSpec head", "hspec"),
    Unserved("a DELS-Spec head", "delsspec"),
    Unserved("a Medusa head", "medusa", ("medusa_num_heads",)),
    Unserved("an MLP speculator", "mlpspeculator"),
    Unserved("a draft with latent attention (MLA)", "eagle3deepseek"),
)
_NAMING_FIELDS = ("architectures", "speculators_model_type", "model_type", "projector_type", "fusion_mode")


def unserved(got: str, allowed: str = "") -> UnsupportedModelError:
    """The error for a head that is recognised and not served; `allowed` is what is served instead."""
    return UnsupportedModelError(
        f"a draft head must be of a served kind ({SERVED}){' with ' if allowed else ''}{allowed}, got {got}; use "
        "another head, or load an ordinary draft model and pass it as assistant_model"
    )


def unserved_kind(config: dict[str, Any]) -> str:
    """The kind that is not served of the head with this config, and what tells so; empty for another config."""
    names = {name: re.sub(r"[^a-z0-9]", "", name.lower()) for name in _names_in(config)}
    fields = config.keys() | _nested(config, "dflash_config").keys()
    for entry in UNSERVED_KINDS:
        for name, plain in names.items():
            if entry.word in plain:
                return f"{entry.kind} ({name})"
        for field in entry.fields:
            if field in fields:
                return f"{entry.kind} ({field})"
    return ""


def check_config(config: dict[str, Any]) -> None:
    """Refuse by name a head that is not served, and what a head of a served kind must not have."""
    name = unserved_kind(config)
    if name:
        raise unserved(name)
    layer, dflash = _nested(config, "transformer_layer_config") or config, _nested(config, "dflash_config")
    fields = config | dflash
    architectures = " ".join(_names_in(config))
    is_head = "speculators_model_type" in config or "draft_vocab_size" in config or "Eagle3" in architectures
    projector = fields.get("projector_type") or "dflash"
    has_experts = is_head and (layer.get("num_experts") or layer.get("num_local_experts"))
    has_sinks = dflash.get("attention_sink_bias") or config.get("add_swa_attention_sink_bias")
    is_dspark = "DSpark" in architectures and "speculators_model_type" not in config
    is_quantised = config.get("quantization_config") and (is_head or dflash)
    for has_it, got, allowed in (
        (is_head and layer.get("kv_lora_rank"), "a draft with latent attention (MLA, kv_lora_rank)", _DENSE),
        (has_experts or fields.get("draft_ffn_type") == "moe", "a draft with experts", _DENSE),
        (is_quantised, "a quantised head (quantization_config)", PLAIN_WEIGHTS),
        (
            projector not in _PROJECTORS,
            f"a DFlash variant with projector_type {projector!r}",
            f"projector_type {' or '.join(map(repr, _PROJECTORS))}",
        ),
        (has_sinks, "a DFlash head with attention sinks", "attention without sinks"),
        (is_dspark, "a DSpark head outside the speculators format", "speculators_model_type 'dspark'"),
    ):
        if has_it:
            raise unserved(got, allowed)


def check_weight_names(names: Collection[str]) -> None:
    """Refuse by name a head that is not served, from names of weights without a leading "model."."""
    for entry in UNSERVED_KINDS:
        match = next((name for name in names if entry.weights and name.startswith(entry.weights)), None)
        if match is not None:
            raise unserved(f"{entry.kind} ({match})")


def _names_in(config: dict[str, Any]) -> Iterator[str]:
    """Names of architecture in a config, and in its `dflash_config`."""
    for part in (config, _nested(config, "dflash_config")):
        for field in _NAMING_FIELDS:
            value = part.get(field)
            yield from (name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str))


def _nested(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}
