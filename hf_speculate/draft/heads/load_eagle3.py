"""Loads EAGLE-3 and P-EAGLE heads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_speculate.draft.heads.chain import ChainDrafter
from hf_speculate.draft.heads.eagle3 import Eagle3Network, Eagle3Options
from hf_speculate.draft.heads.eagle3_config import Eagle3Config, read_eagle3
from hf_speculate.draft.heads.head import DraftHead, HeadSpec
from hf_speculate.draft.heads.layers import Rotary
from hf_speculate.draft.heads.load_request import LoadRequest
from hf_speculate.draft.heads.parallel import ParallelDrafter
from hf_speculate.draft.heads.vocabulary import DraftVocabulary, read_offsets
from hf_speculate.draft.heads.weights import load_into, shapes_of, weights_of
from hf_speculate.errors import ConfigError, UnsupportedModelError


def load_eagle3(request: LoadRequest) -> DraftHead:
    """An EAGLE-3, EAGLE-3.1 or P-EAGLE head.

    Args:
        request: what is to be loaded.

    Raises:
        ConfigError: the states that it reads are not as many as its weights take.
        UnsupportedModelError: the weights do not fit the config or the target.
    """
    folder, shape = request.folder, request.shape
    config = read_eagle3(folder.config, request.found, folder.name, shape, request.hidden_layers)
    shapes = shapes_of(folder)
    options = _completed(config, shapes, folder.source)
    weights = weights_of(folder)
    vocabulary = take_vocabulary(weights, shape.vocab_size).to(request.device)
    check_shared_tables(config.spec, shapes, vocabulary)
    rotary = Rotary(config.layers, request.device)
    with torch.device("meta"):
        network = Eagle3Network(config.layers, options, shapes, config.spec.target_hidden_size, vocabulary, rotary)
    load_into(network, weights, folder.source, request.device, request.dtype)
    drafter = ChainDrafter if options.mask_token_id is None else ParallelDrafter
    return DraftHead(config.spec, network, request.target.config, partial(drafter, network))


def take_vocabulary(weights: dict[str, Tensor], vocab_size: int) -> DraftVocabulary:
    """The draft vocabulary that a file's `d2t` and `t2d` describe, which are taken out of the weights.

    Args:
        weights: of a head, changed in place.
        vocab_size: V.

    Raises:
        UnsupportedModelError: see `read_offsets`.
    """
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    return DraftVocabulary(vocab_size, None if d2t is None else read_offsets(d2t, t2d, vocab_size))


def check_shared_tables(spec: HeadSpec, shapes: Mapping[str, Sequence[int]], vocabulary: DraftVocabulary) -> None:
    """Refuse a head that lacks a table which its target cannot lend.

    Args:
        spec: of the head.
        shapes: of its weights by name.
        vocabulary: which ids it proposes.

    Raises:
        UnsupportedModelError: its width is not the target's, or it proposes only some of the target's ids.
    """
    missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in shapes]
    if missing and spec.hidden_size != spec.target_hidden_size:
        raise UnsupportedModelError(
            f"{spec.name} of width {spec.hidden_size} must have {' and '.join(missing)} of its own, for the target's "
            f"are of width {spec.target_hidden_size}, got neither; save the head with them"
        )
    num_columns = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else vocabulary.size
    num_ids = vocabulary.size if vocabulary.target_ids is None else len(vocabulary.target_ids)
    if num_columns != num_ids:
        raise UnsupportedModelError(
            f"lm_head.weight of {spec.name} must have a row for each of the {num_ids} tokens that it proposes, got "
            f"{num_columns}; save the head with its lm_head and d2t"
        )


def _completed(config: Eagle3Config, shapes: Mapping[str, Sequence[int]], source: str) -> Eagle3Options:
    """The options, with what only the weights tell; the states must be as many as `fc` takes."""
    options = replace(
        config.options,
        fc_norm=config.options.fc_norm or "fc_norm.0.weight" in shapes,
        norm_before_fc=config.options.norm_before_fc or "input_norm.weight" in shapes,
    )
    if options.reads_aux and "fc.weight" in shapes:
        num = shapes["fc.weight"][1] / config.spec.target_hidden_size
        if num != options.num_states:
            raise ConfigError(
                f"{source} must read as many target states as fc.weight joins, {num:g} of width "
                f"{config.spec.target_hidden_size}, got layers {list(config.spec.hidden_layers)}; pass aux_layers="
            )
    return options
