"""Loads EAGLE-3 and P-EAGLE heads."""

from dataclasses import replace
from functools import partial

from hf_speculate.draft.heads.chain import ChainDrafter
from hf_speculate.draft.heads.eagle3 import Eagle3Network
from hf_speculate.draft.heads.eagle3_config import read_eagle3
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.load_network import load_network
from hf_speculate.draft.heads.load_request import LoadRequest
from hf_speculate.draft.heads.parallel import ParallelDrafter
from hf_speculate.draft.heads.weights import shapes_of


def load_eagle3(request: LoadRequest) -> DraftHead:
    """An EAGLE-3, EAGLE-3.1 or P-EAGLE head.

    Args:
        request: what is to be loaded.

    Raises:
        ConfigError: see `load_network`.
        UnsupportedModelError: see `load_network`.
    """
    spec, layers, options = read_eagle3(request.source)
    shapes = shapes_of(request.folder)
    options = replace(
        options,
        fc_norm=options.fc_norm or "fc_norm.0.weight" in shapes,
        norm_before_fc=options.norm_before_fc or "input_norm.weight" in shapes,
    )
    network = load_network(request, Eagle3Network, spec, layers, options)
    drafter = ChainDrafter if options.mask_token_id is None else ParallelDrafter
    return DraftHead(spec, network, request.target.config, partial(drafter, network))
