"""Validate models: reject models that cannot decode speculatively, alone or together."""

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import AttentionMaskInterface, GenerationConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_speculate.cache.layers import attention_layers
from hf_speculate.compat import has_own_loop
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.plan import attention_of
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.foreign_code import has_activated_adapters
from hf_speculate.models.language_model import cache_name
from hf_speculate.models.quirks import Limit, growing_rope, limit_reason
from hf_speculate.models.recurrent_layers import (
    reads_prompts_in_chunks,
    recurrent_cache,
    rollback_obstacle,
)

_SERVED_LAYERS = {"chunked_attention", "full_attention", "sliding_attention"}
_SERVED_BESIDE_RECURRENT_LAYERS = {
    "conv",
    "hybrid",
    "hybrid_sliding",
    "linear_attention",
    "mlp",
    "moe",
}


def check_models(models: Sequence[Any], source: DraftSource) -> None:
    """Check the configs and classes of the target, which comes first, and the draft models."""
    for assistant in models[1:]:
        if not isinstance(assistant, PreTrainedModel) or not assistant.can_generate():
            raise UnsupportedModelError(
                "assistant_model must be a transformers model that can generate, got "
                f"{type(assistant).__name__}; "
                "load it with an AutoModelFor... class, compile it in place with its compile(), "
                f"or {source.hint}"
            )
    if has_own_loop(models[0]):
        raise UnsupportedModelError(
            "the target must decode in the loop of GenerationMixin, got "
            f"{type(models[0]).__name__} with a loop "
            f"(_sample) of its own; {source.hint}"
        )
    if has_activated_adapters(models[0]) and not source.is_token_by_token:
        raise UnsupportedModelError(
            "adapters of the target must treat each token by itself, got activated LoRA (aLoRA) "
            "in "
            f"{type(models[0]).__name__}, which adapts the last tokens of every forward; "
            f"{source.hint}"
        )
    for model in models:
        _check_model(model, source)
    _check_encoders(models[0], models[-1])


def _check_model(model: Any, source: DraftSource) -> None:
    name, config = type(model).__name__, model.config

    def refused(obstacle: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{obstacle}{source.hint}")

    if recurrent := rollback_obstacle(model):
        raise refused(
            f"speculative decoding rolls back rejected tokens, but {name} has recurrent state "
            f"{recurrent}; "
        )
    if not cache_name(model):
        raise refused(f"models must take a cache, got {name} without; ")
    if quirk := limit_reason(model, Limit.NOT_SUPPORTED):
        raise refused(
            f"models must read several tokens after a cached text, got {name}, whose layers "
            f"{quirk}; "
        )
    if model.training and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    ):
        raise refused(
            f"models must keep their states, got {name} in training mode with gradient "
            "checkpointing, which drops "
            "them; call eval() or gradient_checkpointing_disable(), or "
        )
    if "prepare_inputs_for_generation" in vars(model):
        raise refused(
            f"models must prepare their inputs as their class does, got {name} with a "
            "prepare_inputs_for_generation of "
            "its own (prompt or prefix tuning); "
        )
    num_stages = getattr(getattr(config, "distributed_config", None), "pp_size", None) or 1
    if num_stages > 1:
        raise refused(
            f"models must lie whole in every process or be split by tensor parallelism, got {name} "
            f"in {num_stages} "
            "stages (pp_size); load it with tp_size, or "
        )
    layer_types = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    served = _SERVED_LAYERS
    if not layer_types <= served and recurrent_cache(model) is not None:
        served = served | _SERVED_BESIDE_RECURRENT_LAYERS
    if unserved := sorted(layer_types - served):
        raise refused(
            f"layer_types must be among {', '.join(sorted(served))}, got {', '.join(unserved)} in "
            f"{name}; "
        )


def check_weights(models: Sequence[PreTrainedModel], source: DraftSource) -> None:
    """Reject models on the meta device unless hooks (`_hf_hook`) load weights for each forward."""
    for model in models:
        if model.device.type == "meta" and not any(
            hasattr(module, "_hf_hook") for module in model.modules()
        ):
            raise UnsupportedModelError(
                f"models must have weights, got {type(model).__name__} on the meta device; load it "
                "with "
                f"from_pretrained(), or {source.hint}"
            )


