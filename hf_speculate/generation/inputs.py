"""Read a prepared call: check the target's inputs and make the draft model's inputs."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import attention_layers, fixed_layers, num_cached, text_cache
from hf_speculate.cache.static import is_static, static_copies
from hf_speculate.compat import CACHE_NAME
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import VARIANTS, DraftSource, load_entry
from hf_speculate.draft.vocab_mapping import VocabMapping
from hf_speculate.engine.call import Call, Prompts, RowLists
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.plan import gains_nothing
from hf_speculate.engine.ranks import Ranks, find_ranks
from hf_speculate.errors import ConfigError, SpeculateError, UnsupportedGenerationError, counted
from hf_speculate.generation.request import Request
from hf_speculate.generation.validate_call import (
    check_extra_inputs,
    check_mask,
    check_prepared,
    check_room,
    check_synced,
)
from hf_speculate.generation.validate_models import check_target
from hf_speculate.models.context import encoder_context_len
from hf_speculate.models.extra_inputs import MEDIA, ExtraInputs
from hf_speculate.models.foreign_code import foreign_code
from hf_speculate.models.language_model import (
    cache_name,
    device_of,
    dtype_of,
    takes_positions,
    text_prefix,
)
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.registry import offers_forced_text
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.processors.used import check_unused
from hf_speculate.stats import SpeculationStats
from hf_speculate.verify.base import check_verifier

_FEWEST_LEFT = 2  # minimum number of new tokens for drafting
# arguments that some encoders read in addition to the main input
_BESIDE_MAIN_INPUT = ("attention_mask", "global_attention_mask", "pixel_values")
_OWN = """
attention_mask cache cache_params input_ids inputs_embeds labels logits_to_keep output_attentions
output_hidden_states past_key_values return_dict use_cache
"""
OWN_NAMES = set(_OWN.split())  # arguments that our loop sets or does not pass to forwards
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# masks with one entry per token; new tokens repeat the last entry of the prompt
_BY_COLUMN = {"cross_attention_mask"}


def read_call(
    request: Request,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None,
    model_kwargs: dict[str, Any],
    *,
    row_lists: RowLists,
    num_run: int,
) -> Call:
    """Check and read a prepared call.

    Args:
        request: the call before transformers prepared it.
        model: the target.
        input_ids: [B, T], the prompts, left-padded.
        logits_processor: the call's logits processors.
        stopping_criteria: the call's stopping criteria.
        generation_config: the generation config as prepared by transformers.
        inputs_tensor: the main input, for example of an encoder.
            None if transformers passes none.
        model_kwargs: arguments for the target's forwards; a static cache among them is replaced.
        row_lists: processors and criteria per row; for continuous batching, rows leave and join.
        num_run: index of this run within the call. Whisper runs several per call.
    """
    config = request.config.for_run(num_run).resolve(bool(generation_config.do_sample))
    check_verifier(config)
    source, passed = request.source, request.passed
    streamer = passed.get("streamer")
    check_prepared(model, input_ids, generation_config, model_kwargs, streamer, source)
    input_ids = input_ids.long()  # plain decoding also accepts int32 and returns int64
    static_cache = _replace_static_cache(model, model_kwargs)
    is_static_named = request.is_static or static_cache is not None
    check_unused(logits_processor)
    prompts = _prompts(
        model, input_ids, generation_config, model_kwargs, static_cache, passed, source
    )
    read = target_inputs(model, prompts, model_kwargs, has_positions="position_ids" in passed)
    check_extra_inputs(read, input_ids, generation_config.prefill_chunk_size, source)
    models = [model] if source.model is None else [model, source.model]
    ranks = find_ranks(passed.get("synced_gpus"), models, input_ids.device)
    if ranks.is_synced:
        check_synced(
            generation_config,
            is_static_named or generation_config.compile_config is not None,
            source,
        )
    reads_tensor = "encoder_outputs" not in passed and model_kwargs.get("inputs_embeds") is None
    draft_inputs = _draft_inputs(
        model,
        prompts,
        generation_config,
        inputs_tensor if reads_tensor else None,
        model_kwargs,
        passed,
        source=source,
        config=config,
        ranks=ranks,
        stats=request.stats,
    )
    if draft_inputs is None:
        source = source.without_model()
        config = source.settings(config)
    source = _with_forced_text(
        source,
        config.grammar_draft,
        logits_processor,
        passed.get("tokenizer"),
        is_synced=ranks.is_synced,
        rows_leave=row_lists.rows_leave,
        stats=request.stats,
    )
    return Call(
        target=model,
        source=source,
        config=config,
        generation_config=generation_config,
        prompts=prompts,
        cache=model_kwargs[cache_name(model)],
        static_cache=static_cache,
        is_cache_passed=request.is_cache_passed and static_cache is None,
        is_cache_kept=request.is_cache_passed or bool(generation_config.return_dict_in_generate),
        processors=BlockLogitsProcessorList(logits_processor).by_row(len(input_ids)),
        criteria=BlockStoppingCriteria(stopping_criteria),
        streamer=streamer,
        model_kwargs=model_kwargs,
        inputs_tensor=inputs_tensor,
        is_static_named=is_static_named,
        target_inputs=read,
        draft_inputs=draft_inputs or ExtraInputs(),
        ranks=ranks,
        row_lists=row_lists,
        foreign_code=foreign_code(model),
    )


def _with_forced_text(
    source: DraftSource,
    choice: bool | None,  # `grammar_draft`
    processors: LogitsProcessorList,
    tokenizer: Any,
    *,
    is_synced: bool,
    rows_leave: bool,
    stats: SpeculationStats,
) -> DraftSource:
    """Return the source, wrapped with forced-text drafts if the call asks for them."""
    is_offered = any(map(offers_forced_text, processors))
    if choice is False or not (choice or (is_offered and source.drafts)):
        return source
    if not is_offered and not rows_leave:  # rows that join may bring such a processor
        raise ConfigError(
            "grammar_draft must be left out unless a logits processor has forced_text(), got True; "
            "pass a processor "
            "that has, or leave grammar_draft out"
        )
    if tokenizer is None and choice:
        raise ConfigError(
            "tokenizer must be given with grammar_draft, got None; pass tokenizer= to generate()"
        )
    excluded = "" if source.takes_turns else source.argument
    # Synced ranks with different forced texts would run different numbers of forwards.
    excluded = "synced_gpus" if is_synced else excluded
    if excluded and choice:
        raise UnsupportedGenerationError(
            f"grammar_draft must be left out with {excluded}, got True; omit one of them"
        )
    if tokenizer is None or excluded:
        why = f"because of {excluded}" if excluded else "because the call has no tokenizer"
        stats.add_fallback(f"no drafts of forced text, {why}")
        return source
    forced_text: DraftSource = load_entry(VARIANTS["forced text"])(source, tokenizer)
    return forced_text


def _replace_static_cache(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> Cache | None:
    """Replace a static cache with a dynamic copy in place, and return the static one, if any."""
    cache: Cache = model_kwargs[cache_name(model)]
    if not is_static(cache):
        return None
    model_kwargs[cache_name(model)] = static_copies().dynamic_copy(
        cache, model.config.get_text_config(decoder=True)
    )
    return cache


def _prompts(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    static_cache: Cache | None,
    passed: Mapping[str, Any],  # arguments of the call
    source: DraftSource,
) -> Prompts:
    """Check the mask, length and cache of a run and return its prompts."""
    mask = model_kwargs.get(f"{text_prefix(model)}attention_mask")  # [B, P] of any dtype
    is_padded = mask is not None and not bool((mask != 0).all())
    padding_mask = (mask != 0).to(torch.int64) if is_padded and mask is not None else None
    cache = model_kwargs[cache_name(model)]
    mask_shape = None if mask is None else tuple(mask.shape)
    if model.config.is_encoder_decoder:
        query_ids = _uncached(input_ids, cache, mask)
    else:
        embeds = model_kwargs.get("inputs_embeds")
        query_ids = _uncached(input_ids, cache, passed.get("attention_mask"), embeds)
        if not is_padded:
            mask_shape = _shape_of_ones(passed, input_ids if embeds is None else embeds)
    num_before = num_cached(cache)
    check_mask(mask_shape, query_ids, num_before, text_prefix(model))
    prompts = Prompts(input_ids, query_ids, padding_mask)
    max_tokens = generation_config.max_length + num_before + prompts.num_ahead
    check_target(model, generation_config, is_padded, max_tokens, source)
    if static_cache is not None:
        room = static_copies().room_in(static_cache, model.config.get_text_config(decoder=True))
        check_room(room, max_tokens - 1)
    return prompts


def _shape_of_ones(passed: Mapping[str, Any], prompt: Tensor) -> tuple[int, ...] | None:
    """Return the shape of a passed attention mask for a prompt [B, P, ...].

    transformers may drop a mask of ones. The result is None if no mask was passed, or if the mask
    belongs to another prompt.
    """
    names = ("inputs_embeds", "input_ids", "inputs")
    mask, prompts = passed.get("attention_mask"), [passed[name] for name in names if name in passed]
    if mask is None or not prompts or prompts[0].shape[1] != prompt.shape[1]:
        return None  # no mask, or a prompt made by the model's own generate()
    num_copies = prompt.shape[0] // prompts[0].shape[0]
    return (prompt.shape[0] if len(mask) == 1 else len(mask) * num_copies, *mask.shape[1:])


def _uncached(
    input_ids: Tensor, cache: Cache, passed_mask: Tensor | None, embeds: Tensor | None = None
) -> Tensor:
    """Return the uncached tokens of the prompts, [B, Q] int64.

    Args:
        input_ids: [B, T], whole prompts or new tokens only.
        cache: the target's.
        passed_mask: [B, P]; its length distinguishes whole prompts from new tokens.
            None for whole prompts.
        embeds: [B, P, D]; the result then consists of zeros.
            None for prompts given as ids.
    """
    num_before, num_prompt = num_cached(cache), input_ids.shape[1]
    mask_len = None if passed_mask is None else passed_mask.shape[-1]
    if embeds is None:
        query = input_ids[:, num_before:] if mask_len in (None, num_prompt) else input_ids
    else:
        num_ids, num_prompt = num_prompt, embeds.shape[1]
        if mask_len != num_prompt and (mask_len is not None or num_ids not in (0, num_prompt)):
            got = "none" if mask_len is None else counted(mask_len, "column")
            raise UnsupportedGenerationError(
                f"attention_mask must be [B, {num_prompt}] for {num_prompt} inputs_embeds and "
                f"{num_ids} input_ids, got "
                f"{got}; pass a mask over the embeddings"
            )
        query = input_ids.new_zeros(input_ids.shape[0], max(num_prompt - num_before, 0))
    layers = attention_layers(text_cache(cache).layers)
    rows = [layer.keys.shape[0] for layer in layers if layer.get_seq_length()]
    if query.shape[1] < 1 or (rows and rows[0] != input_ids.shape[0]):
        raise UnsupportedGenerationError(
            "the cache must hold fewer tokens than the prompt, for "
            f"{counted(input_ids.shape[0], 'row')}, got "
            f"{num_before} of {counted(num_prompt, 'token')} for "
            f"{counted(rows[0] if rows else 0, 'row')}; "
            "pass the whole text and the cache of its beginning"
        )
    return query


def target_inputs(
    model: PreTrainedModel, prompts: Prompts, model_kwargs: dict[str, Any], *, has_positions: bool
) -> ExtraInputs:
    """Return the target's inputs other than text, from its `prepare_inputs_for_generation`."""
    input_ids, num_query = prompts.input_ids, prompts.query_ids.shape[1]
    if model.config.is_encoder_decoder:
        names = [
            name
            for name in ("encoder_outputs", "attention_mask")
            if model_kwargs.get(name) is not None
        ]
        every = {name: model_kwargs[name] for name in names}
        positions_by_name = _decoder_positions(model, input_ids, num_query, model_kwargs)
        return ExtraInputs(every, positions_by_name, prefix=text_prefix(model))
    extra = (
        {name for name, value in model_kwargs.items() if value is not None}
        - OWN_NAMES
        - {"position_ids"}
    )
    positions = model_kwargs.get("position_ids")
    # plain `generate` passes no positions in this case
    counts_columns = positions is None and takes_positions(model)
    model_class: Any = type(model)
    embeds = model_kwargs.get("inputs_embeds")
    read = {} if embeds is None else {"inputs_embeds": embeds[:, -num_query:].to(device_of(model))}
    is_usual = (
        model_class.prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    )
    is_counted = not counts_columns and (positions is None or positions.ndim == 2)
    if is_usual and not extra and not has_positions and is_counted:
        return ExtraInputs(prompt=read)
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(  # type: ignore[operator]
        input_ids, next_sequence_length=num_query, is_first_iteration=True, **model_kwargs
    )
    prompt = {
        name: value for name, value in inputs.items() if name not in OWN_NAMES and value is not None
    } | read
    if "position_ids" not in prompt and (positions is not None or counts_columns):
        prompt["position_ids"] = _columns(model_kwargs, num_query, input_ids.device)
    if "position_ids" in prompt and _counts_tokens(prompt["position_ids"], model_kwargs):
        del prompt["position_ids"]
    columns = {name: model_kwargs[name][:, -1:] for name in _BY_COLUMN & extra}
    if not columns and (columns := _whole_pictures(model, model_kwargs)):
        prompt |= dict.fromkeys(columns)  # the prompt is read without them, as in plain decoding
    return ExtraInputs(
        prompt=prompt, types=_later_types(model, input_ids, model_kwargs), columns=columns
    )


