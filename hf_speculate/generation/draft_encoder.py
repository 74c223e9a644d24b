"""Draft encoder: what a draft model with an encoder reads besides the text, or why the encoder cannot read it."""

from typing import Any

from torch import Tensor

from hf_speculate.engine.call import Call
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.errors import SpeculateError
from hf_speculate.generation.model_inputs import draft_inputs
from hf_speculate.models.context import encoder_context_len
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import device_of
from hf_speculate.stats import SpeculationStats


def read_inputs(
    call: Call, stats: SpeculationStats, inputs: Tensor | None, model_kwargs: dict[str, Any]
) -> ExtraInputs | None:
    """As `draft_inputs`; None, with the reason in the statistics, if the draft's encoder cannot read the inputs."""
    draft, read = call.draft, None
    if draft is None:
        return draft_inputs(call, inputs, model_kwargs)
    name = f"the encoder of the drafter (model {type(draft).__name__})"
    faults = DraftFaults(stats, name, device_of(draft), lambda error: isinstance(error, SpeculateError), call.ranks)
    longest, encoder = encoder_context_len(draft.config), draft.get_encoder()
    is_text = inputs is not None and inputs.ndim == 2 and encoder is not call.target.get_encoder()
    is_long = is_text and inputs is not None and longest is not None and inputs.shape[1] > longest
    if call.ranks.any(is_long):
        faults.report(f"plain decoding, because {name} reads {longest} tokens at most")
        return None
    with faults:
        read = draft_inputs(call, inputs, model_kwargs)
    faults.meet()
    return read
