"""Read the low-rank weights of a Uno adapter from files or from a PEFT target.

An adapter is a LoRA for q, k, v, o, gate, up and down in every decoder layer:

    y = W x + s B A x,    s = lora_alpha / r

`A` is [r, in], and `B` is [out, r]. The files have PEFT's format. No field distinguishes a Uno
adapter from another LoRA.

Source:
    Uno (arXiv:2609.04010).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.errors import ConfigError, UnsupportedModelError, shown
from hf_speculate.field_checks import is_int
from hf_speculate.models.language_model import COMPUTE_DTYPES
from hf_speculate.models.text_decoder import text_decoder

TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FILES = _CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model*.safetensors"
_SUBFOLDER = "adapter"  # subfolder next to the weights of a base model
# Fields that affect the forward unless they are empty, false or "none".
_OTHER_FIELDS = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "bias", "exclude_modules"),
    *("fan_in_fan_out", "layer_replication", "layers_to_transform", "lora_bias"),
    *("modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices"),
    *("use_bdlora", "use_dora", "use_qalora", "use_rslora"),
)
_NAME = re.compile(
    r"(?:base_model\.model\.)?model\.(?:language_model\.)?"
    r"(layers\.\d+\.(?:self_attn|mlp)\.\w+)\.lora_([AB])\.weight"
)


class AdapterConfig(NamedTuple):
    """The fields of an adapter's config."""

    rank: int
    scale: float  # lora_alpha / r
    target_modules: tuple[str, ...]  # names of linear layers, a subset of `TARGET_MODULES`
    base_name: str  # name of the base model; empty if unknown

    @classmethod
    def of(cls, fields: Mapping[str, Any], name: str) -> "AdapterConfig":
        """Check the fields of a config.

        Raises:
            ConfigError: a field has an invalid value.
            UnsupportedModelError: the adapter is not a plain LoRA for `TARGET_MODULES`.
        """
        peft_type = getattr(fields.get("peft_type"), "value", fields.get("peft_type"))
        problems = [] if peft_type == "LORA" else [f"peft_type {peft_type!r}"]
        problems += [
            f"{field} {fields[field]!r}"
            for field in _OTHER_FIELDS
            if fields.get(field) and fields[field] != "none"
        ]
        modules: Any = fields.get("target_modules")
        if not isinstance(modules, list | set | tuple) or not modules:
            problems.append(f"target_modules {modules!r}")
        elif others := sorted(set(modules) - set(TARGET_MODULES)):
            problems.append(f"target_modules {', '.join(map(str, others))}")
        if problems:
            raise UnsupportedModelError(
                f"a Uno adapter must be a plain LoRA of {', '.join(TARGET_MODULES)}, got "
                f"{'; '.join(problems)} in {name}; pass the adapter of a Uno checkpoint"
            )
        rank: Any = fields.get("r")
        alpha: Any = fields.get("lora_alpha")
        if not is_int(rank) or rank < 1 or not isinstance(alpha, int | float):
            raise ConfigError(
                f"{_CONFIG} of {name} must have r >= 1 and a number as lora_alpha, got {rank!r} "
                f"and {alpha!r}; download it again"
            )
        order = tuple(module for module in TARGET_MODULES if module in modules)
        base_name = str(fields.get("base_model_name_or_path") or "")
        return cls(rank, float(alpha) / rank, order, base_name)


class LowRank(NamedTuple):
    """The weights of one linear layer."""

    down: Tensor  # A, [r, in]
    up: Tensor  # B, [out, r]


class AdapterWeights(NamedTuple):
    """The weights of an adapter, as stored."""

    config: AdapterConfig
    layers: dict[str, LowRank]  # by the layer's name in the decoder, such as "layers.0.mlp.up_proj"

    @property
    def stamps(self) -> tuple[Any, ...]:
        """Config, and address and version of each tensor; inference tensors have no version."""
        sides = (side for pair in self.layers.values() for side in pair)
        versions = (
            (side.data_ptr(), 0 if side.is_inference() else side._version) for side in sides
        )
        return self.config, *versions


