"""Loads DFlash and DSpark heads."""

from functools import partial

from hf_speculate.draft.heads.block import BlockDrafter
from hf_speculate.draft.heads.dflash import DFlashNetwork
from hf_speculate.draft.heads.dflash_config import read_dflash
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.load_network import load_network
from hf_speculate.draft.heads.load_request import LoadRequest


def load_dflash(request: LoadRequest) -> DraftHead:
    """A DFlash or DSpark head.

    Args:
        request: what is to be loaded.

    Raises:
        ConfigError: see `load_network`.
        UnsupportedModelError: see `load_network`.
    """
    spec, layers, options = read_dflash(request.source)
    network = load_network(request, DFlashNetwork, spec, layers, options)
    return DraftHead(spec, network, request.target.config, partial(BlockDrafter, network))
