"""Validate calls: reject arguments that speculative decoding does not support."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode

from hf_speculate.cache.static import described, is_static
from hf_speculate.compat import CACHE_NAMES
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import DraftSource
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, counted
from hf_speculate.generation.config_sources import setting
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import input_table, vocab_size_of

# Supported forward arguments for encoder-decoders and for the prompts of decoder-only models.
_COMMON = (
    "attention_mask cache cache_params logits_to_keep output_attentions output_hidden_states "
    "past_key_values use_cache"
)
_ENCODER_DECODER_KWARGS = set(
    f"""{_COMMON}
    decoder_attention_mask encoder_outputs global_attention_mask inputs_embeds
    pixel_values""".split()
)
_DECODER_KWARGS = set(
    f"""{_COMMON}
    aspect_ratio_ids aspect_ratio_mask audio_attention_mask audio_embed_sizes audio_input_features
    cross_attention_mask feature_attention_mask image_attention_mask image_grid_thw image_patches
    image_patches_indices image_pixel_values image_sizes input_features input_features_mask
    input_values input_values_mask inputs_embeds mm_encoder_outputs mm_token_type_ids padding_mask
    pixel_attention_mask pixel_values pixel_values_videos position_ids second_per_grid_ts
    token_type_ids video_grid_thw vision_feature_layer vision_feature_select_strategy""".split()
)

# `Seq2SeqTrainer` passes labels, which plain generation ignores. Nothing reads the router logits.
_PASSED_OVER = {"labels", "output_router_logits"}


def check_call(
    model: PreTrainedModel,
    call: dict[str, Any],
    config: SpeculationConfig,
    source: DraftSource,
    declined: Sequence[str],  # arguments that yield no draft source for this target
) -> None:
    """Check the arguments before transformers prepares the call."""

    def refused(name: str, got: str = "one") -> UnsupportedGenerationError:
        return UnsupportedGenerationError(
            f"{name} must be left out with {source.argument}, got {got}; {source.hint}"
        )

    def exclusive(name: str) -> UnsupportedGenerationError:
        return UnsupportedGenerationError(
            f"{name} cannot be combined with {source.argument}; omit one of them"
        )

    if call.get("inputs_embeds") is not None and not source.reads_embeds:
        raise refused("inputs_embeds")
    if call.get("return_token_timestamps"):
        raise refused("return_token_timestamps")
    if declined:
        raise refused(declined[0])
    if call.get("custom_generate") is not None:
        raise exclusive("custom_generate")
    if setting(model, call, "speculation_type"):
        raise exclusive("speculation_type")
    mask = call.get("attention_mask")
    if call.get("inputs_embeds") is not None and mask is not None and mask.ndim != 2:
        raise UnsupportedGenerationError(
            f"attention_mask must be [B, P] over inputs_embeds with {source.argument}, got "
            f"{list(mask.shape)}; "
            "pass which of them are padding"
        )
    # transformers would use continuous batching and bypass our loop
    if call.get("cache_implementation") == "paged":
        raise refused("cache_implementation", "'paged'")
    span = config.relax_only_inside
    if span is not None and max(span) >= (size := vocab_size_of(model)):
        raise ConfigError(
            f"relax_only_inside must be ids below {size}, the size of the target's vocabulary, got "
            f"{tuple(span)}; "
            "take them from the target's tokenizer"
        )


def check_prepared(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: object,
    source: DraftSource,
) -> None:
    """Check the arguments after transformers has prepared the call."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        # speech pipelines set num_beams=5
        hint = "pass num_beams=1, or " if generation_config.num_beams != 1 else ""
        raise UnsupportedGenerationError(
            f"the generation mode must be greedy or sampling with {source.argument}, got "
            f"{mode.value}; {hint}"
            f"{source.hint}"
        )
    if not generation_config.use_cache:
        raise UnsupportedGenerationError(
            f"use_cache must be True with {source.argument}, got False; leave it out, or "
            f"{source.hint}"
        )
    if (
        not source.is_token_by_token
        and getattr(generation_config, "assistant_ensemble_weight", None) is not None
    ):
        raise UnsupportedGenerationError(
            "assistant_ensemble_weight must be left out, got one; choose verifier='typical' for a "
            "lossy rule"
        )
    has_encoder = model.config.is_encoder_decoder
    known = _ENCODER_DECODER_KWARGS if has_encoder else _DECODER_KWARGS
    extra = sorted(
        {name for name, value in model_kwargs.items() if value is not None} - known - _PASSED_OVER
    )
    if extra:
        raise UnsupportedGenerationError(
            f"model arguments must be among {', '.join(sorted(known))}, got {', '.join(extra)}; "
            f"{source.hint}"
        )
    returns_attentions = bool(generation_config.output_attentions)
    if has_encoder and returns_attentions:
        raise UnsupportedGenerationError(
            f"output_attentions must be left out for an encoder-decoder with {source.argument}, "
            f"got True; {source.hint}"
        )
    for name in CACHE_NAMES:
        if model_kwargs.get(name) is not None:
            _check_cache(model_kwargs[name], source)
    num_rows, num_ids = input_ids.shape
    if num_ids == 0 and model_kwargs.get("inputs_embeds") is None:
        raise UnsupportedGenerationError(
            f"the prompt must hold at least one token, got an empty one; {source.hint}"
        )
    if num_rows > 1:
        _check_rows(num_rows, generation_config, streamer, source)


