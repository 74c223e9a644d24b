"""Builds the network of a head that reads inner layers, EAGLE-3 or DFlash, and gives it its weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.layer_config import LayerConfig
from hf_speculate.draft.heads.layers import Rotary
from hf_speculate.draft.heads.load_request import LoadRequest
from hf_speculate.draft.heads.vocabulary import DraftVocabulary, read_offsets
from hf_speculate.draft.heads.weights import load_into, shapes_of, weights_of
from hf_speculate.errors import ConfigError, UnsupportedModelError

_Network = TypeVar("_Network", bound=nn.Module, covariant=True)


class NetworkClass(Protocol[_Network]):
    """Makes a network from its config and the shapes of its weights."""

    def __call__(
        self,
        config: LayerConfig,
        options: Any,
        shapes: Mapping[str, Sequence[int]],
        target_hidden_size: int,
        vocabulary: DraftVocabulary,
        rotary: Rotary,
    ) -> _Network:
        """The network, on the meta device."""


def load_network(
    request: LoadRequest, make: NetworkClass[_Network], spec: HeadSpec, layers: LayerConfig, options: Any
) -> _Network:
    """A network with the weights of a folder.

    Args:
        request: what is to be loaded.
        make: the network's class.
        spec: of the head.
        layers: of the head.
        options: that the class takes; `num_states` says how many states of the target are joined.

    Raises:
        ConfigError: the states that it reads are not as many as its weights take.
        UnsupportedModelError: the weights do not fit the config or the target.
    """
    folder, shapes = request.folder, shapes_of(request.folder)
    num = shapes["fc.weight"][1] / spec.target_hidden_size if "fc.weight" in shapes else options.num_states
    if num != options.num_states:
        raise ConfigError(
            f"{folder.source} must read as many target states as fc.weight joins, {num:g} of width "
            f"{spec.target_hidden_size}, got layers {list(spec.hidden_layers)}; pass aux_layers="
        )
    weights = weights_of(folder)
    vocabulary = _take_vocabulary(weights, request.source.shape.vocab_size).to(request.device)
    _check_shared_tables(spec, shapes, vocabulary)
    rotary = Rotary(layers, request.device)
    with torch.device("meta"):
        network = make(layers, options, shapes, spec.target_hidden_size, vocabulary, rotary)
    load_into(network, weights, folder.source, request.device, request.dtype)
    return network


def _take_vocabulary(weights: dict[str, Tensor], vocab_size: int) -> DraftVocabulary:
    """The draft vocabulary that `d2t` and `t2d` describe; both are taken out of the weights."""
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    return DraftVocabulary(vocab_size, None if d2t is None else read_offsets(d2t, t2d, vocab_size))


def _check_shared_tables(spec: HeadSpec, shapes: Mapping[str, Sequence[int]], vocabulary: DraftVocabulary) -> None:
    """Refuse a head that lacks a table which its target cannot lend."""
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
