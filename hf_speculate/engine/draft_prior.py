"""The prior of a call's draft source: what its rounds are likely to cost, from the weights that they read."""

from collections.abc import Iterable
from itertools import chain

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.engine.distributed import tensor_parallel_size
from hf_speculate.schedule import DraftPrior


def draft_prior(target: PreTrainedModel, draft: PreTrainedModel | None, config: SpeculationConfig) -> DraftPrior:
    """What is known of a draft source before its first round."""
    is_known = not is_quantised(target)
    if draft is not None:  # the first layers of the target, too
        return DraftPrior(cost_ratio(target, draft), is_verification_known=is_known and not is_quantised(draft))
    drafter = config.drafter
    if drafter is None:
        return DraftPrior(0.0, is_verification_known=is_known)  # prompt lookup runs no model
    num_bytes = getattr(drafter, "num_step_bytes", None)  # of a draft head; nothing is known of other drafters
    ratio = None if num_bytes is None else num_bytes(target) / max(num_step_bytes(target), 1)
    return DraftPrior(ratio, getattr(drafter, "drafts_at_once", False), is_known)


def cost_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """The bytes that a draft step reads in one process over those of a plain step."""
    return num_step_bytes(draft) / max(num_step_bytes(target), 1)


def num_step_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decoding step reads in one process, once each.

    An encoder is not counted, nor a table of embeddings that is not the language modelling head too: a step reads one
    row of it for each token.
    """
    decoder: nn.Module = model.get_decoder() if model.config.is_encoder_decoder else model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    parts = [decoder] if head is None else [decoder, head]
    weights = {id(weight): weight for part in parts for weight in _weights(part, is_quantised(model))}
    left_out = {id(weight) for weight in table.parameters()}
    if head is not None:
        left_out -= {id(weight) for weight in head.parameters()}
    return sum(map(_num_bytes, (weight for key, weight in weights.items() if key not in left_out))) // (
        tensor_parallel_size(model)
    )


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether a model holds quantised weights, whose bytes say little of the seconds that a step takes."""
    if getattr(model.config, "quantization_config", None) is not None:
        return True
    return any(type(weight) is not nn.Parameter and not hasattr(weight, "device_mesh") for weight in model.parameters())


def _weights(module: nn.Module, with_buffers: bool) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers()) if with_buffers else module.parameters()


def _num_bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
