"""Loads DFlash and DSpark heads, in z-lab's and the speculators format."""

from dataclasses import replace
from typing import Any

from hf_speculate.draft.heads.dflash import BlockDrafter, DFlashNetwork, DFlashOptions
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.kinds import HeadKind, unserved
from hf_speculate.draft.heads.layer_config import LayerConfig, read_layer_config
from hf_speculate.draft.heads.load_network import ConfigSource, HeadConfig, LoadRequest, load_network
from hf_speculate.draft.heads.target_parts import TargetShape
from hf_speculate.errors import ConfigError

_DEFAULT_BLOCK_SIZE = {"z-lab": 16, "speculators": 8}
_DEFAULT_THETA = {"z-lab": 1e6, "speculators": 1e4}
_MUSE_GLIMMER = "muse_glimmer_assistant"  # transformers' own class of z-lab's network


def read_dflash(source: ConfigSource) -> HeadConfig[DFlashOptions]:
    """The DFlash or DSpark head that a config describes."""
    config, found = source.config, source.found
    fields: dict[str, Any] = {**config, **(config.get("dflash_config") or {})}
    layers = read_layer_config(source.layer_fields, 5e5 if _is_muse(config) else _DEFAULT_THETA[found.format])
    layers = _with_windows(layers, config, fields)
    block_size = int(fields.get("block_size") or _DEFAULT_BLOCK_SIZE[found.format])
    if fields.get("mask_token_id") is None:
        raise ConfigError(
            f"mask_token_id must be set for a DFlash head, got none; add it to config.json of {source.name}"
        )
    ids = source.hidden_layers or _layer_ids(fields, found, layers.num_layers, source.shape)
    samples_from_anchor = bool(fields.get("sample_from_anchor", found.kind == "dspark"))
    options = DFlashOptions(
        block_size=block_size,
        mask_token_id=int(fields["mask_token_id"]),
        num_states=len(ids),
        is_causal=_causal_layers(config, fields, layers),
        samples_from_anchor=samples_from_anchor,
        embedding_scale=_optional_float(fields.get("input_embedding_scale")),
        logit_scale=float(fields.get("output_multiplier") or 1.0),
        softcapping=_optional_float(fields.get("final_logit_softcapping")) or None,
        markov_head=_markov_head(fields) if found.kind == "dspark" else None,
        markov_reaches_confidence=bool(fields.get("confidence_head_with_markov", False)),
    )
    most = block_size if samples_from_anchor else block_size - 1
    num_target_layers = config.get("num_target_layers")
    spec = source.spec(
        layers,
        ids,
        max_draft_tokens=most,
        num_target_layers=None if num_target_layers is None else int(num_target_layers),
    )
    spec = replace(spec, default_draft_tokens=min(spec.default_draft_tokens or most, most))
    return HeadConfig(spec, layers, options)


def _layer_ids(fields: dict[str, Any], found: HeadKind, num_layers: int, shape: TargetShape) -> tuple[int, ...]:
    """Ids of target states as inputs of layers: z-lab names layers by their outputs, speculators by their inputs."""
    if found.format == "speculators":
        given = fields.get("aux_hidden_state_layer_ids")
        if not given:
            raise ConfigError(
                "aux_hidden_state_layer_ids must be set for a speculators DFlash head, got none; pass aux_layers="
            )
        return tuple(int(layer) for layer in given)
    given = fields.get("target_layer_ids")
    if given is None:
        first, last = 1, shape.num_layers - 3
        steps = max(num_layers - 1, 1)
        given = [round(first + index * (last - first) / steps) for index in range(num_layers)]
    return tuple(int(layer) + 1 for layer in given)


def _with_windows(layers: LayerConfig, config: dict[str, Any], fields: dict[str, Any]) -> LayerConfig:
    """The layers with the windows that DFlash's own fields name."""
    types = config.get("layer_types") or (config.get("transformer_layer_config") or {}).get("layer_types")
    window = fields.get("swa_window_size")
    if _is_muse(config):  # whose windows count the tokens before a query without the query itself
        windows = layers.windows if types else (int(config.get("sliding_window") or 2048),) * layers.num_layers
        return replace(layers, windows=tuple(None if one is None else one + 1 for one in windows))
    if fields.get("use_swa") and "sliding_attention" not in (types or ()):
        window = window or config.get("sliding_window")
        if window is None:
            raise ConfigError("swa_window_size must be set with use_swa, got none; add it to dflash_config")
        return replace(layers, windows=(int(window),) * layers.num_layers)
    if window is not None:
        return replace(layers, windows=tuple(None if one is None else int(window) for one in layers.windows))
    return layers


def _causal_layers(config: dict[str, Any], fields: dict[str, Any], layers: LayerConfig) -> tuple[bool, ...]:
    """By layer: what the config says for all; otherwise layers with a window are causal, and others are not."""
    for given in (config.get("is_causal"), fields.get("causal"), False if _is_muse(config) else None):
        if given is not None:
            return (bool(given),) * layers.num_layers
    if fields.get("sliding_window_non_causal"):
        return (False,) * layers.num_layers
    return tuple(window is not None for window in layers.windows)


def _markov_head(fields: dict[str, Any]) -> str | None:
    if not fields.get("markov_rank"):
        return None
    kind = str(fields.get("markov_head_type") or "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise unserved(f"a DSpark head with markov_head_type {kind!r}", "'vanilla', 'gated' or 'rnn'")
    return kind


def _is_muse(config: dict[str, Any]) -> bool:
    return bool(config.get("model_type") == _MUSE_GLIMMER)


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def load_dflash(request: LoadRequest) -> DraftHead:
    """A DFlash or DSpark head."""
    config = read_dflash(request.source)
    return request.head(config.spec, load_network(request, DFlashNetwork, config), BlockDrafter)
