"""Step weights: count the weight bytes that a decoding step reads."""

from functools import partial
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.model_state import model_state
from hf_speculate.models.language_model import input_table
from hf_speculate.models.module_walk import weight_bytes
from hf_speculate.schedule import DraftPrior


class StepWeights(NamedTuple):
    """The weights that a decoding step reads in one process, each counted once."""

    num_bytes: int
    is_quantised: bool  # whether any weights are quantised; their bytes predict the time poorly

    @classmethod
    def of(cls, model: PreTrainedModel) -> "StepWeights":
        """Return the step weights of a model, counted once in its first call."""
        return model_state(model).get(cls, partial(step_weights, model))


def cost_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """Return the weight bytes of a draft step divided by those of a plain step, in one process."""
    return StepWeights.of(draft).num_bytes / max(StepWeights.of(target).num_bytes, 1)


def step_weights(model: PreTrainedModel) -> StepWeights:
    """Count the weights of a decoding step, without encoders.

    An embedding table counts only if it is also the head, because a step reads only single rows
    from an embedding.
    """
    is_composite = model.config.get_text_config(decoder=True) is not model.config  # with an encoder
    decoder: nn.Module = (
        model.get_decoder() if model.config.is_encoder_decoder or is_composite else model
    )
    head, table = model.get_output_embeddings(), input_table(model)
    modules = [decoder] if head is None else [decoder, head]
    weights: dict[int, Tensor] = {
        id(weight): weight for module in modules for weight in module.parameters()
    }
    # Quantisation libraries mark their weights with special classes. The weights of a
    # tensor-parallel model have a special class, too.
    is_packed = any(
        type(weight) is not nn.Parameter and not hasattr(weight, "device_mesh")
        for weight in weights.values()
    )
    is_quantised = is_packed or getattr(model.config, "quantization_config", None) is not None
    if is_quantised:  # some libraries keep quantised weights in buffers
        weights |= {
            id(buffer): buffer for buffer in chain(*(module.buffers() for module in modules))
        }
    shared = set() if head is None else set(map(id, head.parameters()))
    unread = set() if table is None else set(map(id, table.parameters())) - shared
    num_bytes = sum(weight_bytes(weight) for key, weight in weights.items() if key not in unread)
    return StepWeights(num_bytes // tensor_parallel_size(model), is_quantised)


def draft_prior(target: PreTrainedModel, source: DraftSource) -> DraftPrior:
    """Estimate the prior for a draft source from the weight bytes of its steps."""
    weights = StepWeights.of(target)
    is_known = not weights.is_quantised
    if source.model is not None:
        is_known &= not StepWeights.of(source.model).is_quantised
        return DraftPrior(cost_ratio(target, source.model), is_verification_known=is_known)
    num_bytes = source.step_bytes(target)
    ratio = None if num_bytes is None else num_bytes / max(weights.num_bytes, 1)
    return DraftPrior(ratio, source.drafts_at_once, is_known)
