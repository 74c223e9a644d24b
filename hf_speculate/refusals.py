"""Refuses what cannot be decoded speculatively, before any model runs."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.infer.rope import growing_rope

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_KNOWN_MODEL_KWARGS = {
    "attention_mask",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "use_cache",
}


class Reason(NamedTuple):
    """Why a call runs our own loop, in the words of its refusals."""

    cause: str
    way_out: str


ASSISTED = Reason("assistant_model", "leave assistant_model out to decode without speculation")
EARLY_EXIT = Reason("assistant_early_exit", "leave assistant_early_exit out to decode without speculation")
GENERATOR = Reason("candidate_generator", "leave candidate_generator out to decode without speculation")
LOOKUP = Reason(
    "prompt_lookup_num_tokens",
    "leave prompt_lookup_num_tokens out to decode without speculation, or hf_speculate.disable(model) for transformers'"
    " own prompt lookup",
)
COUPLED_ALONE = Reason("verifier='coupled'", "set verifier='rejection' to draw as transformers does")


def reason_of(assistant: object, early_exit: object, config: SpeculationConfig, samples: bool) -> Reason | None:
    """Why a call is ours; None: transformers decodes it plainly.

    Args:
        assistant: the draft model, or None.
        early_exit: the number of the target's own layers that draft, or None.
        config: the call's settings.
        samples: whether the call draws tokens.

    Raises:
        UnsupportedGenerationError: there are several sources of drafts; only prompt lookup goes beside a model.
    """
    models = ((assistant, ASSISTED), (early_exit, EARLY_EXIT))
    given = [reason for source, reason in models if source is not None]
    if config.candidate_generator is not None:
        given.append(GENERATOR)
    if config.prompt_lookup_num_tokens is not None and (not given or GENERATOR in given):
        given.append(LOOKUP)
    if len(given) > 1:
        names = " and ".join(reason.cause for reason in given)
        raise UnsupportedGenerationError(f"there must be one source of drafts, got {names}; {given[-1].way_out}")
    if given:
        return given[0]
    return COUPLED_ALONE if config.verifier == "coupled" and samples else None


def check_models(models: Sequence[PreTrainedModel], stateful: Sequence[str], reason: Reason) -> None:
    """Refuse models that cannot decode, from the configs alone.

    Args:
        models: the target, then the draft where there is one.
        stateful: class names of those among them that transformers calls stateful.
        reason: why the call is ours.

    Raises:
        UnsupportedModelError: a model cannot roll back or is an encoder-decoder.
    """
    if stateful:
        raise UnsupportedModelError(
            f"models must be able to roll back, got {', '.join(stateful)} with recurrent state; {reason.way_out}"
        )
    for model in models:
        config = model.config.get_text_config(decoder=True)
        if "past_key_values" not in inspect.signature(type(model).forward).parameters:
            raise UnsupportedModelError(
                f"models must take past_key_values, got {type(model).__name__} without; {reason.way_out}"
            )
        if "prepare_inputs_for_generation" in vars(model):
            raise UnsupportedModelError(
                f"models must prepare their inputs as their class does, got {type(model).__name__} with a "
                f"prepare_inputs_for_generation of its own (prompt or prefix tuning); {reason.way_out}"
            )
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"models must be decoder-only, got the encoder-decoder {type(model).__name__}; {reason.way_out}"
            )
        unserved = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
        if unserved:
            raise UnsupportedModelError(
                f"layer_types must be among {', '.join(sorted(_SERVED_LAYERS))}, got {', '.join(unserved)} in "
                f"{type(model).__name__}; {reason.way_out}"
            )


def check_rope(target: PreTrainedModel, max_length: int, reason: Reason) -> None:
    """Refuse rotary embeddings that change for tokens already cached once the text grows past a border.

    Args:
        target: scores the drafts; a draft of this kind costs acceptance only.
        max_length: tokens of the output at most.
        reason: why the call is ours.

    Raises:
        UnsupportedModelError: the text may cross the border.
    """
    rope = growing_rope(target)
    if rope is not None and max_length > rope[1]:
        raise UnsupportedModelError(
            f"max_length must be at most {rope[1]} for {type(target).__name__} with {rope[0]} rotary embeddings, "
            f"got {max_length}; {reason.way_out}"
        )


def check_assistant(assistant: object) -> None:
    """Refuse what cannot draft.

    Args:
        assistant: what was passed as `assistant_model`.

    Raises:
        UnsupportedModelError: the assistant is no model that generates.
    """
    if not isinstance(assistant, PreTrainedModel) or not assistant.can_generate():
        raise UnsupportedModelError(
            f"assistant_model must be a transformers model that can generate, got {type(assistant).__name__}; "
            f"{ASSISTED.way_out}"
        )


def check_call(call: dict[str, Any], reason: Reason) -> None:
    """Refuse what the arguments alone show.

    Args:
        call: all arguments of `generate()` but `assistant_model`, by name.
        reason: why the call is ours.

    Raises:
        UnsupportedGenerationError: an argument does not go with our own loop.
    """
    refused = {
        "custom_generate": call.get("custom_generate"),
        "inputs_embeds": call.get("inputs_embeds"),
        "position_ids": call.get("position_ids"),
        "synced_gpus": call.get("synced_gpus") or None,
        "speculation_type": call.get("speculation_type"),
        "use_mtp": call.get("use_mtp") or None,
    }
    for name, value in refused.items():
        if value is not None:
            raise UnsupportedGenerationError(f"{name} must be left out with {reason.cause}, got one; {reason.way_out}")
    if call.get("cache_implementation") == "paged":  # transformers would batch continuously, past our loop
        raise UnsupportedGenerationError(
            f"cache_implementation must be left out with {reason.cause}, got 'paged'; {reason.way_out}"
        )


def check_prepared(
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: object,
    reason: Reason,
) -> None:
    """Refuse what only the call shows that transformers has prepared.

    Args:
        input_ids: [B, T] int64.
        generation_config: with every default filled in.
        model_kwargs: what transformers would hand to the model.
        streamer: the call's, or None.
        reason: why the call is ours.

    Raises:
        UnsupportedGenerationError: our own loop cannot decode the call.
    """
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedGenerationError(
            f"the generation mode must be greedy or sampling with {reason.cause}, got {mode.value}; {reason.way_out}"
        )
    if not generation_config.use_cache:
        raise UnsupportedGenerationError(f"use_cache must be True with {reason.cause}, got False; {reason.way_out}")
    if reason is not COUPLED_ALONE and getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        raise UnsupportedGenerationError(
            "assistant_ensemble_weight must be left out, got one; choose verifier='typical' for a lossy rule"
        )
    extra = sorted(
        name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN_MODEL_KWARGS
    )
    if extra:
        raise UnsupportedGenerationError(
            f"model arguments must be among {', '.join(sorted(_KNOWN_MODEL_KWARGS))}, got {', '.join(extra)}; "
            f"{reason.way_out}"
        )
    cache = model_kwargs.get("past_key_values")
    if type(cache) is not DynamicCache or cache.offloading:
        raise UnsupportedGenerationError(
            f"the cache must be a DynamicCache on one device with {reason.cause}, got {type(cache).__name__}; "
            "pass a DynamicCache, or leave past_key_values and cache_implementation out"
        )
    if input_ids.shape[1] == 0:
        raise UnsupportedGenerationError(f"the prompt must hold at least one token, got an empty one; {reason.way_out}")
    one_row_only = {
        "candidate_generator": reason is GENERATOR,
        "streamer": streamer is not None,
        "output_hidden_states": bool(generation_config.output_hidden_states),
        "output_attentions": bool(generation_config.output_attentions),
    }
    for name, is_wanted in one_row_only.items():
        if is_wanted and input_ids.shape[0] > 1:
            raise UnsupportedGenerationError(
                f"{name} must be left out for more than one row, got {input_ids.shape[0]} rows; "
                "decode the rows one by one"
            )


def checked_mask(mask: Tensor | None) -> Tensor | None:
    """The attention mask as [B, P] int64, or None where nothing is padded.

    Args:
        mask: [B, P] of any dtype, or None.

    Raises:
        UnsupportedGenerationError: a row is nothing but padding.
    """
    if mask is None or bool((mask != 0).all()):
        return None
    if not bool(mask.any(dim=1).all()):
        raise UnsupportedGenerationError("every prompt must hold a real token, got an empty row; drop that row")
    return (mask != 0).to(torch.int64)