def _check_encoders(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Check that the draft's encoder or cross-attention matches the target's encoder."""
    has_encoder = target.config.is_encoder_decoder
    names = [type(model).__name__ for model in (target, draft)]
    if draft.config.is_encoder_decoder:
        encoders: list[Any] = [model.get_encoder() for model in (target, draft)]
        read = [
            (encoder.main_input_name, getattr(encoder.config, "num_mel_bins", None))
            for encoder in encoders
        ]
        if not has_encoder or read[0] != read[1]:
            raise UnsupportedModelError(
                f"assistant_model must read what the target {names[0]} reads, got the "
                f"encoder-decoder {names[1]}; "
                "use a draft of the target's kind, or a decoder-only one"
            )
    elif has_encoder and "encoder_outputs" in inspect.signature(type(draft).forward).parameters:
        widths = [
            model.config.get_text_config(decoder=True).hidden_size for model in (target, draft)
        ]
        if widths[0] != widths[1]:
            raise UnsupportedModelError(
                f"assistant_model must attend to the {widths[0]} numbers that the encoder of "
                f"{names[0]} gives, got "
                f"{widths[1]} in {names[1]}; use a draft that was made from this target, or one "
                "with its own encoder"
            )


def check_target(
    target: PreTrainedModel,
    generation_config: GenerationConfig,
    is_padded: bool,
    max_length: int,
    source: DraftSource,
) -> None:
    """Check a prepared call for at most `max_length` tokens against the limits of its target."""
    name, attention = type(target).__name__, attention_of(target)
    is_masked = attention not in ALL_ATTENTION_FUNCTIONS or attention in AttentionMaskInterface()
    if not is_masked and not source.is_token_by_token:  # drafts would attend to wrong columns
        raise UnsupportedModelError(
            "the attention implementation must have a mask function to score drafts, got "
            f"{attention!r} without one in "
            f"{name}; call transformers.AttentionMaskInterface.register({attention!r}, "
            "transformers.masking_utils."
            f"sdpa_mask), or with another function that makes the masks it reads, or {source.hint}"
        )
    quirk = limit_reason(target, Limit.NO_ATTENTIONS_FROM_SDPA)
    if generation_config.output_attentions and quirk and attention != "eager":
        raise UnsupportedModelError(
            f"output_attentions of {name} must come with eager attention, because {quirk}, got "
            f"{attention!r}; load "
            f"the model with attn_implementation='eager', or {source.hint}"
        )
    quirk = limit_reason(target, Limit.NO_PADDED_DECODER_PROMPT)
    if quirk and is_padded:
        raise UnsupportedModelError(
            f"decoder_attention_mask must be all ones for {name}, because {quirk}, got masked "
            "tokens; "
            f"pass decoder prompts of one length, or {source.hint}"
        )
    rope = growing_rope(target)
    if rope is not None and max_length > rope[1]:
        raise UnsupportedModelError(
            f"max_length must be at most {rope[1]} for {name} with {rope[0]} rotary embeddings, "
            f"got {max_length}; "
            f"{source.hint}"
        )
    chunk_size = generation_config.prefill_chunk_size
    if chunk_size is not None and not takes_chunks(target):
        raise UnsupportedModelError(
            f"prefill_chunk_size must be left out for {name}, got {chunk_size}: its path for "
            "several tokens ignores "
            f"earlier states; leave it out, or {source.hint}"
        )


def takes_chunks(target: PreTrainedModel) -> bool:
    """Return whether plain decoding with a target supports `prefill_chunk_size`.

    Attention layers support it even if `reads_prompts_in_chunks` is False; the text then depends on
    the chunk size.
    """
    cache = recurrent_cache(target)
    return cache is None or bool(attention_layers(cache.layers)) or reads_prompts_in_chunks(target)
