"""The table of all that `generate()` takes: supported, refused or not applicable on an enabled model, row by row.

`tests/compatibility.py` renders it as `docs/compatibility.md`; `tests/test_compatibility.py` holds it true.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
    cache_utils,
)
from transformers.generation import SynthIDTextWatermarkingConfig

from hf_speculate.errors import SpeculateError
from tests.cases import Streamed
from tests.tiny_tokenizers import letters_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"  # one for each of the 64 ids
TOKENIZER = letters_tokenizer(CHARACTERS, pad_token="a")

Options = Mapping[str, Any] | Callable[[list[int]], Mapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """A call with a draft model, on tiny models in float64.

    Args:
        options: keywords of the call, or what makes them from the new ids of the plain greedy text.
        batch_size: rows; 0 leaves the prompt out.
        kind: of the models, see `tests.tiny.KINDS`.
        samples: sample, with `verifier="coupled"`, whose text without a draft is the one to be equal to; else greedy.
        changes: the text is another one without the row's name, so that a name without effect is noticed.
        in_configs: the name is met in a `GenerationConfig` too.
    """

    options: Options
    batch_size: int = 1
    kind: str = "llama"
    samples: bool = False
    changes: bool = True
    in_configs: bool = True


@dataclass(frozen=True)
class Supported:
    """As in plain decoding, or as the README says for fields of ours.

    Args:
        shown_by: the test that shows it, as `file::name` below `tests/`.
        note: what to know.
        call: one whose text must be plain decoding's; None: only the test named shows it.
    """

    shown_by: str
    note: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class Refused:
    """Raises before the first forward.

    Args:
        call: one that raises.
        when: which calls; empty: the call itself.
        error: what it raises.
    """

    call: Call
    when: str = ""
    error: type[Exception] = SpeculateError


@dataclass(frozen=True)
class NotApplicable:
    """Changes nothing, in plain decoding or with a draft.

    Args:
        why: the reason.
        call: one whose text must be the same without it.
    """

    why: str
    call: Call | None = None


@dataclass(frozen=True)
class Row:
    """One name, in one state; a name may have several rows."""

    name: str
    state: Supported | Refused | NotApplicable


def supported(
    name: str, shown_by: str, note: str = "", options: Options | None = None, batch_size: int = 1, **call: Any
) -> Row:
    """A row that is supported, with a call if `options` are given."""
    return Row(name, Supported(shown_by, note, None if options is None else Call(options, batch_size, **call)))


def refused(name: str, options: Options, when: str = "", batch_size: int = 1, **call: Any) -> Row:
    """A row that is refused."""
    return Row(name, Refused(Call(options, batch_size, **call), when))


def ignored(name: str, why: str, options: Options | None = None, batch_size: int = 1, **call: Any) -> Row:
    """A row that changes nothing, with a call if `options` are given."""
    return Row(name, NotApplicable(why, None if options is None else Call(options, batch_size, **call)))


class Shift(LogitsProcessor):
    """A user's own processor: forbids the id that follows the last one."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, (input_ids[:, -1:] + 1) % scores.shape[1], -torch.inf)