def file_stamps(source: str) -> tuple[tuple[Path, int, int], ...]:
    """Return path, time in ns and size in bytes of each file of a folder; empty for no folder."""
    root = Path(source)
    paths = [
        path
        for folder in (root, root / _SUBFOLDER)
        for name in _FILES
        for path in folder.glob(name)
    ]
    stats = ((path, path.stat()) for path in sorted(paths) if path.exists())
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


def read_files(source: str, revision: str | None = None) -> AdapterWeights:
    """Read an adapter from a folder or a Hub repository into CPU memory.

    Raises:
        ConfigError: files are missing or damaged.
        UnsupportedModelError: the adapter is not a plain LoRA, or has other tensors.
    """
    folder = _folder(source, revision)
    try:
        fields = json.loads((folder / _CONFIG).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(
            f"{folder / _CONFIG} must be a JSON file, got {error}; download it again"
        ) from error
    config = AdapterConfig.of(fields if isinstance(fields, dict) else {}, source)
    files, tensors = sorted(folder.glob(_WEIGHTS)), dict[str, Tensor]()
    if not files:
        raise ConfigError(
            f"{folder} must hold {_WEIGHTS}, got "
            f"{shown([path.name for path in folder.iterdir()])}; "
            "save the adapter with safe_serialization=True"
        )
    for path in files:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path} must be a whole safetensors file, got {error}; download it again"
            ) from error
    return AdapterWeights(config, _paired(tensors, source))


def read_peft(target: PreTrainedModel, name: str) -> AdapterWeights | None:
    """Read an adapter of a PEFT target; return None if the target has no adapter of this name.

    Raises:
        UnsupportedModelError: the adapter is not a plain LoRA, or is active or merged.
    """
    configs = getattr(target, "peft_config", None)
    if not isinstance(configs, Mapping) or name not in configs:
        return None
    config, layers = AdapterConfig.of(configs[name].to_dict(), f"adapter {name!r}"), {}
    for path, module in text_decoder(target).named_modules():
        if name not in getattr(module, "lora_A", ()):
            continue
        part: Any = module
        is_active = name in part.active_adapters and not part.disable_adapters
        if is_active or name in part.merged_adapters:
            raise UnsupportedModelError(
                f"a Uno adapter must not change the target itself, got {name!r}, which is "
                f"{'active' if is_active else 'merged'} in {type(target).__name__}; choose another "
                "adapter with set_adapter(), or call disable_adapters()"
            )
        layers[path] = LowRank(*(side[name].weight.detach() for side in (part.lora_A, part.lora_B)))
    return AdapterWeights(config, layers)


def _folder(source: str, revision: str | None) -> Path:
    """Return the folder with the adapter's config, inside a folder or a downloaded repository."""
    root, reason = Path(source), None
    if not root.is_dir():
        patterns = [f"{prefix}{name}" for prefix in ("", f"{_SUBFOLDER}/") for name in _FILES]
        try:
            root = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
        except (OSError, ValueError) as error:  # caused by the Hub, the network or the id
            reason = error
    for folder in (root, root / _SUBFOLDER):
        if (folder / _CONFIG).is_file():
            return folder
    raise ConfigError(
        f"a Uno adapter must be a folder or a Hub repository with {_CONFIG}, or the name of an "
        f"adapter of the target, got {source!r}; check the path or the id "
        f"({reason or 'the folder has none'})"
    ) from reason


def _paired(tensors: Mapping[str, Tensor], name: str) -> dict[str, LowRank]:
    """Pair the tensors of a file by layer."""
    sides: dict[str, dict[str, Tensor]] = {}
    others = []
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key)
        if match is None or tensor.dtype not in COMPUTE_DTYPES or tensor.ndim != 2:
            others.append(key)
        else:
            sides.setdefault(match[1], {})[match[2]] = tensor
    if others:
        raise UnsupportedModelError(
            "tensors of a Uno adapter must be named model.layers.N.self_attn.q_proj.lora_A.weight "
            f"and so on, got {shown(others)} in {name}; pass the adapter of a Uno checkpoint"
        )
    single = sorted(layer for layer, pair in sides.items() if len(pair) == 1)
    if single:
        raise ConfigError(
            f"each layer of a Uno adapter must have lora_A and lora_B, got one of them in "
            f"{shown(single)} of {name}; download it again"
        )
    return {layer: LowRank(pair["A"], pair["B"]) for layer, pair in sides.items()}
