"""Loads DFlash and DSpark heads."""

from functools import partial

import torch

from hf_speculate.draft.heads.block import BlockDrafter
from hf_speculate.draft.heads.dflash import DFlashNetwork
from hf_speculate.draft.heads.dflash_config import read_dflash
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.layers import Rotary
from hf_speculate.draft.heads.load_eagle3 import check_shared_tables, take_vocabulary
from hf_speculate.draft.heads.load_request import LoadRequest
from hf_speculate.draft.heads.weights import load_into, shapes_of, weights_of
from hf_speculate.errors import ConfigError


def load_dflash(request: LoadRequest) -> DraftHead:
    """A DFlash or DSpark head.

    Args:
        request: what is to be loaded.

    Raises:
        ConfigError: the states that it reads are not as many as its weights take.
        UnsupportedModelError: the weights do not fit the config or the target.
    """
    folder, shape = request.folder, request.shape
    config = read_dflash(folder.config, request.found, folder.name, shape, request.hidden_layers)
    shapes = shapes_of(folder)
    num = shapes["fc.weight"][1] / config.spec.target_hidden_size if "fc.weight" in shapes else 0
    if num and num != config.options.num_states:
        raise ConfigError(
            f"{folder.source} must read as many target states as fc.weight joins, {num:g} of width "
            f"{config.spec.target_hidden_size}, got layers {list(config.spec.hidden_layers)}; pass aux_layers="
        )
    weights = weights_of(folder)
    vocabulary = take_vocabulary(weights, shape.vocab_size).to(request.device)
    check_shared_tables(config.spec, shapes, vocabulary)
    rotary = Rotary(config.layers, request.device)
    with torch.device("meta"):
        network = DFlashNetwork(
            config.layers, config.options, shapes, config.spec.target_hidden_size, vocabulary, rotary
        )
    load_into(network, weights, folder.source, request.device, request.dtype)
    return DraftHead(config.spec, network, request.target.config, partial(BlockDrafter, network))