class StopAtSum(StoppingCriteria):
    """A user's own criterion: ends a row whose last three ids add up to a multiple of seven."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(1) % 7 == 0


OPTIONS = "generation/test_options.py"
AS_PLAIN = "generation/test_matrix.py::test_ids_scores_states_and_cache_are_those_of_plain_generate"
AS_ALONE = "generation/test_matrix.py::test_a_row_of_a_batch_is_drawn_as_alone_and_every_token_is_counted"
CONFIG = "test_config.py"
LOOKUP = "generation/test_lookup.py"
PICTURES = "generation/test_vision_language.py::test_greedy_equals_plain"
ARGUMENTS_OF_PICTURES = "generation/test_vision_language.py::test_arguments_beside_the_pixels_are_read_with_the_prompt"
READER = "generation/test_prompt_arguments.py::test_a_reader_decodes_as_in_plain"
READ_BY_ENCODERS = "generation/test_prompt_arguments.py::test_what_an_encoder_reads_beside_its_text"
ENCODERS = "generation/test_encoder_decoder.py"
BLOCK = "processors/test_processors.py::test_block_equals_position_by_position"
EXACT = "generation/test_greedy_exactness.py"
HERE = "test_compatibility.py::test_a_supported_value_gives_the_text_of_plain_decoding"
LOCK_STEP = "rows move in lock step"
BEAMS = (
    "only beam search, which is not supported, reads it; greedy decoding and sampling ignore it, in transformers too"
)


def _ids(*ids):
    return torch.tensor([ids])


ARGUMENTS = (
    supported("inputs", HERE, "the same as `input_ids`", {"inputs": _ids(5, 3, 11, 7, 2)}, batch_size=0, changes=False),
    supported(
        "generation_config", f"{CONFIG}::test_every_field_is_taken_from_the_strongest_source_that_sets_it", "see below"
    ),
    supported(
        "logits_processor",
        f"{OPTIONS}::test_foreign_processors_and_criteria_are_called_exactly_as_in_plain",
        f"{LOCK_STEP} for one that is not declared with `register_row_wise`",
        {"logits_processor": LogitsProcessorList([Shift()])},
        batch_size=3,
        changes=False,
    ),
    supported(
        "stopping_criteria",
        f"{OPTIONS}::test_foreign_processors_and_criteria_are_called_exactly_as_in_plain",
        f"{LOCK_STEP} for one that is not declared with `register_row_wise`",
        {"stopping_criteria": StoppingCriteriaList([StopAtSum()])},
        batch_size=3,
        changes=False,
    ),
    supported(
        "prefix_allowed_tokens_fn",
        HERE,
        LOCK_STEP,
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, 64, 2))},
        batch_size=3,
    ),
    supported(
        "synced_gpus",
        "generation/test_synced.py::test_ranks_run_the_same_forwards_and_get_their_own_texts",
        "not with every source of drafts, see [calls](calls.md#ranks-of-a-distributed-call)",
    ),
    supported("assistant_model", AS_PLAIN),
    refused(
        "assistant_model",
        {"assistant_early_exit": 1},
        "beside `assistant_early_exit`, `drafter` or `candidate_generator`",
    ),
    supported(
        "streamer",
        f"{OPTIONS}::test_a_streamer_gets_the_same_tokens_as_in_plain_one_by_one",
        options={"streamer": Streamed()},
        changes=False,
    ),
    refused("streamer", {"streamer": Streamed()}, "more than one row", batch_size=2),
    supported(
        "negative_prompt_ids",
        HERE,
        f"with `guidance_scale`; {LOCK_STEP}",
        {"negative_prompt_ids": _ids(9, 8, 7), "guidance_scale": 1.7},
    ),
    supported(
        "negative_prompt_attention_mask",
        HERE,
        f"with `negative_prompt_ids`; {LOCK_STEP}",
        {"negative_prompt_ids": _ids(9, 8, 7), "negative_prompt_attention_mask": _ids(0, 1, 1), "guidance_scale": 1.7},
    ),
    supported(
        "custom_generate",
        "generation/test_enable.py::test_the_hub_repository_runs_through_custom_generate",
        "a repository",
    ),
    refused("custom_generate", {"custom_generate": lambda model, input_ids: input_ids}, "a function"),
    supported(
        "trust_remote_code",
        "generation/test_enable.py::test_the_hub_repository_runs_through_custom_generate",
        "for `custom_generate`",
    ),
    supported(
        "tokenizer",
        "generation/test_stop_strings.py::test_text_ends_where_plain_ends_it",
        "for `stop_strings` and drafts of other vocabularies",
    ),
    supported(
        "assistant_tokenizer",
        "generation/test_vocabularies.py::test_another_tokenizer_greedy_is_plain_greedy",
        options={"assistant_tokenizer": TOKENIZER, "tokenizer": TOKENIZER},
        changes=False,
    ),
    supported("input_ids", AS_PLAIN),
    supported("attention_mask", AS_PLAIN, options={}, batch_size=3, changes=False),
    refused(
        "attention_mask", {"attention_mask": torch.ones(1, 3, dtype=torch.int64)}, "of another shape than the prompt"
    ),
    supported(
        "position_ids", "generation/test_vision_language.py::test_positions_that_the_user_passes_go_on_from_the_last"
    ),
    supported("token_type_ids", "generation/test_vision_language.py::test_token_types_repeat_the_prompts_last"),
    supported(
        "inputs_embeds",
        "generation/test_embeddings.py::test_greedy_equals_plain",
        "with or without `input_ids`, which are all that a draft model reads of the prompt",
        {"inputs_embeds": torch.ones(1, 3, 32).double() / 8},
        batch_size=0,
        changes=False,
    ),
    refused(
        "inputs_embeds",
        {"inputs_embeds": torch.zeros(1, 3, 32).double(), "prefill_chunk_size": 2},
        "with `prefill_chunk_size`",
        batch_size=0,
    ),
    supported(
        "past_key_values",
        "generation/test_ownership.py::test_a_passed_cache_advances_in_place_as_in_plain",
        "a `DynamicCache` or a `StaticCache`, or an `EncoderDecoderCache` of two; rows that end early hold their "
        "padding, as in plain",
    ),
    supported(
        "cache_params",
        "generation/test_recurrent.py::test_a_passed_cache_goes_on_from_call_to_call",
        "the name of `past_key_values` in models with recurrent layers alone",
    ),
    ignored(
        "logits_to_keep",
        "only the last position of a prompt is used",
        {"logits_to_keep": 3},
        batch_size=3,
        in_configs=False,
    ),
    supported("encoder_outputs", f"{ENCODERS}::test_passed_encoder_outputs", "for drafts without an encoder"),
    supported("decoder_input_ids", f"{ENCODERS}::test_prompts_of_the_decoder_may_be_padded"),
    supported("decoder_attention_mask", f"{ENCODERS}::test_prompts_of_the_decoder_may_be_padded"),
    *(
        supported(name, PICTURES, "read with the prompt; the draft model reads text alone")
        for name in ("image_grid_thw", "mm_token_type_ids", "pixel_values")
    ),
    *(
        supported(name, "generation/test_vision_language.py::test_videos_are_read_as_images_are")
        for name in ("pixel_values_videos", "video_grid_thw")
    ),
    *(
        supported(name, "generation/test_vision_language.py::test_features_are_chosen_as_the_call_says")
        for name in ("vision_feature_layer", "vision_feature_select_strategy")
    ),
    *(
        supported(name, ARGUMENTS_OF_PICTURES, "read with the prompt")
        for name in ("image_sizes", "mm_encoder_outputs", "pixel_attention_mask", "second_per_grid_ts")
    ),
    *(
        supported(name, READER, "read with the prompt")
        for name in [
            "aspect_ratio_ids",
            "aspect_ratio_mask",
            "audio_attention_mask",
            "audio_embed_sizes",
            "audio_input_features",
            "feature_attention_mask",
            "image_attention_mask",
            "image_patches",
            "image_patches_indices",
            "image_pixel_values",
            "input_features",
            "input_features_mask",
            "input_values",
            "input_values_mask",
            "padding_mask",
        ]
    ),
    supported("cross_attention_mask", READER, "the last token's goes on for those that follow"),
    *(
        supported(name, READ_BY_ENCODERS, "read by the encoder of an encoder-decoder")
        for name in ("global_attention_mask", "pixel_values")
    ),
    ignored(
        "output_router_logits",
        "plain decoding returns none of them either",
        {"output_router_logits": True},
        kind="mixtral",
    ),
    supported(
        "adapter_names",
        "generation/test_wrapped.py::test_every_row_may_have_its_own_adapter",
        "PEFT's, one adapter a row",
    ),
    refused(
        "any other model argument",
        {"encoder_hidden_states": torch.zeros(1, 3, 32).double()},
        "`encoder_hidden_states` of GPT-2, for example",
        kind="gpt2",
    ),
)

FIELDS = (
    supported("max_length", HERE, options={"max_length": 20, "max_new_tokens": None}, changes=False),
    supported("max_new_tokens", f"{OPTIONS}::test_max_new_tokens_is_exact", options={"max_new_tokens": 5}),
    supported("min_length", HERE, options=lambda text: {"min_length": 16, "eos_token_id": text[3]}),
    supported("min_new_tokens", AS_PLAIN, options=lambda text: {"min_new_tokens": 9, "eos_token_id": text[3]}),
    ignored("early_stopping", BEAMS, {"early_stopping": True}),
    supported(
        "max_time", f"{OPTIONS}::test_max_time_stops_soon", "looked at once a round", {"max_time": 600.0}, changes=False
    ),
    supported(
        "stop_strings",
        "generation/test_stop_strings.py::test_text_ends_where_plain_ends_it",
        options=lambda text: {"stop_strings": CHARACTERS[text[4]], "tokenizer": TOKENIZER},
    ),
    refused("stop_strings", {"stop_strings": ["a"]}, "without `tokenizer`"),
    supported(
        "do_sample",
        "generation/test_distribution.py::test_lossless_verifiers_keep_the_joint_distribution",
        options={},
        samples=True,
        changes=False,
    ),
    refused("do_sample", {"do_sample": True, "verifier": "greedy"}, 'with `verifier="greedy"`'),
    refused("num_beams", {"num_beams": 2}),
    supported(
        "use_mtp", "draft/heads/test_mtp.py::test_use_mtp_drafts_for_batches", "for DeepSeek-V3 and GLM-4 MoE targets"
    ),
    refused("use_mtp", {"use_mtp": True}),
    supported("use_cache", AS_PLAIN, "`True`", {"use_cache": True}, changes=False),
    refused("use_cache", {"use_cache": False}),
    *(
        supported("cache_implementation", shown_by, note, {"cache_implementation": kind}, changes=False)
        for kind, note, shown_by in (
            (
                "dynamic",
                '`"dynamic"`',
                "generation/test_preallocated.py::test_the_dynamic_cache_serves_what_cannot_be_preallocated",
            ),
            (
                "static",
                '`"static"`, see [calls](calls.md#compiled-rounds)',
                "generation/test_static_cache.py::test_the_cache_that_is_returned_is_that_of_plain",
            ),
        )
    ),
    refused("cache_implementation", {"cache_implementation": "offloaded"}),
    refused("cache_implementation", {"cache_implementation": "offloaded_static"}),
    refused(
        "cache_implementation",
        {"cache_implementation": "paged"},
        '`"paged"` as a keyword; a config with it decodes plainly in transformers too',
        in_configs=False,
    ),
    *(
        refused(
            "cache_implementation",
            {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
            '`"quantized"`, whatever the `cache_config`; transformers makes the cache first, if it can',
        )
        for _ in range(hasattr(cache_utils, "Fp8QuantizedLayer"))  # older versions have no backend without a package
    ),
    ignored(
        "cache_config",
        'only `cache_implementation="quantized"` reads it, whose caches are not supported',
        {"cache_config": {}},
    ),
    supported(
        "max_cache_len",
        "generation/test_compiled.py::test_buffers_of_another_length_are_others",
        "with a static cache or compiled rounds",
        {"max_cache_len": 64, "cache_implementation": "static"},
        changes=False,
    ),
    *(
        supported(name, BLOCK, options={name: value}, samples=True)
        for name, value in (
            ("temperature", 0.4),
            ("top_k", 2),
            ("top_p", 0.3),
            ("min_p", 0.4),
            ("top_h", 0.2),
            ("typical_p", 0.3),
            ("epsilon_cutoff", 0.2),
            ("eta_cutoff", 0.5),
        )
    ),
    supported("repetition_penalty", AS_PLAIN, options={"repetition_penalty": 1.6}, batch_size=3),
    supported("encoder_repetition_penalty", HERE, LOCK_STEP, {"encoder_repetition_penalty": 3.0}, batch_size=3),
    ignored("length_penalty", BEAMS, {"length_penalty": 2.0}),
    supported("no_repeat_ngram_size", AS_PLAIN, options={"no_repeat_ngram_size": 1}, batch_size=3),
    supported("bad_words_ids", AS_PLAIN, options=lambda text: {"bad_words_ids": [[text[3]], [text[5], text[6]]]}),
    supported("renormalize_logits", BLOCK, options={"renormalize_logits": True}, samples=True, changes=False),
    supported(
        "forced_bos_token_id",
        BLOCK,
        "after a prompt of one token",
        {"forced_bos_token_id": 9, "bos_token_id": 5},
        batch_size=0,
    ),
    supported("forced_eos_token_id", AS_PLAIN, options={"forced_eos_token_id": 9}),
    supported("remove_invalid_values", BLOCK, options={"remove_invalid_values": True}, changes=False),
    supported(
        "exponential_decay_length_penalty",
        AS_PLAIN,
        options=lambda text: {"exponential_decay_length_penalty": (1, 9.0), "eos_token_id": text[8]},
    ),
    supported("suppress_tokens", AS_PLAIN, options=lambda text: {"suppress_tokens": [text[2]]}),
    supported("begin_suppress_tokens", BLOCK, options=lambda text: {"begin_suppress_tokens": [text[0]]}),
    supported("sequence_bias", AS_PLAIN, options={"sequence_bias": {(3,): 9.0, (4, 5): -3.0}}, batch_size=3),
    supported(
        "token_healing", "generation/test_guidance.py::test_a_healed_prompt_is_that_of_plain", "needs `tokenizer`"
    ),
    supported("guidance_scale", HERE, LOCK_STEP, {"guidance_scale": 1.7}),
    supported(
        "watermarking_config", BLOCK, options={"watermarking_config": WatermarkingConfig(bias=9.0)}, batch_size=3
    ),
    supported(
        "watermarking_config",
        HERE,
        f"SynthID; {LOCK_STEP}",
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
        batch_size=3,
        changes=False,
    ),
    supported(
        "num_return_sequences",
        f"{OPTIONS}::test_num_return_sequences_draws_different_rows_and_repeats_by_seed",
        options={"num_return_sequences": 3},
        samples=True,
    ),
    *(
        supported(name, f"{OPTIONS}::test_hidden_states_and_attentions_are_those_of_plain", "one row, decoder-only")
        for name in ("output_attentions", "output_hidden_states")
    ),
    supported(
        "output_hidden_states", f"{ENCODERS}::test_hidden_states_are_those_of_plain", "one row, encoder-decoders too"
    ),
    *(
        refused(name, {name: True, "return_dict_in_generate": True}, "more than one row", batch_size=2)
        for name in ("output_attentions", "output_hidden_states")
    ),
    *(
        supported(name, AS_PLAIN, options={name: True, "return_dict_in_generate": True}, batch_size=3, changes=False)
        for name in ("output_scores", "output_logits", "return_dict_in_generate")
    ),
    supported(
        "pad_token_id",
        f"{OPTIONS}::test_eos_inside_a_block_ends_rows_where_plain_does",
        options=lambda text: {"pad_token_id": 5, "eos_token_id": text[3]},
        batch_size=3,
    ),
    supported(
        "bos_token_id", HERE, "the prompt of a call without one", {"bos_token_id": 5}, batch_size=0, changes=False
    ),
    supported(
        "eos_token_id",
        f"{OPTIONS}::test_eos_inside_a_block_ends_rows_where_plain_does",
        options=lambda text: {"eos_token_id": [text[3], text[7]]},
    ),
    supported(
        "encoder_no_repeat_ngram_size",
        HERE,
        LOCK_STEP,
        {"encoder_no_repeat_ngram_size": 1},
        batch_size=3,
        changes=False,
    ),
    supported("decoder_start_token_id", f"{ENCODERS}::test_greedy_equals_plain"),
    supported(
        "is_assistant",
        HERE,
        "adds transformers' confidence criterion, which needs recorded scores, as in plain decoding; meant for its "
        f"own draft models; {LOCK_STEP}",
        {"is_assistant": True, "return_dict_in_generate": True, "output_scores": True},
        changes=False,
    ),
    supported(
        "num_assistant_tokens",
        f"{CONFIG}::test_drafts_are_as_long_as_the_strongest_source_says",
        "see below",
        {"num_assistant_tokens": 3},
        changes=False,
    ),
    supported(
        "num_assistant_tokens_schedule",
        "generation/test_schedules.py::test_adaptive_is_the_default_and_a_number_bounds_it",
        "see below",
        {"num_assistant_tokens_schedule": "heuristic"},
        changes=False,
    ),
    supported(
        "assistant_confidence_threshold",
        f"{EXACT}::test_a_confidence_threshold_shortens_drafts_but_not_the_text",
        "see below",
        {"assistant_confidence_threshold": 0.9},
        batch_size=3,
        changes=False,
    ),
    supported(
        "prompt_lookup_num_tokens",
        f"{LOOKUP}::test_fields_of_configs_count_and_configs_stay_as_they_are",
        "alone, or beside `assistant_model`",
        {"prompt_lookup_num_tokens": 3, "assistant_model": None},
        batch_size=3,
        changes=False,
    ),
    supported(
        "max_matching_ngram_size",
        f"{LOOKUP}::test_a_shorter_ngram_copies_otherwise",
        "64 where unset",
        {"max_matching_ngram_size": 1, "prompt_lookup_num_tokens": 3},
        changes=False,
    ),
    supported(
        "assistant_early_exit",
        "draft/test_early_exit.py::test_the_generation_config_may_ask_for_it",
        options={"assistant_early_exit": 1, "assistant_model": None},
        batch_size=3,
        changes=False,
    ),
    *(
        ignored(
            name,
            "transformers encodes the text's end again for a draft of another tokenizer; here ids are mapped to "
            "ids, and no text is encoded",
            {name: 3},
        )
        for name in ("assistant_lookbehind", "target_lookbehind")
    ),
    refused("assistant_ensemble_weight", {"assistant_ensemble_weight": 0.5}),
    refused("speculation_type", {"speculation_type": "dflash"}),
    supported(
        "compile_config",
        "generation/test_compiled.py::test_text_equals_plain_and_rows_that_end_stay",
        "compiles where plain decoding would",
        {"compile_config": CompileConfig()},
        changes=False,
    ),
    supported(
        "disable_compile",
        "generation/test_compiled.py::test_where_plain_generate_would_not_compile_we_do_not_and_say_so",
        options={"disable_compile": True, "cache_implementation": "static"},
        changes=False,
    ),
    ignored("continuous_batching_config", "only `generate_batch()` reads it, which is not speculative"),
    ignored("low_memory", BEAMS, {"low_memory": True}),
    refused("penalty_alpha", {"penalty_alpha": 0.6}, "greedy, with `top_k` above 1, as it is by default"),
    ignored("penalty_alpha", "sampling passes over it", {"penalty_alpha": 0.6}, samples=True),
    refused("dola_layers", {"dola_layers": "low"}),
    ignored("diversity_penalty", BEAMS, {"diversity_penalty": 0.5}),
    ignored("num_beam_groups", BEAMS, {"num_beam_groups": 2}),
    refused("constraints", {"constraints": []}),
    refused("force_words_ids", {"force_words_ids": [[3]]}),
    supported(
        "prefill_chunk_size",
        f"{OPTIONS}::test_prefill_in_chunks_gives_the_same_text",
        "not supported with images",
        {"prefill_chunk_size": 4},
        batch_size=3,
        changes=False,
    ),
    ignored("transformers_version", "says which version saved the config", {"transformers_version": "5.0.0"}),
)

_SOURCES = f"{CONFIG}::test_every_field_is_taken_from_the_strongest_source_that_sets_it"
TYPICAL = "verify/test_verifiers.py::test_typical"
TYPICAL_SETTINGS = f"{TYPICAL}_settings_reach_the_kernel_through_generate"
OWN_FIELDS = (
    supported("verifier", AS_ALONE, options={"verifier": "block"}, changes=False),
    supported("posterior_threshold", TYPICAL_SETTINGS, 'for `"typical"`'),
    supported("posterior_alpha", TYPICAL_SETTINGS, 'for `"typical"`'),
    supported("entropy_epsilon", TYPICAL_SETTINGS, 'for `"typical"`'),
    supported("typical_correction", f"{TYPICAL}_correction_is_the_argmax_or_a_draw", 'for `"typical"`'),
    supported(
        "relax_only_inside",
        "generation/test_spans.py::test_outside_of_spans_greedy_tokens_are_the_argmax",
        "with a lossy verifier: two ids, between which it decides; outside the text is plain decoding's",
    ),
    refused("relax_only_inside", {"relax_only_inside": (3, 5)}),
    supported(
        "draft_sampling",
        "generation/test_distribution.py::test_other_kinds_of_rounds_keep_the_joint_distribution",
        "under `do_sample=True`",
        {"draft_sampling": "argmax"},
        samples=True,
        changes=False,
    ),
    supported("suffix_store", f"{LOOKUP}::test_a_store_carries_texts_from_call_to_call", "an object, never in JSON"),
    supported(
        "verifier_backend",
        "generation/test_bad_input.py::test_triton_by_name_where_it_cannot_run",
        options={"verifier_backend": "torch"},
        samples=True,
        changes=False,
    ),
    supported(
        "speculation_cache",
        "generation/test_preallocated.py::"
        "test_text_equals_plain_and_the_dynamic_cache_while_buffers_grow_and_windows_move",
        options={"speculation_cache": "dynamic"},
        batch_size=3,
        changes=False,
    ),
    supported("seed", AS_ALONE, options={"seed": 7}, samples=True),
    supported(
        "speculation_graphs",
        "generation/test_graphs.py::test_a_draft_model_gives_the_plain_text_and_later_calls_capture_nothing",
        "CUDA graphs on a GPU",
        {"speculation_graphs": "on"},
        changes=False,
    ),
    supported(
        "generator",
        "generation/test_coupled.py::test_a_generator_draws_the_seed_and_moves_on",
        "an object, never in JSON",
    ),
    supported(
        "speculation_stats", f"{OPTIONS}::test_speculation_comes_with_the_output_object", "an object, never in JSON"
    ),
    supported(
        "speculation_callback",
        "generation/test_callback.py::test_it_is_told_every_round_as_the_statistics_count_it",
        "called with a `RoundReport`, never in JSON",
    ),
    supported(
        "candidate_generator",
        "draft/test_from_candidate_generator.py::test_greedy_is_plain_greedy",
        "an object, never in JSON; one row",
    ),
    supported(
        "drafter",
        "draft/test_custom.py::test_a_reader_is_told_every_state_and_greedy_text_is_plain",
        "what makes one, never in JSON",
    ),
    supported(
        "draft_state",
        "generation/test_draft_state.py::test_turns_are_the_same_and_the_draft_reads_what_is_new",
        "an object, never in JSON",
    ),
)

# Where a field is set, the strongest source first.
SOURCES = (
    (
        "keyword of `generate()`",
        "`None` means the default, and keeps the sources below out",
        f"{CONFIG}::test_a_confidence_threshold_of_none_keeps_weaker_sources_out",
    ),
    ("`generation_config=` of the call", "`None` counts as not set, here and below", _SOURCES),
    (
        "`fields_from=` of `hf_speculate.generate`",
        "so a repository's fields in `custom_generate` stand here",
        f"{CONFIG}::test_a_repositorys_fields_stand_between_the_call_and_the_model",
    ),
    ("`model.generation_config`", "`enable()` warns where transformers would lose them when saved", _SOURCES),
    ("`assistant_model.generation_config`", "the fields of drafting and verifying only", _SOURCES),
)
# What a number, a schedule and a threshold mean together.
DRAFT_LENGTHS = (
    (
        "`num_assistant_tokens=K` alone",
        "exactly K tokens in every round; a schedule in a weaker source does not count",
        f"{CONFIG}::test_a_schedule_in_a_weaker_source_than_the_number_of_tokens_does_not_count",
    ),
    (
        "`num_assistant_tokens=K` and a schedule in the same or a stronger source",
        'the schedule starts from K; with `"adaptive"` K is the most',
        f"{CONFIG}::test_a_schedule_in_a_stronger_source_counts",
    ),
    (
        "`num_assistant_tokens_schedule` alone",
        'starts from 5; with `"adaptive"` 10 is the most',
        f"{CONFIG}::test_a_schedule_alone_starts_from_the_default",
    ),
    (
        "neither",
        '`"adaptive"`, up to 10 tokens; transformers\' own defaults (20, `"constant"`, 0.4) never count',
        "generation/test_schedules.py::test_adaptive_is_the_default_and_a_number_bounds_it",
    ),
    (
        "`assistant_confidence_threshold`",
        "unset, `None` or 0: off, and off it stays",
        f"{CONFIG}::test_a_confidence_threshold_of_zero_disables",
    ),
)
