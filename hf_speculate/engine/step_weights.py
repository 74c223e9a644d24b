"""Step weights: the bytes of a model's weights that a decoding step reads."""

from functools import partial
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.model_state import model_state
from hf_speculate.models.module_walk import weight_bytes


class StepWeights(NamedTuple):
    """What a decoding step reads in one process, each weight once."""

    num_bytes: int
    is_quantised: bool  # whether there are quantised weights, whose bytes say little of seconds

    @classmethod
    def of(cls, model: PreTrainedModel) -> "StepWeights":
        """The weights of a model as they were in the first call that asked."""
        return model_state(model).get(cls, partial(step_weights, model))


def step_weights(model: PreTrainedModel) -> StepWeights:
    """The weights of a step.

    An encoder is not counted, nor a table of embeddings that is not the language modelling head too: a step reads one
    row of it for each token.
    """
    decoder: nn.Module = model.get_decoder() if model.config.is_encoder_decoder else model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    parts = [decoder] if head is None else [decoder, head]
    weights: dict[int, Tensor] = {id(weight): weight for part in parts for weight in part.parameters()}
    is_quantised = getattr(model.config, "quantization_config", None) is not None or any(
        map(_is_packed, weights.values())
    )
    if is_quantised:  # some libraries keep them in buffers
        weights |= {id(buffer): buffer for buffer in chain(*(part.buffers() for part in parts))}
    shared = set() if head is None else {id(weight) for weight in head.parameters()}
    for weight in table.parameters():
        if id(weight) not in shared:
            weights.pop(id(weight), None)
    num_bytes = sum(map(weight_bytes, weights.values()))
    return StepWeights(num_bytes // tensor_parallel_size(model), is_quantised)


def _is_packed(weight: Tensor) -> bool:
    """Whether a parameter is of another class, as libraries mark quantised ones; a split model's are of one, too."""
    return type(weight) is not nn.Parameter and not hasattr(weight, "device_mesh")
