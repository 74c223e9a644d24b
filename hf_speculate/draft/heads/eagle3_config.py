"""Reads the config of an EAGLE-3 or P-EAGLE head, in the original and the speculators format."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_speculate.draft.heads.eagle3 import Eagle3Options
from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.kinds import HeadKind
from hf_speculate.draft.heads.layer_config import LayerConfig, read_layer_config
from hf_speculate.draft.heads.speculators_config import proposal_of
from hf_speculate.draft.heads.target_parts import TargetShape
from hf_speculate.errors import ConfigError
from hf_speculate.models.layer_capture import FINAL_STATE


class Eagle3Config(NamedTuple):
    """A head's config, normalised."""

    spec: HeadSpec
    layers: LayerConfig
    options: Eagle3Options


def read_eagle3(
    config: dict[str, Any],
    found: HeadKind,
    name: str,
    shape: TargetShape,
    hidden_layers: Sequence[int] | None = None,
) -> Eagle3Config:
    """The head that a `config.json` describes.

    Args:
        config: the file's content.
        found: the kind and the format.
        name: of the folder.
        shape: of the target, on whose number of layers the default states depend.
        hidden_layers: ids given by the caller; None for those of the config.

    Raises:
        ConfigError: options exclude each other, or a field is missing.
    """
    inner = config.get("transformer_layer_config") or config
    eagle: dict[str, Any] = config.get("eagle_config") or {}
    layers = read_layer_config(inner)
    reads_aux = bool(eagle.get("use_aux_hidden_state", True))
    ids = tuple(hidden_layers) if hidden_layers is not None else _layer_ids(config, eagle, shape.num_layers)
    vocab_size = int(inner["vocab_size"])
    options = Eagle3Options(
        num_states=len(ids) if reads_aux else 1,
        reads_aux=reads_aux,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=_flag(config, eagle, "norm_before_fc"),
        fc_norm=_flag(config, eagle, "fc_norm"),
        norm_output=_flag(config, eagle, "norm_output"),
        logit_scale=float(config.get("logit_scale") or 1.0),
        mask_token_id=_mask_token_id(config, found),
    )
    if options.norm_before_fc and options.fc_norm:
        raise ConfigError(
            f"norm_before_fc and fc_norm must not both be set, got both in {name}; keep the one that the head was "
            "trained with"
        )
    notes = []
    if options.norm_output and found.format == "original" and not (options.fc_norm or options.norm_before_fc):
        notes.append(
            "it sets norm_output without fc_norm, as some trainers wrote for heads that do not feed back the "
            "normalised state; if the acceptance rate is low, set norm_output to false in its config.json"
        )
    proposal = proposal_of(config)
    spec = HeadSpec(
        kind=found.kind,
        format=found.format,
        name=name,
        hidden_layers=ids if reads_aux else (FINAL_STATE,),
        hidden_size=layers.hidden_size,
        target_hidden_size=int(config.get("target_hidden_size") or layers.hidden_size),
        vocab_size=vocab_size,
        draft_vocab_size=int(config.get("draft_vocab_size") or config.get("truncated_vocab_size") or vocab_size),
        default_draft_tokens=proposal.num_tokens,
        max_position_embeddings=layers.max_position_embeddings,
        target_name=proposal.target_name,
        notes=tuple(notes),
    )
    return Eagle3Config(spec, layers, options)


def _layer_ids(config: dict[str, Any], eagle: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Ids of target states as inputs of layers.

    At the top level they are that already. Nested in `eagle_config` they name layers by their outputs if the first id
    is 1, and by their inputs otherwise: trainers differ, and this rule is right for the heads that are published.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if config.get(name):
        return tuple(int(layer) for layer in config[name])
    if eagle.get(name):
        ids = [int(layer) for layer in eagle[name]]
        return tuple(layer + 1 for layer in ids) if ids[0] == 1 else tuple(ids)
    return (2, num_layers // 2, num_layers - 3)


def _flag(config: dict[str, Any], eagle: dict[str, Any], name: str) -> bool:
    return bool(config.get(name, eagle.get(name, False)))


def _mask_token_id(config: dict[str, Any], found: HeadKind) -> int | None:
    if found.kind != "peagle":
        return None
    if config.get("mask_token_id") is None:
        raise ConfigError("mask_token_id must be set for a P-EAGLE head, got none; add it to its config.json")
    return int(config["mask_token_id"])
