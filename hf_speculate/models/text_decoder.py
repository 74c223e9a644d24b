"""The text decoder inside a model, which readers of pictures and sounds wrap."""

import sys
from typing import Any

from transformers import PreTrainedModel


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The innermost model that makes the masks of the text's layers: the base model if nothing wraps it."""
    decoder: Any = model.base_model
    while isinstance(decoder, PreTrainedModel):
        inner: Any = decoder.get_decoder()
        if inner is decoder or not isinstance(inner, PreTrainedModel):
            break
        decoder = inner
    return decoder  # type: ignore[no-any-return]


def makes_causal_masks(decoder: PreTrainedModel) -> bool:
    """Whether a decoder's masks come from transformers' function, which returns one of four dimensions as it is."""
    modules = (sys.modules.get(base.__module__) for base in type(decoder).__mro__)
    return any(hasattr(module, "create_causal_mask") for module in modules)
