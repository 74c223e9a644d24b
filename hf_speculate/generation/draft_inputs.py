"""Draft inputs: what the draft model reads besides the text, or why its encoder cannot read it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from hf_speculate.draft.vocab_mapping import VocabMapping
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.ranks import Ranks
from hf_speculate.errors import SpeculateError, UnsupportedGenerationError
from hf_speculate.models.context import encoder_context_len
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import device_of, dtype_of, text_prefix
from hf_speculate.stats import SpeculationStats

_BESIDE_MAIN_INPUT = ("attention_mask", "global_attention_mask", "pixel_values")  # which an encoder may read


def read_draft_inputs(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: Tensor | None,
    model_kwargs: Mapping[str, Any],
    *,
    vocabulary: VocabMapping | None,
    batch_size: int,
    ranks: Ranks,
    stats: SpeculationStats,
) -> ExtraInputs | None:
    """The target's encoder output, or that of the draft's own encoder for `inputs`.

    None, with the reason in the statistics, if the draft's encoder cannot read the inputs.
    """
    if not draft.config.is_encoder_decoder:
        outputs = model_kwargs.get("encoder_outputs")
        if outputs is None or "encoder_outputs" not in inspect.signature(type(draft).forward).parameters:
            return ExtraInputs()
        return ExtraInputs({"encoder_outputs": _as_read_by(draft.get_decoder(), outputs)})
    name, read = f"the encoder of the drafter (model {type(draft).__name__})", None
    faults = DraftFaults(stats, name, device_of(draft), lambda error: isinstance(error, SpeculateError), ranks)
    longest, encoder = encoder_context_len(draft.config), draft.get_encoder()
    is_text = inputs is not None and inputs.ndim == 2 and encoder is not target.get_encoder()
    is_long = is_text and inputs is not None and longest is not None and inputs.shape[1] > longest
    if ranks.any(is_long):
        faults.report(f"plain decoding, because {name} reads {longest} tokens at most")
        return None
    with faults:
        read = _encoded(target, draft, inputs, model_kwargs, vocabulary=vocabulary, batch_size=batch_size)
    faults.meet()
    return read


def _encoded(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: Tensor | None,
    model_kwargs: Mapping[str, Any],
    *,
    vocabulary: VocabMapping | None,
    batch_size: int,
) -> ExtraInputs:
    """What a draft model with an encoder reads: what its encoder makes of `inputs`, or what a shared one has made."""
    outputs = model_kwargs.get("encoder_outputs")
    mask = model_kwargs.get("attention_mask")
    encoder: Any = draft.get_encoder()
    if encoder is not target.get_encoder():
        if inputs is None:
            raise UnsupportedGenerationError(
                "encoder_outputs and inputs_embeds must be left out for a draft with an encoder of its own, "
                f"{type(draft).__name__}; pass what the encoders read, or a draft that shares the target's encoder"
            )
        if vocabulary is not None and encoder.main_input_name == "input_ids":
            inputs = vocabulary.encoded(inputs.cpu())
        num_copies = batch_size // inputs.shape[0]
        arguments: dict[str, Any] = {encoder.main_input_name: _as_read_by(encoder, inputs)}
        parameters = inspect.signature(encoder.forward).parameters
        for name in _BESIDE_MAIN_INPUT:
            value = model_kwargs.get(name)
            if value is not None and name in parameters and name != encoder.main_input_name:
                arguments[name] = _as_read_by(encoder, value[::num_copies])
        with torch.no_grad():
            outputs = encoder(**arguments, return_dict=True)
        if num_copies > 1:
            outputs = type(outputs)(last_hidden_state=outputs[0].repeat_interleave(num_copies, dim=0))
    else:
        outputs = _as_read_by(draft.get_decoder(), outputs)
    every = {"encoder_outputs": outputs}
    if mask is not None:
        every["attention_mask"] = mask.to(device_of(draft))
    return ExtraInputs(every, prefix=text_prefix(draft))


def _as_read_by(model: PreTrainedModel, value: Any) -> Any:
    """A copy of a tensor, or of an output's, where the model is; numbers with a fraction in the model's dtype."""
    device, dtype = device_of(model), dtype_of(model)
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype), value
    )
