"""Find the text decoder in a multimodal model and the model in a PEFT wrapper."""

import sys
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.errors import UnsupportedModelError


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the innermost decoder, which makes the masks for the text layers."""
    decoder: Any = model.base_model
    while isinstance(decoder, PreTrainedModel):
        inner: Any = decoder.get_decoder()
        if inner is decoder or not isinstance(inner, PreTrainedModel):
            break
        decoder = inner
    return decoder  # type: ignore[no-any-return]


def unwrapped(model: Any, role: str = "model") -> Any:
    """Return the model inside a PEFT wrapper with its adapters; other objects are unchanged.

    Raises:
        UnsupportedModelError: The wrapper adds a learned prompt or an activated LoRA to each
            forward.
    """
    if isinstance(model, PreTrainedModel) or not callable(getattr(model, "get_base_model", None)):
        return model
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        addition = "a learned prompt"
    elif getattr(config, "alora_invocation_tokens", None):
        addition = "an activated LoRA (alora_invocation_tokens)"
    else:
        return model.get_base_model()
    raise UnsupportedModelError(
        f"{role} must read the text alone, got {type(model).__name__} with {addition}; use a model "
        "without one, or "
        "with an ordinary LoRA"
    )


def makes_causal_masks(decoder: PreTrainedModel) -> bool:
    """Return whether a decoder makes its masks with transformers' `create_causal_mask`.

    This function returns a 4D mask unchanged.
    """
    modules = (sys.modules.get(base.__module__) for base in type(decoder).__mro__)
    return any(hasattr(module, "create_causal_mask") for module in modules)
