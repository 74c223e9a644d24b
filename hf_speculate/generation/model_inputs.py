"""What the target reads besides the text: encoder outputs, images, and positions of its own."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from hf_speculate.cache.layers import fixed_layers
from hf_speculate.compat import CACHE_NAME
from hf_speculate.engine.call import Prompts
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import device_of, takes_positions, text_prefix

_OWN = """
attention_mask cache cache_params input_ids inputs_embeds labels logits_to_keep output_attentions output_hidden_states
past_key_values return_dict use_cache
"""
OWN_NAMES = set(_OWN.split())  # arguments that our own loop gives itself, or to nobody
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
_BY_COLUMN = {"cross_attention_mask"}  # masks with an entry for each token, of which the prompt's last one goes on


def target_inputs(
    model: PreTrainedModel, prompts: Prompts, model_kwargs: dict[str, Any], *, has_positions: bool
) -> ExtraInputs:
    """What the target reads besides the text, as its own `prepare_inputs_for_generation` would have it."""
    input_ids, num_query = prompts.input_ids, prompts.query_ids.shape[1]
    if model.config.is_encoder_decoder:
        names = [name for name in ("encoder_outputs", "attention_mask") if model_kwargs.get(name) is not None]
        every = {name: model_kwargs[name] for name in names}
        own_positions = _decoder_positions(model, input_ids, num_query, model_kwargs)
        return ExtraInputs(every, own_positions, prefix=text_prefix(model))
    extra = {name for name, value in model_kwargs.items() if value is not None} - OWN_NAMES - {"position_ids"}
    positions = model_kwargs.get("position_ids")
    counts_columns = positions is None and takes_positions(model)  # plain `generate` tells it none
    model_class: Any = type(model)
    embeds = model_kwargs.get("inputs_embeds")
    read = {} if embeds is None else {"inputs_embeds": embeds[:, -num_query:].to(device_of(model))}
    is_usual = model_class.prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    is_counted = not counts_columns and (positions is None or positions.ndim == 2)
    if is_usual and not extra and not has_positions and is_counted:
        return ExtraInputs(prompt=read)
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(  # type: ignore[operator]
        input_ids, next_sequence_length=num_query, is_first_iteration=True, **model_kwargs
    )
    prompt = {name: value for name, value in inputs.items() if name not in OWN_NAMES and value is not None} | read
    if "position_ids" not in prompt and (positions is not None or counts_columns):
        prompt["position_ids"] = _columns(model_kwargs, num_query, input_ids.device)
    if "position_ids" in prompt and _counts_tokens(prompt["position_ids"], model_kwargs):
        del prompt["position_ids"]
    columns = {name: model_kwargs[name][:, -1:] for name in _BY_COLUMN & extra}
    if not columns and (columns := _whole_pictures(model, model_kwargs)):
        prompt |= dict.fromkeys(columns)  # which the prompt itself is read without, as in plain
    return ExtraInputs(prompt=prompt, types=_later_types(model, input_ids, model_kwargs), columns=columns)


def _decoder_positions(
    model: PreTrainedModel, input_ids: Tensor, num_query: int, model_kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Position ids of a padded decoder prompt if plain `generate` passes none, so that the model counts columns."""
    if model_kwargs.get("decoder_attention_mask") is None or not takes_positions(model):
        return {}
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(  # type: ignore[operator]
        input_ids, next_sequence_length=num_query, is_first_iteration=True, **model_kwargs
    )
    name = f"{text_prefix(model)}position_ids"
    return {} if inputs.get(name) is not None else {name: _columns(model_kwargs, num_query, input_ids.device)}


def _columns(model_kwargs: dict[str, Any], num_query: int, device: torch.device) -> Tensor:
    """[1, Q] int64: position ids that count the columns of the KV cache, as models do without `position_ids`."""
    start = model_kwargs[CACHE_NAME].get_seq_length()
    return torch.arange(start, start + num_query, device=device)[None]


def _whole_pictures(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """A mask [B, 1, 1, tiles] that shows all pictures, for calls without one; empty if there are no pictures.

    Without a mask a single token sees all tiles, but of several tokens read together SDPA shows the first ones fewer.
    """
    fixed = fixed_layers(model.config.get_text_config(decoder=True))
    if not fixed:
        return {}
    picture_layers = [layer for index, layer in enumerate(model_kwargs[CACHE_NAME].layers) if index in fixed]
    pixels = model_kwargs.get("pixel_values")  # [B, pictures, tiles, ...]
    if pixels is not None:
        return {"cross_attention_mask": pixels.new_ones(len(pixels), 1, 1, pixels.shape[1] * pixels.shape[2])}
    if not picture_layers or not picture_layers[0].is_initialized:
        return {}
    vision, keys = model.config.vision_config, picture_layers[0].keys
    num_tiles = keys.shape[2] // ((vision.image_size // vision.patch_size) ** 2 + 1)
    return {"cross_attention_mask": keys.new_ones(len(keys), 1, 1, num_tiles)}


def _counts_tokens(positions: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether the prompt's positions [..., B or 1, Q] only count each row's real tokens, on one axis."""
    if positions.ndim != 2:
        return False
    num_query = positions.shape[1]
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        return bool((positions == _columns(model_kwargs, num_query, positions.device)).all())
    is_masked = attention_mask[:, -num_query:] == 0
    counted = (attention_mask.cumsum(-1) - 1)[:, -num_query:].masked_fill(is_masked, 0)
    is_counted = positions == counted
    return bool((is_counted | is_masked).all() and is_counted[:, -1].all())  # later tokens go on from the last column


def _later_types(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The token types [B, 1] that plain `generate` hands the model with every token after the prompt."""
    longer = {}
    for name in _TOKEN_TYPES:
        types = model_kwargs.get(name)
        if types is not None:
            last = types[:, -1:]
            longer[name] = torch.cat([types, last if name == "token_type_ids" else last * 0], dim=1)  # [B, T+1]
    if not longer:
        return {}
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(  # type: ignore[operator]
        torch.cat([input_ids, input_ids[:, -1:]], dim=1), next_sequence_length=1, is_first_iteration=False, **longer
    )
    return {name: inputs[name][:, -1:] for name in _TOKEN_TYPES if inputs.get(name) is not None}
