"""Loads EAGLE-3, EAGLE-3.1 and P-EAGLE heads, in the original and the speculators format."""

from dataclasses import replace
from typing import Any

from hf_speculate.draft.heads.chain import ChainDrafter
from hf_speculate.draft.heads.eagle3 import Eagle3Network, Eagle3Options
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.kinds import HeadKind
from hf_speculate.draft.heads.layer_config import read_layer_config
from hf_speculate.draft.heads.load_network import ConfigSource, HeadConfig, LoadRequest, load_network
from hf_speculate.draft.heads.parallel import ParallelDrafter
from hf_speculate.draft.heads.weights import shapes_of
from hf_speculate.errors import ConfigError
from hf_speculate.models.layer_capture import FINAL_STATE


def read_eagle3(source: ConfigSource) -> HeadConfig[Eagle3Options]:
    """The EAGLE-3 or P-EAGLE head that a config describes."""
    config, found = source.config, source.found
    eagle: dict[str, Any] = config.get("eagle_config") or {}
    reads_aux = bool(eagle.get("use_aux_hidden_state", True))
    ids = source.hidden_layers or _layer_ids(config, eagle, source.shape.num_layers)
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
            f"norm_before_fc and fc_norm must not both be set, got both in {source.name}; keep the one that the "
            "head was trained with"
        )
    notes = []
    if options.norm_output and found.format == "original" and not (options.fc_norm or options.norm_before_fc):
        notes.append(
            "it sets norm_output without fc_norm, as some trainers wrote for heads that do not feed back the "
            "normalised state; if the acceptance rate is low, set norm_output to false in its config.json"
        )
    layers = read_layer_config(source.layer_fields)
    spec = source.spec(layers, ids if reads_aux else (FINAL_STATE,), notes=tuple(notes))
    return HeadConfig(spec, layers, options)


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


def load_eagle3(request: LoadRequest) -> DraftHead:
    """An EAGLE-3, EAGLE-3.1 or P-EAGLE head."""
    spec, layers, options = read_eagle3(request.source)
    shapes = shapes_of(request.folder)
    options = replace(
        options,
        fc_norm=options.fc_norm or "fc_norm.0.weight" in shapes,
        norm_before_fc=options.norm_before_fc or "input_norm.weight" in shapes,
    )
    network = load_network(request, Eagle3Network, HeadConfig(spec, layers, options))
    drafter = ChainDrafter if options.mask_token_id is None else ParallelDrafter
    return request.head(spec, network, drafter)
