"""Wrapper probe: find the arguments that a model passes on unchanged to its text decoder.

A forward can take a 4D mask, or positions that its signature lacks, only if they reach the text
decoder. The probe builds the model on the meta device from its config, with one layer in each part,
and runs it on text until the decoder is called. No user code runs, and no weights are allocated.
"""

import copy
import inspect
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_speculate.cache.layers import holding, window_of
from hf_speculate.compat import set_attention_name
from hf_speculate.model_state import model_state
from hf_speculate.models.language_model import cache_name
from hf_speculate.models.text_decoder import text_decoder

# number of rows, cached tokens and new tokens in the probe's forward
_NUM_ROWS, _NUM_CACHED, _NUM_QUERY = 2, 3, 2
_META = torch.device("meta")
_LAYER_TYPES = ("full_attention", "sliding_attention")  # layer types with different masks


class HandedOn(NamedTuple):
    """Arguments that are passed on unchanged to the text decoder."""

    mask: bool = True  # whether a 4D mask, or one per layer type, is passed on
    positions: bool = True  # whether position ids are passed on, by name or in **kwargs
    failure: str = ""  # error of a failed probe; empty if it succeeded

    @classmethod
    def of(cls, model: PreTrainedModel) -> "HandedOn":
        """Return the arguments that the model passes on, probed once per class.

        Enabling a model between calls may change its class.
        """
        return model_state(model).get((cls, type(model)), partial(find_handed_on, model))


EVERYTHING = HandedOn()


class _StopForward(Exception):
    """Ends the probe's forward; not an error."""


def find_handed_on(model: PreTrainedModel) -> HandedOn:
    """Find the arguments that a model passes on to its decoder; all of them without a wrapper.

    Encoder-decoders need no probe, because their caches are dynamic and their forwards name the
    position arguments.
    """
    if text_decoder(model) is model.base_model or model.config.is_encoder_decoder:
        return EVERYTHING
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    has_two_masks = len({window_of(layer) for layer in holding(layers)}) > 1
    failure = ""
    # Some parts cannot be built with one layer, and some forwards reject a mask per layer type.
    for num_layers, is_by_type in product((1, None), (True, False) if has_two_masks else (False,)):
        try:
            with torch.random.fork_rng(devices=[]), _META, torch.no_grad():
                handed_on = _probed(
                    type(model)(_shortened(model.config, num_layers)).eval(), is_by_type
                )
            return handed_on._replace(mask=handed_on.mask and is_by_type == has_two_masks)
        except Exception as error:  # noqa: BLE001  # an unknown class may raise any error
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    return HandedOn(False, _names_positions(model), failure)


def _probed(meta_model: PreTrainedModel, has_two_masks: bool) -> HandedOn:
    """Run a meta-device model after cached text, and return the arguments that it passes on."""
    cache = DynamicCache()
    state = torch.empty(_NUM_ROWS, 1, _NUM_CACHED, 1, device=_META)
    cache.update(state, state, 0)
    shape = (_NUM_ROWS, 1, _NUM_QUERY, _NUM_CACHED + _NUM_QUERY)
    masks = {
        layer_type: torch.empty(shape, dtype=meta_model.dtype, device=_META)
        for layer_type in _LAYER_TYPES[: 1 + has_two_masks]
    }
    # both [B, Q]
    ids, positions = torch.zeros(2, _NUM_ROWS, _NUM_QUERY, dtype=torch.int64, device=_META)
    received: dict[str, Any] = {}

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.update(kwargs)
        raise _StopForward

    text_decoder(meta_model).register_forward_pre_hook(stop, with_kwargs=True)
    text: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": positions,
        cache_name(meta_model): cache,
    }
    text["attention_mask"] = masks if has_two_masks else masks[_LAYER_TYPES[0]]
    try:
        meta_model(**text, use_cache=True, return_dict=True)
    except _StopForward:
        sent, arrived = list(masks.values()), tree_leaves(received.get("attention_mask"))
        is_same = all(any(leaf is mask for mask in sent) for leaf in arrived)
        return HandedOn(
            is_same, _names_positions(meta_model) or received.get("position_ids") is positions
        )
    raise RuntimeError("its forward does not call its text decoder")


def _names_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def _shortened(config: PreTrainedConfig, num_layers: int | None) -> PreTrainedConfig:
    """Return a copy of a config with `num_layers` layers in each part, and lists of this length.

    None keeps all layers. The copy uses eager attention, which needs no package and no device.
    """
    config = copy.deepcopy(config)
    for sub_config in _parts_of(config):
        set_attention_name(sub_config, "eager")
    for sub_config in _parts_of(config) if num_layers else ():
        num_before = getattr(sub_config, "num_hidden_layers", None)
        for name, value in list(vars(sub_config).items()):
            if isinstance(value, list) and len(value) == num_before:
                setattr(sub_config, name, value[:num_layers])
        if isinstance(num_before, int):
            sub_config.num_hidden_layers = num_layers
    return config


def _parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts_of(value)