def _check_rows(
    num_rows: int, generation_config: GenerationConfig, streamer: object, source: DraftSource
) -> None:
    """Reject arguments that support only a single row."""

    def refused(name: str) -> UnsupportedGenerationError:
        return UnsupportedGenerationError(
            f"{name} must be left out for more than one row, got {num_rows} rows; decode the rows "
            "one by one"
        )

    if source.is_single_row:
        raise refused(source.argument)
    if streamer is not None:
        raise refused("streamer")
    if generation_config.output_hidden_states:
        raise refused("output_hidden_states")
    if generation_config.output_attentions:
        raise refused("output_attentions")


def check_mask(
    mask_shape: tuple[int, ...] | None, query: Tensor, num_cached: int, prefix: str
) -> None:
    """Check that the attention mask covers the cached tokens and the query [B, Q]."""
    num_rows, num_query = query.shape
    if mask_shape is None or mask_shape == (num_rows, num_cached + num_query):
        return
    tokens = counted(num_query, "more token" if num_cached else "token")
    tokens = f"{num_cached} cached and {tokens}" if num_cached else tokens
    raise UnsupportedGenerationError(
        f"{prefix}attention_mask must be {[num_rows, num_cached + num_query]} for "
        f"{counted(num_rows, 'row')} of "
        f"{tokens}, got {list(mask_shape)}; pass the mask that the tokenizer gives with the "
        "prompt, cached tokens "
        "included"
    )


def check_synced(generation_config: GenerationConfig, is_static: bool, source: DraftSource) -> None:
    """Reject arguments that let synced ranks run different numbers of forwards."""

    def refused(name: str) -> UnsupportedGenerationError:
        return UnsupportedGenerationError(
            f"{name} must be left out with synced_gpus and {source.argument}, got one; ranks of "
            "different texts would "
            "run different numbers of forwards"
        )

    if source.unsynced:
        raise refused(source.unsynced)
    if generation_config.prefill_chunk_size is not None:
        raise refused("prefill_chunk_size")
    if is_static:
        raise refused("cache_implementation and compile_config")


def check_extra_inputs(
    read: ExtraInputs, input_ids: Tensor, chunk_size: int | None, source: DraftSource
) -> None:
    """Reject chunks and ids unknown to the draft if the target reads more than the ids [B, T]."""
    if not read.prompt_names:
        return
    if chunk_size is not None:
        raise UnsupportedGenerationError(
            f"prefill_chunk_size must be left out with {', '.join(read.prompt_names)}, got "
            f"{chunk_size}; feed such a "
            "prompt at once"
        )
    if source.model is not None and input_ids.shape[1]:
        vocabulary = source.vocabulary
        num_read: int = getattr(
            input_table(source.model), "num_embeddings", vocab_size_of(source.model)
        )
        size = num_read if vocabulary is None else len(vocabulary.table.draft_ids)
        smallest, largest = int(input_ids.min()), int(input_ids.max())
        if largest >= size or smallest < 0:
            raise UnsupportedGenerationError(
                f"ids of the prompt must be below {size} for assistant_model, which reads "
                "placeholders as text, got "
                f"{largest if largest >= size else smallest}; use a draft whose embeddings hold "
                "them"
            )


def _check_cache(cache: Any, source: DraftSource) -> None:
    is_pair = isinstance(cache, EncoderDecoderCache)
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if is_pair else [cache]
    if not is_static(cache) and any(
        type(single) is not DynamicCache or single.offloading for single in caches
    ):
        raise UnsupportedGenerationError(
            "the cache must be a DynamicCache, or a StaticCache of attention layers, on one device "
            "with "
            f"{source.argument}, got {described(cache)}; pass a DynamicCache, or leave the cache "
            "and "
            "cache_implementation out"
        )


def check_room(room: int | None, num_columns: int) -> None:
    """Check that a static cache has room for `num_columns` tokens; a room of None is unlimited."""
    if room is not None and room < num_columns:
        raise UnsupportedGenerationError(
            f"the cache must have room for {counted(num_columns, 'token')}, got a StaticCache for "
            f"{room}; make it with "
            f"max_cache_len={num_columns}, or lower max_new_tokens"
        )
