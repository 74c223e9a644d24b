"""Images and audio for a draft model, read by its own encoder with the prompt."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from hf_speculate.cache.layers import fixed_layers
from hf_speculate.compat import pad_token_id
from hf_speculate.draft.vocab_mapping import VocabMapping
from hf_speculate.engine.call import Prompts
from hf_speculate.engine.draft_faults import is_of_device
from hf_speculate.engine.ranks import Ranks
from hf_speculate.generation.inputs import OWN_NAMES, target_inputs
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import device_of, dtype_of
from hf_speculate.stats import SpeculationStats

ENCODED = "mm_encoder_outputs"  # argument for encoded images; since transformers 5.24
_MODALITIES = ("image", "video", "audio")


class _CannotReadError(Exception):
    """The reason why a draft model cannot read images."""


def read_media(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Prompts,
    passed: Mapping[str, Any],
    media: Sequence[str],
    *,
    vocabulary: VocabMapping | None,
    generation_config: GenerationConfig,
    ranks: Ranks,
    stats: SpeculationStats,
) -> ExtraInputs:
    """Prepare the inputs of a decoder-only draft model besides tokens, as its `generate` does.

    Args:
        target: the target, which has the same inputs.
        draft: the draft model; it is not modified.
        prompts: the prompts of the call.
        passed: the arguments of `generate()`; transformers has already removed the images.
        media: the names of the arguments for images or audio, at least one.
        vocabulary: maps the target's ids to the draft's. If None, the ids are equal.
        generation_config: the call's, as prepared by transformers.
        ranks: the processes of the call.
        stats: records the reason if the draft model accepts such arguments but only reads the text.

    Returns:
        Inputs to read with the whole prompt; empty if the draft model only reads the text. Their
        `description` names the inputs and the reason.
    """
    parameters = inspect.signature(type(draft).forward).parameters
    lacking = [name for name in media if name not in parameters]
    if lacking:
        return ExtraInputs(
            description=f"text alone, because {type(draft).__name__} takes no {lacking[0]}"
        )
    names = (passed.keys() & parameters.keys()) - OWN_NAMES - {"position_ids"}
    try:
        if ranks.is_distributed:
            raise _CannotReadError("several processes decode the call")
        _check_call(target, draft, prompts.input_ids, passed, vocabulary)
        inputs = _prepare(
            draft, prompts, {name: passed[name] for name in names}, vocabulary, generation_config
        )
    except _CannotReadError as error:
        reason = str(error)
    except Exception as error:  # model code may raise any error for another model's images
        if is_of_device(error, device_of(draft)):
            raise
        first_line = str(error).strip().partition("\n")[0]
        reason = f"its preparation raised {type(error).__name__}: {first_line}"
    else:
        inputs.description = f"text and {', '.join(media)}"
        return inputs
    stats.add_fallback(f"the draft model reads the text alone, because {reason}")
    return ExtraInputs(description=f"text alone, because {reason}")


def _check_call(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    input_ids: Tensor,
    passed: Mapping[str, Any],
    vocabulary: VocabMapping | None,
) -> None:
    """Raise an error with the reason if the draft model cannot read the target's inputs."""
    if passed.get("inputs_embeds") is not None:
        raise _CannotReadError("the prompt is one of embeddings")
    if passed.get(ENCODED) is not None:
        raise _CannotReadError(f"{ENCODED} are those of the target's encoder")
    if fixed_layers(draft.config.get_text_config(decoder=True)):
        raise _CannotReadError("its cache would hold the states of pictures too")
    if vocabulary is not None and not vocabulary.table.is_padded:
        raise _CannotReadError("its vocabulary is another one")
    for modality in _MODALITIES:
        ours, theirs = (_token_id(model.config, modality) for model in (target, draft))
        if ours is not None and ours != theirs and bool((input_ids == ours).any()):
            raise _CannotReadError(
                f"{modality} tokens have the id {ours} in the prompt, and {theirs} in its config"
            )


def _prepare(
    draft: PreTrainedModel,
    prompts: Prompts,
    arguments: Mapping[str, Any],
    vocabulary: VocabMapping | None,
    generation_config: GenerationConfig,
) -> ExtraInputs:
    """Return the inputs for a draft model's forwards; `arguments` belong to unrepeated prompts."""
    device, num_copies = device_of(draft), generation_config.num_return_sequences or 1
    input_ids, mask = prompts.input_ids[::num_copies], prompts.text_mask
    if vocabulary is not None:
        input_ids = vocabulary.encoded(input_ids.cpu())
    mask = torch.ones_like(input_ids) if mask is None else mask[::num_copies]

    def moved(tensor: Tensor) -> Tensor:
        is_feature = tensor.is_floating_point() and tensor.ndim > 1  # excludes video timestamps
        return tensor.to(device, dtype_of(draft) if is_feature else tensor.dtype)

    def decoding_method(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: object,
        stopping_criteria: object,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> ExtraInputs:
        _check_features(model.config, input_ids, model_kwargs.get(ENCODED) or {})
        prompts = Prompts(input_ids, input_ids, model_kwargs.get("attention_mask"))
        return target_inputs(model, prompts, model_kwargs, has_positions=False)

    draft_copy: Any = _shallow_copy(draft)
    draft_copy.generation_config = config = GenerationConfig(
        max_new_tokens=1,
        do_sample=num_copies > 1,
        num_return_sequences=num_copies,
        pad_token_id=pad_token_id(generation_config) or 0,
    )
    inputs: ExtraInputs = GenerationMixin.generate(
        draft_copy,
        input_ids=input_ids.to(device),
        attention_mask=mask.to(device),
        generation_config=config,
        custom_generate=decoding_method,
        **tree_map_only(Tensor, moved, dict(arguments)),
    )
    return inputs


def _check_features(
    config: PreTrainedConfig, input_ids: Tensor, encoded: Mapping[str, Any]
) -> None:
    """Raise an error if the numbers of placeholder tokens and encoder states differ.

    The prompts are [B, T].
    """
    for modality, output in encoded.items():
        states = output.pooler_output  # [N, D] per image, or [..., D] for all images
        by_layer = getattr(output, "deepstack_features", None)
        if states is None and by_layer:  # states of several layers, equal in number
            states = by_layer[0][1]
        if states is None:
            raise _CannotReadError(f"its encoder gives no states for {modality} tokens")
        tensors = [states] if isinstance(states, Tensor) else states
        num_states = sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)
        token_id = _token_id(config, modality)
        num_tokens = 0 if token_id is None else int((input_ids == token_id).sum())
        if num_states != num_tokens:
            raise _CannotReadError(
                f"its encoder gives {num_states} states for {num_tokens} {modality} tokens"
            )


def _token_id(config: PreTrainedConfig, modality: str) -> int | None:
    """Return the id of the placeholder tokens for images or audio."""
    names = (f"{modality}_token_id", f"{modality}_token_index")
    ids = (getattr(config, name, None) for name in names)
    return next((token_id for token_id in ids if token_id is not None), None)


def _shallow_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a shallow copy to hold the state of a prompt (`rope_deltas`); weights are shared."""
    copied, name = copy.copy(model), model.base_model_prefix
    base = model._modules.get(name)
    if isinstance(base, nn.Module):  # assigning a module would write to the model's own table
        vars(copied)["_modules"] = {**model._modules, name: copy.copy(base)}
    return copied
