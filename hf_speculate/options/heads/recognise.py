"""Recognise the kind of a draft head from its config, then from the names of its weights."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from hf_speculate.field_checks import is_int
from hf_speculate.options.heads.served import architectures_of, check_config, unserved

SPECULATORS_KINDS = ("eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp")
_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_UNCOUNTED_MTP = ("qwen3_next",)  # families with one MTP layer but no count in the config
_HEAD_NAMES = ("Eagle", "DFlash", "DSpark")  # in `architectures`
_DFLASH2_FIELDS = {"selector_rank", "selector_top_k"}
# top-level fields of DFlash heads
_BLOCK_FIELDS = {"block_size", "mask_token_id", "target_layer_ids"}


class HeadKind(NamedTuple):
    """Kind and format of a draft head."""

    kind: str  # "eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp" or "pard"
    # "original", "speculators" or "z-lab"; "transformers" for layers in a target's checkpoint
    format: str


def recognise(
    config: dict[str, Any], weight_names: Callable[[], Collection[str]], target_type: str | None
) -> HeadKind:
    """Recognise the kind of head in a folder or in a checkpoint of model type `target_type`.

    Raises:
        UnsupportedModelError: the kind is unsupported or unknown.
    """
    check_config(config)
    model_type = config.get("speculators_model_type")
    if model_type is not None:
        if model_type not in SPECULATORS_KINDS:
            raise unserved(
                f"the speculators model type {model_type!r}",
                f"one of {', '.join(SPECULATORS_KINDS)}",
            )
        return HeadKind(model_type, "speculators")
    architectures = architectures_of(config)
    if _is_dflash2(config):
        return HeadKind("dflash2", "z-lab")
    if "dflash_config" in config or "DFlash" in architectures or config.keys() >= _BLOCK_FIELDS:
        return HeadKind("dflash", "z-lab")
    if "pard_token" in config:
        return HeadKind("pard", "original")
    if "draft_vocab_size" in config or "Eagle3" in architectures:
        return HeadKind("eagle3", "original")
    if is_mtp_checkpoint(config, target_type):
        return HeadKind("mtp", "transformers")
    names = {name.removeprefix("model.") for name in weight_names()}
    if "fc.weight" in names and (
        "d2t" in names or any(name.startswith("midlayer.") for name in names)
    ):
        return HeadKind("eagle3", "original")
    if (
        "fc.weight" in names
        and "layers.0.self_attn.q_proj.weight" in names
        and "lm_head.weight" not in names
    ):
        raise unserved("an EAGLE-1 or EAGLE-2 head", "EAGLE-3's three target states")
    seen = (
        f"model_type {config.get('model_type')!r} with architectures {config.get('architectures')}"
    )
    raise unserved(seen, "a config that names the kind")


def is_head(config: dict[str, Any]) -> bool:
    """Return whether a config belongs to a draft head rather than to an ordinary model."""
    # MTP layers have no config, and a few early heads have the config of an ordinary model.
    fields = {
        "speculators_model_type",
        "dflash_config",
        "pard_token",
        "draft_vocab_size",
        *_DFLASH2_FIELDS,
    }
    has_fields = bool(fields & config.keys()) or config.keys() >= _BLOCK_FIELDS
    return has_fields or any(name in architectures_of(config) for name in _HEAD_NAMES)


def named_target(config: dict[str, Any]) -> str:
    """Return the target's folder or Hub id from a head's config; empty if there is none."""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    return str(verifier.get("name_or_path") or "") if isinstance(verifier, dict) else ""


def is_mtp_checkpoint(config: dict[str, Any], target_type: str | None) -> bool:
    """Return whether a config belongs to a target with MTP layers in its checkpoint."""
    if target_type is None or target_type not in (
        config.get("model_type"),
        text_fields(config).get("model_type"),
    ):
        return False
    return bool(num_mtp_layers(config))


def num_mtp_layers(config: dict[str, Any]) -> int:
    """Return the number of MTP layers in a checkpoint with this config."""
    text = text_fields(config)
    counts = [text[name] for name in _MTP_COUNTS if is_int(text.get(name)) and text[name] > 0]
    return counts[0] if counts else int(text.get("model_type") in _UNCOUNTED_MTP)


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a `config.json` that describes the text decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _is_dflash2(config: dict[str, Any]) -> bool:
    fields = config.get("dflash_config")
    fields = config | (fields if isinstance(fields, dict) else {})
    is_named = "DFlash2" in architectures_of(config) or fields.get("projector_type") == "dflash2"
    return is_named or bool(_DFLASH2_FIELDS & fields.keys())
