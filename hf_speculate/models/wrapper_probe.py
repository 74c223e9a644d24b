"""The wrapper probe: finds which arguments a model passes on unchanged to its text decoder.

A forward may be given a mask of four dimensions, or positions that its signature does not name, only if they reach the
text decoder. The probe copies the model to the meta device, from its config with one layer in each part, and calls the
copy with text up to the decoder: nothing of the user's runs, and no weights are made.
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

_NUM_ROWS, _NUM_CACHED, _NUM_QUERY = 2, 3, 2  # rows, tokens in the cache and new tokens of the probe's forward
_META = torch.device("meta")
_LAYER_TYPES = ("full_attention", "sliding_attention")  # types of layers that need different masks


class HandedOn(NamedTuple):
    """The arguments of a model's forward that reach its text decoder unchanged."""

    mask: bool = True  # a mask of four dimensions, or one for each type of layer
    positions: bool = True  # position ids, which the forward may name or hand on
    failure: str = ""  # what went wrong in the probe, which then found nothing

    @classmethod
    def of(cls, model: PreTrainedModel) -> "HandedOn":
        """Return the arguments that the model passes on; probed once by class, as it may be enabled between calls."""
        return model_state(model).get((cls, type(model)), partial(find_handed_on, model))


EVERYTHING = HandedOn()


class _StopForward(Exception):  # not an error
    """Ends the probe's forward at the text decoder."""


def find_handed_on(model: PreTrainedModel) -> HandedOn:
    """Return the arguments that the model passes on: all if nothing wraps its decoder.

    Nothing is asked of encoder-decoders, whose caches are dynamic and whose forwards name the positions that they take.
    """
    if text_decoder(model) is model.base_model or model.config.is_encoder_decoder:
        return EVERYTHING
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    has_two_masks = len({window_of(layer) for layer in holding(layers)}) > 1
    failure = ""
    # some parts cannot be made with one layer, and some forwards fail for a mask of each type of layer
    for num_layers, is_by_type in product((1, None), (True, False) if has_two_masks else (False,)):
        try:
            with torch.random.fork_rng(devices=[]), _META, torch.no_grad():
                handed_on = _probed(type(model)(_shortened(model.config, num_layers)).eval(), is_by_type)
            return handed_on._replace(mask=handed_on.mask and is_by_type == has_two_masks)
        except Exception as error:  # noqa: BLE001  # whatever the code of an unknown class raises
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    return HandedOn(False, _names_positions(model), failure)


def _probed(twin: PreTrainedModel, has_two_masks: bool) -> HandedOn:
    """Return the arguments that a model on the meta device passes on in a forward of text after a cached text."""
    cache = DynamicCache()
    state = torch.empty(_NUM_ROWS, 1, _NUM_CACHED, 1, device=_META)
    cache.update(state, state, 0)
    shape = (_NUM_ROWS, 1, _NUM_QUERY, _NUM_CACHED + _NUM_QUERY)
    masks = {
        layer_type: torch.empty(shape, dtype=twin.dtype, device=_META)
        for layer_type in _LAYER_TYPES[: 1 + has_two_masks]
    }
    ids, positions = torch.zeros(2, _NUM_ROWS, _NUM_QUERY, dtype=torch.int64, device=_META)  # both [B, Q]
    received: dict[str, Any] = {}

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.update(kwargs)
        raise _StopForward

    text_decoder(twin).register_forward_pre_hook(stop, with_kwargs=True)
    text: dict[str, Any] = {"input_ids": ids, "position_ids": positions, cache_name(twin): cache}
    text["attention_mask"] = masks if has_two_masks else masks[_LAYER_TYPES[0]]
    try:
        twin(**text, use_cache=True, return_dict=True)
    except _StopForward:
        sent, arrived = list(masks.values()), tree_leaves(received.get("attention_mask"))
        is_same = all(any(leaf is mask for mask in sent) for leaf in arrived)
        return HandedOn(is_same, _names_positions(twin) or received.get("position_ids") is positions)
    raise RuntimeError("its forward does not call its text decoder")


def _names_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def _shortened(config: PreTrainedConfig, num_layers: int | None) -> PreTrainedConfig:
    """A copy of a config in which each part has `num_layers` layers, and its lists as many entries; all if it is None.

    Its attention is the eager one, which needs neither a package nor a device.
    """
    config = copy.deepcopy(config)
    for part in _parts_of(config):
        set_attention_name(part, "eager")
    for part in _parts_of(config) if num_layers else ():
        num_before = getattr(part, "num_hidden_layers", None)
        for name, value in list(vars(part).items()):
            if isinstance(value, list) and len(value) == num_before:
                setattr(part, name, value[:num_layers])
        if isinstance(num_before, int):
            part.num_hidden_layers = num_layers
    return config


def _parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts_of(value)
