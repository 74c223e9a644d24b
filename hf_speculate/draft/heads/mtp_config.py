"""Reads the config of MTP layers: those in a target's checkpoint, and speculators "mtp" heads."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.kinds import HeadKind, unserved
from hf_speculate.draft.heads.layer_config import LayerConfig, read_layer_config
from hf_speculate.draft.heads.speculators_config import proposal_of
from hf_speculate.draft.heads.target_parts import TargetShape
from hf_speculate.errors import ConfigError
from hf_speculate.models.layer_capture import FINAL_STATE

# Families whose MTP layers are compared with transformers' own drafts in our tests.
SERVED_TARGETS = ("deepseek_v3", "glm4_moe")
_DENSE_LAYERS = ("llama", "mistral", "qwen2", "qwen3")


class MtpConfig(NamedTuple):
    """A speculators "mtp" head's config, normalised."""

    spec: HeadSpec
    layers: LayerConfig


def describe_mtp(
    config: dict[str, Any],
    found: HeadKind,
    name: str,
    shape: TargetShape,
    hidden_layers: Sequence[int] | None = None,
) -> HeadSpec:
    """The spec of MTP layers in either format.

    Args:
        config: content of `config.json`.
        found: the kind and the format.
        name: of the folder.
        shape: of the target.
        hidden_layers: must be None, because MTP layers read the target's last state.

    Raises:
        ConfigError: layers are given.
        UnsupportedModelError: layers of this family are not served.
    """
    if hidden_layers is not None:
        raise ConfigError(
            f"aux_layers must be left out for MTP layers, which read the last state, got {list(hidden_layers)}; "
            "leave it out"
        )
    if found.format == "speculators":
        return read_mtp(config, found, name).spec
    model_type = config.get("model_type")
    if model_type not in SERVED_TARGETS:
        raise unserved(f"MTP layers of {model_type!r}", f"MTP layers of {' or '.join(SERVED_TARGETS)}")
    return HeadSpec(
        kind="mtp",
        format=found.format,
        name=name,
        hidden_layers=(FINAL_STATE,),
        hidden_size=int(config["hidden_size"]),
        target_hidden_size=int(config["hidden_size"]),
        vocab_size=int(config["vocab_size"]),
        draft_vocab_size=int(config["vocab_size"]),
        num_target_layers=int(config["num_hidden_layers"]),
    )


def read_mtp(config: dict[str, Any], found: HeadKind, name: str) -> MtpConfig:
    """The speculators "mtp" head that a `config.json` describes.

    Args:
        config: the file's content.
        found: the kind and the format.
        name: of the folder.

    Raises:
        UnsupportedModelError: its layer is of a kind that is not served.
    """
    inner: dict[str, Any] = config.get("transformer_layer_config") or config
    if inner.get("model_type") not in _DENSE_LAYERS:
        raise unserved(f"an MTP layer of {inner.get('model_type')!r}", f"a layer of {', '.join(_DENSE_LAYERS)}")
    layers = read_layer_config({**inner, "num_hidden_layers": 1})
    proposal = proposal_of(config)
    vocab_size = int(inner["vocab_size"])
    spec = HeadSpec(
        kind="mtp",
        format=found.format,
        name=name,
        hidden_layers=(FINAL_STATE,),
        hidden_size=layers.hidden_size,
        target_hidden_size=layers.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        default_draft_tokens=proposal.num_tokens,
        max_position_embeddings=layers.max_position_embeddings,
        target_name=proposal.target_name,
    )
    return MtpConfig(spec, layers)
