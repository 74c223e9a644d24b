"""Reads a draft head's folder or Hub repository, recognises its kind, and refuses by name those not supported."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from hf_speculate.errors import ConfigError, UnsupportedModelError

SERVED = "EAGLE-3 and 3.1, P-EAGLE, DFlash, DSpark, PARD, and MTP layers"
SPECULATORS_KINDS = ("eagle3", "peagle", "dflash", "dspark", "mtp")
PLAIN_WEIGHTS = "weights in float16, bfloat16 or float32"
_DENSE = "dense Llama or Qwen 3 layers"
_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_UNCOUNTED_MTP = ("qwen3_next",)  # families with one MTP layer that their configs do not name
_HEAD_NAMES = ("Eagle", "DFlash", "DSpark")  # in `architectures`
_BLOCK_FIELDS = {"block_size", "mask_token_id", "target_layer_ids"}  # of DFlash heads that have them at the top level


class HeadKind(NamedTuple):
    """Kind and format of the head in a folder."""

    kind: str  # "eagle3", "peagle", "dflash", "dspark", "mtp" or "pard"
    format: str  # "original", "speculators" or "z-lab"; "transformers" for layers inside a target's checkpoint


def recognise(config: dict[str, Any], weight_names: Callable[[], Collection[str]], target_type: str | None) -> HeadKind:
    """The kind of head in a folder, which may be a checkpoint of `target_type`: by its config, then by its weights."""
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
            raise unserved("MTP layers of a quantised checkpoint (quantization_config)", PLAIN_WEIGHTS)
        return HeadKind("mtp", "transformers")
    names = {name.removeprefix("model.") for name in weight_names()}
    if "fc.weight" in names and ("d2t" in names or any(name.startswith("midlayer.") for name in names)):
        return HeadKind("eagle3", "original")
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names and "lm_head.weight" not in names:
        raise unserved("an EAGLE-1 or EAGLE-2 head", "EAGLE-3's three target states")
    found = f"model_type {config.get('model_type')!r} with architectures {config.get('architectures')}"
    raise unserved(found, "a config that names the kind")


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
        (is_quantised, "a quantised head (quantization_config)", PLAIN_WEIGHTS),
        (projector != "dflash", f"a DFlash variant with projector_type {projector!r}", "projector_type 'dflash'"),
        (is_dflash2, "a DFlash 2 head (candidate selector and convolutions)", "DFlash's plain layers"),
        (has_sinks, "a DFlash head with attention sinks", "attention without sinks"),
        (is_dspark, "a DSpark head outside the speculators format", "speculators_model_type 'dspark'"),
    ):
        if is_found:
            raise unserved(found, allowed)


_WEIGHT_PATTERNS = ["*.safetensors", "*.bin", "*.index.json"]
_QUANTISED = ("_scale", ".scales", "qweight", "weight_packed")
_WEIGHT_FILES = (  # the first that exists is read
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class HeadFolder:
    """A draft head in a folder or a Hub repository. Weights are downloaded only when they are needed.

    Raises:
        ConfigError: there is no config.json.
        UnsupportedModelError: from `weights`, if there are none, or if they are quantised.
    """

    def __init__(self, source: str | Path):
        self.source = str(source)
        self.config: dict[str, Any] = {}
        reason = None
        try:
            self.config, _ = PreTrainedConfig.get_config_dict(source)
        except (OSError, TypeError, ValueError) as error:  # whatever the Hub, the network or the id is to blame for
            reason = error
        if not self.config or not isinstance(self.config, dict):
            raise ConfigError(
                f"a draft head must be a folder or a Hub repository with a config.json, got {self.source!r}; check the "
                f"path or the id ({reason or 'the folder has none'})"
            ) from reason

    @property
    def name(self) -> str:
        """The last part of the folder's path or of the repository's id."""
        return Path(self.source).resolve().name if Path(self.source).is_dir() else self.source.rpartition("/")[2]

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """The weights whose names begin with a prefix, on the CPU, by their names in the file; no quantised ones."""
        weights: dict[str, Tensor] = {}
        for path in self._weight_files():
            if path.suffix == ".safetensors":  # mapped into memory: what is not used is not read
                loaded = load_file(path)
            else:
                loaded = torch.load(path, map_location="cpu", weights_only=True)
            weights |= {name: weight for name, weight in loaded.items() if name.startswith(prefix)}
        quantised = sorted(name for name in weights if name.endswith(_QUANTISED))
        if quantised:
            raise unserved(f"quantised weights ({quantised[0]})", PLAIN_WEIGHTS)
        return weights

    def _weight_files(self) -> list[Path]:
        folder = Path(self.source)
        if not folder.is_dir():
            folder = Path(snapshot_download(self.source, allow_patterns=_WEIGHT_PATTERNS))
        path = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
        if path is None:
            raise UnsupportedModelError(
                f"{self.source} must hold one of {', '.join(_WEIGHT_FILES)}, got "
                f"{sorted(path.name for path in folder.iterdir())}; save the weights in one of these files"
            )
        if not path.name.endswith(".index.json"):
            return [path]
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / shard for shard in dict.fromkeys(shards)]
