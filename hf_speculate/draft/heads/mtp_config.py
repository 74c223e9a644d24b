"""Reads the config of MTP layers: those in a target's checkpoint, and speculators "mtp" heads."""

from typing import NamedTuple

from hf_speculate.draft.heads.config_source import ConfigSource
from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.kinds import text_fields, unserved
from hf_speculate.draft.heads.layer_config import LayerConfig, read_layer_config
from hf_speculate.models.layer_capture import FINAL_STATE

# Families whose MTP layers lie under "mtp." in the checkpoint; transformers ignores them.
PREFIXED_TARGETS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
# The others' drafts are compared with those of transformers in our tests.
SERVED_TARGETS = ("deepseek_v3", "glm4_moe", *PREFIXED_TARGETS)
_DENSE_LAYERS = ("llama", "mistral", "qwen2", "qwen3")


class MtpConfig(NamedTuple):
    """A speculators "mtp" head's config, normalised."""

    spec: HeadSpec
    layers: LayerConfig


def describe_mtp(source: ConfigSource) -> HeadSpec:
    """The spec of MTP layers in either format.

    Args:
        source: the config.

    Raises:
        ConfigError: layers are given.
        UnsupportedModelError: layers of this family are not served.
    """
    source.check_no_layers("MTP layers, which read the last state")
    if source.found.format == "speculators":
        return read_mtp(source).spec
    config = source.config
    model_type = config.get("model_type")
    if model_type not in SERVED_TARGETS:
        raise unserved(f"MTP layers of {model_type!r}", f"MTP layers of {' or '.join(SERVED_TARGETS)}")
    text = text_fields(config)
    return HeadSpec(
        kind="mtp",
        format=source.found.format,
        name=source.name,
        hidden_layers=(FINAL_STATE,),
        hidden_size=int(text["hidden_size"]),
        target_hidden_size=int(text["hidden_size"]),
        vocab_size=int(text["vocab_size"]),
        draft_vocab_size=int(text["vocab_size"]),
        num_target_layers=int(text["num_hidden_layers"]),
    )


def read_mtp(source: ConfigSource) -> MtpConfig:
    """The speculators "mtp" head that a config describes.

    Args:
        source: the config.

    Raises:
        UnsupportedModelError: its layer is of a kind that is not served.
    """
    fields = source.layer_fields
    if fields.get("model_type") not in _DENSE_LAYERS:
        raise unserved(f"an MTP layer of {fields.get('model_type')!r}", f"a layer of {', '.join(_DENSE_LAYERS)}")
    layers = read_layer_config({**fields, "num_hidden_layers": 1})
    return MtpConfig(source.spec(layers, (FINAL_STATE,)), layers)