def _decoder_positions(
    model: PreTrainedModel, input_ids: Tensor, num_query: int, model_kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Return position ids for a padded decoder prompt if plain `generate` passes none.

    In that case, the model counts the columns of its cache.
    """
    if model_kwargs.get("decoder_attention_mask") is None or not takes_positions(model):
        return {}
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(  # type: ignore[operator]
        input_ids, next_sequence_length=num_query, is_first_iteration=True, **model_kwargs
    )
    name = f"{text_prefix(model)}position_ids"
    return (
        {}
        if inputs.get(name) is not None
        else {name: _columns(model_kwargs, num_query, input_ids.device)}
    )


def _columns(model_kwargs: dict[str, Any], num_query: int, device: torch.device) -> Tensor:
    """Return position ids [1, Q] int64 by KV cache column, as models count them by default."""
    start = model_kwargs[CACHE_NAME].get_seq_length()
    return torch.arange(start, start + num_query, device=device)[None]


def _whole_pictures(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Make a mask [B, 1, 1, tiles] over all images for calls without one; {} without images.

    Without a mask, a single token attends to all tiles. With several tokens in one forward, SDPA's
    causal mask hides tiles from the first tokens.
    """
    fixed = fixed_layers(model.config.get_text_config(decoder=True))
    if not fixed:
        return {}
    picture_layers = [
        layer for index, layer in enumerate(model_kwargs[CACHE_NAME].layers) if index in fixed
    ]
    pixels = model_kwargs.get("pixel_values")  # [B, images, tiles, ...]
    if pixels is not None:
        return {
            "cross_attention_mask": pixels.new_ones(
                len(pixels), 1, 1, pixels.shape[1] * pixels.shape[2]
            )
        }
    if not picture_layers or not picture_layers[0].is_initialized:
        return {}
    vision, keys = model.config.vision_config, picture_layers[0].keys
    num_tiles = keys.shape[2] // ((vision.image_size // vision.patch_size) ** 2 + 1)
    return {"cross_attention_mask": keys.new_ones(len(keys), 1, 1, num_tiles)}


def _counts_tokens(positions: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Return whether positions [..., B or 1, Q] just count each row's real tokens on one axis."""
    if positions.ndim != 2:
        return False
    num_query = positions.shape[1]
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        return bool((positions == _columns(model_kwargs, num_query, positions.device)).all())
    is_masked = attention_mask[:, -num_query:] == 0
    counted = (attention_mask.cumsum(-1) - 1)[:, -num_query:].masked_fill(is_masked, 0)
    is_counted = positions == counted
    # later positions continue from the last column
    return bool((is_counted | is_masked).all() and is_counted[:, -1].all())


def _later_types(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the token types [B, 1] for all tokens after the prompt, as in plain `generate`."""
    longer = {}
    for name in _TOKEN_TYPES:
        types = model_kwargs.get(name)
        if types is not None:
            last = types[:, -1:]
            # [B, T+1]
            longer[name] = torch.cat([types, last if name == "token_type_ids" else last * 0], dim=1)
    if not longer:
        return {}
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(  # type: ignore[operator]
        torch.cat([input_ids, input_ids[:, -1:]], dim=1),
        next_sequence_length=1,
        is_first_iteration=False,
        **longer,
    )
    return {name: inputs[name][:, -1:] for name in _TOKEN_TYPES if inputs.get(name) is not None}


def _draft_inputs(
    model: PreTrainedModel,
    prompts: Prompts,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None,
    model_kwargs: Mapping[str, Any],
    passed: Mapping[str, Any],
    *,
    source: DraftSource,
    config: SpeculationConfig,
    ranks: Ranks,
    stats: SpeculationStats,
) -> ExtraInputs | None:
    """Return the draft model's inputs other than tokens.

    The result is None if the model cannot read them; the reason is added to the statistics.
    """
    draft, media = source.model, sorted(MEDIA & passed.keys())
    if draft is None:
        return ExtraInputs()
    if draft.config.is_encoder_decoder or "encoder_outputs" in model_kwargs:
        return _read_draft_encoder(
            model,
            draft,
            inputs_tensor,
            model_kwargs,
            vocabulary=source.vocabulary,
            batch_size=len(prompts.input_ids),
            ranks=ranks,
            stats=stats,
        )
    num_left = generation_config.max_length - prompts.input_ids.shape[1]
    if not media or num_left < _FEWEST_LEFT or gains_nothing(model, source, config):
        return ExtraInputs()
    inputs: ExtraInputs = load_entry(VARIANTS["pictures"])(
        model,
        draft,
        prompts,
        passed,
        media,
        vocabulary=source.vocabulary,
        generation_config=generation_config,
        ranks=ranks,
        stats=stats,
    )
    return inputs


def _read_draft_encoder(
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
    """Return the target's encoder output, or the output of the draft's own encoder for `inputs`.

    The result is None if the draft's encoder cannot read the inputs; the reason is added to the
    statistics.
    """
    if not draft.config.is_encoder_decoder:
        outputs = model_kwargs.get("encoder_outputs")
        if (
            outputs is None
            or "encoder_outputs" not in inspect.signature(type(draft).forward).parameters
        ):
            return ExtraInputs()
        return ExtraInputs({"encoder_outputs": _as_read_by(draft.get_decoder(), outputs)})
    name, read = f"the encoder of the drafter (model {type(draft).__name__})", None
    faults = DraftFaults(
        stats, name, device_of(draft), lambda error: isinstance(error, SpeculateError), ranks
    )
    longest, encoder = encoder_context_len(draft.config), draft.get_encoder()
    is_text = inputs is not None and inputs.ndim == 2 and encoder is not target.get_encoder()
    is_long = is_text and inputs is not None and longest is not None and inputs.shape[1] > longest
    if ranks.any(is_long):
        faults.report(f"plain decoding, because {name} reads {longest} tokens at most")
        return None
    with faults:
        read = _encoded(
            target, draft, inputs, model_kwargs, vocabulary=vocabulary, batch_size=batch_size
        )
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
    """Return the encoder output for a draft model with an encoder.

    The draft's encoder runs on `inputs`. If it is the target's encoder, the target's output is
    reused.
    """
    outputs = model_kwargs.get("encoder_outputs")
    mask = model_kwargs.get("attention_mask")
    encoder: Any = draft.get_encoder()
    if encoder is not target.get_encoder():
        if inputs is None:
            raise UnsupportedGenerationError(
                "encoder_outputs and inputs_embeds must be left out for a draft with an encoder of "
                "its own, "
                f"{type(draft).__name__}; pass what the encoders read, or a draft that shares the "
                "target's encoder"
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
            outputs = type(outputs)(
                last_hidden_state=outputs[0].repeat_interleave(num_copies, dim=0)
            )
    else:
        outputs = _as_read_by(draft.get_decoder(), outputs)
    every = {"encoder_outputs": outputs}
    if mask is not None:
        every["attention_mask"] = mask.to(device_of(draft))
    return ExtraInputs(every, prefix=text_prefix(draft))


def _as_read_by(model: PreTrainedModel, value: Any) -> Any:
    """Move tensors to the model's device and cast floating-point tensors to its dtype."""
    device, dtype = device_of(model), dtype_of(model)
    return tree_map_only(
        Tensor,
        lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype),
        value,
    )
