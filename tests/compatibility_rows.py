"""The table of all that `generate()` takes: supported, refused or not applicable on an enabled model, row by row.

`tests/compatibility.py` renders it as `docs/compatibility.md`; `tests/test_compatibility.py` holds it true.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType
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

from tests.cases import Streamed
from tests.tiny_tokenizers import letters_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"  # one for each of the 64 ids
TOKENIZER = letters_tokenizer(CHARACTERS, pad_token="a")

Options = Mapping[str, Any] | Callable[[list[int]], Mapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """A call with a draft model, on tiny models in float64."""

    options: Options  # keywords, or what makes them from the new ids of the plain greedy text
    rows: int = 1  # 0 leaves the prompt out
    kind: str = "llama"  # of the models, see `tests.tiny.KINDS`
    samples: bool = False  # with `verifier="coupled"`, whose text is that without a draft; else greedy
    changes: bool = True  # the text is another one without the row's name, so that a name without effect is noticed
    in_configs: bool = True  # the name is met in a `GenerationConfig` too


@dataclass(frozen=True)
class Row:
    """One name in one state; a name may have several rows.

    What is "supported" is as in plain decoding, or as the README says for fields of ours; what is "not supported"
    raises before the first forward; what has "no effect" changes nothing, in plain decoding or with a draft.
    """

    name: str
    state: str
    note: str  # what to know, which calls raise (empty: the call itself), or why there is no effect
    call: Call | None  # its text is plain decoding's, it raises, or its text is the same without the name
    shown_by: str  # the test that shows that it is supported, as `file::name` below `tests/`


def _row(state: str, name: str, note: str = "", value: Any = None, shown_by: str = "", **more: Any) -> Row:
    """A row, with a call if it has a value or further options; `more` may hold fields of the call.

    A function or a mapping as the value is all options of the call.
    """
    settings = {field.name: more.pop(field.name) for field in fields(Call) if field.name in more}
    is_whole = isinstance(value, FunctionType | Mapping)
    options = value if is_whole else {**({} if value is None else {name: value}), **more}
    call = Call(options, **settings) if options or is_whole else None
    return Row(name, state, note, call, shown_by or SHOWN_BY.get(name, HERE))


supported, refused, ignored = (partial(_row, state) for state in ("supported", "not supported", "no effect"))


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
CONFIG = "test_config.py"
LOOKUP = "generation/test_lookup.py"
ENCODERS = "generation/test_encoder_decoder.py"
STATES_OF_ENCODERS = f"{ENCODERS}::test_hidden_states_are_those_of_plain"
BUFFERS = "generation/test_preallocated.py"
DYNAMIC = f"{BUFFERS}::test_the_dynamic_cache_serves_what_cannot_be_preallocated"
STATIC = "generation/test_passed_caches.py::test_the_static_cache_that_is_returned_is_that_of_plain"
PICTURES = "generation/test_prompt_arguments.py"
SOURCE_OF_FIELDS = f"{CONFIG}::test_every_field_is_taken_from_the_strongest_source_that_sets_it"
SCHEDULES = "generation/test_schedules.py::test_adaptive_is_the_default_and_a_number_bounds_it"
TYPICAL = "verify/test_verifiers.py::test_typical"
HERE = "test_compatibility.py::test_a_supported_value_gives_the_text_of_plain_decoding"
READ_WITH_PROMPT = (
    "aspect_ratio_ids aspect_ratio_mask audio_attention_mask audio_embed_sizes audio_input_features "
    "feature_attention_mask image_attention_mask image_patches image_patches_indices image_pixel_values "
    "input_features input_features_mask input_values input_values_mask padding_mask"
)
BESIDE_PIXELS = "image_sizes mm_encoder_outputs pixel_attention_mask second_per_grid_ts"
ENCODED = f"{PICTURES}::test_what_an_encoder_reads_beside_its_text"
# The test that shows a supported name, and the names that it shows; for others it is HERE.
TESTS = {
    SOURCE_OF_FIELDS: "generation_config",
    f"{OPTIONS}::test_foreign_processors_and_criteria_are_called_exactly_as_in_plain": (
        "logits_processor stopping_criteria"
    ),
    "generation/test_synced.py::test_synced_ranks_run_the_same_forwards_and_get_their_own_texts": "synced_gpus",
    AS_PLAIN: (
        "assistant_model input_ids attention_mask min_new_tokens use_cache repetition_penalty no_repeat_ngram_size "
        "bad_words_ids forced_eos_token_id exponential_decay_length_penalty suppress_tokens sequence_bias "
        "output_scores output_logits return_dict_in_generate"
    ),
    f"{OPTIONS}::test_a_streamer_gets_the_same_tokens_as_in_plain_one_by_one": "streamer",
    "generation/test_enable.py::test_the_hub_repository_runs_through_custom_generate": (
        "custom_generate trust_remote_code"
    ),
    f"{OPTIONS}::test_stop_strings_end_the_text_where_plain_ends_it": "tokenizer stop_strings",
    "generation/test_vocabularies.py::test_another_tokenizer_greedy_is_plain_greedy": "assistant_tokenizer",
    f"{PICTURES}::test_positions_that_the_user_passes_go_on_from_the_last": "position_ids",
    f"{PICTURES}::test_token_types_repeat_the_prompts_last": "token_type_ids",
    "generation/test_prompts.py::test_greedy_text_of_embeddings_is_plain": "inputs_embeds",
    "generation/test_passed_caches.py::test_a_passed_cache_advances_in_place_over_two_turns": "past_key_values",
    "generation/test_recurrent.py::test_a_passed_cache_goes_on_from_call_to_call": "cache_params",
    f"{ENCODERS}::test_passed_encoder_outputs": "encoder_outputs",
    f"{ENCODERS}::test_prompts_of_the_decoder_may_be_padded": "decoder_input_ids decoder_attention_mask",
    f"{PICTURES}::test_a_reader_decodes_as_in_plain": f"cross_attention_mask {BESIDE_PIXELS} {READ_WITH_PROMPT}",
    "generation/test_models.py::test_every_row_may_have_its_own_adapter": "adapter_names",
    f"{OPTIONS}::test_max_new_tokens_is_exact_and_prompts_of_int32_are_taken": "max_new_tokens",
    f"{OPTIONS}::test_max_time_stops_soon": "max_time",
    "generation/test_distribution.py::test_lossless_verifiers_keep_the_joint_distribution": "do_sample",
    "draft/heads/test_mtp.py::test_use_mtp_drafts_for_batches": "use_mtp",
    STATIC: "max_cache_len",
    "processors/test_processors.py::test_block_equals_position_by_position": (
        "renormalize_logits forced_bos_token_id remove_invalid_values begin_suppress_tokens watermarking_config "
        "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff"
    ),
    f"{OPTIONS}::test_a_healed_prompt_is_that_of_plain": "token_healing",
    f"{ENCODERS}::test_greedy_equals_plain": "decoder_start_token_id",
    f"{CONFIG}::test_a_schedule_alone_starts_from_the_default": "num_assistant_tokens",
    SCHEDULES: "num_assistant_tokens_schedule",
    "generation/test_schedules.py::test_a_confidence_threshold_shortens_drafts_but_not_the_text": (
        "assistant_confidence_threshold"
    ),
    f"{LOOKUP}::test_fields_of_configs_count_and_configs_stay_as_they_are": "prompt_lookup_num_tokens",
    f"{LOOKUP}::test_a_shorter_ngram_copies_otherwise": "max_matching_ngram_size",
    "draft/test_early_exit.py::test_the_generation_config_may_ask_for_it": "assistant_early_exit",
    "generation/test_compiled.py::test_text_equals_plain_and_rows_that_end_stay": "compile_config",
    "generation/test_compiled.py::test_where_plain_generate_would_not_compile_we_do_not_and_say_so": "disable_compile",
    "generation/test_matrix.py::test_a_row_of_a_batch_is_drawn_as_alone_and_every_token_is_counted": "verifier seed",
    f"{TYPICAL}_settings_reach_the_kernel_through_generate": "posterior_threshold posterior_alpha entropy_epsilon",
    f"{TYPICAL}_correction_is_the_argmax_or_a_draw": "typical_correction",
    "generation/test_spans.py::test_outside_of_spans_greedy_tokens_are_the_argmax": "relax_only_inside",
    "generation/test_distribution.py::test_other_kinds_of_rounds_keep_the_joint_distribution": "draft_sampling",
    f"{LOOKUP}::test_a_store_carries_texts_from_call_to_call": "suffix_store",
    "generation/test_bad_input.py::test_triton_by_name_where_it_cannot_run": "verifier_backend",
    f"{BUFFERS}::test_text_equals_plain_and_the_dynamic_cache_while_buffers_grow_and_windows_move": "speculation_cache",
    "generation/test_graphs.py::test_a_draft_model_gives_the_plain_text_and_later_calls_capture_nothing": (
        "speculation_graphs"
    ),
    "generation/test_coupled.py::test_a_generator_draws_the_seed_and_moves_on_and_torchs_is_the_default": "generator",
    f"{OPTIONS}::test_speculation_comes_with_the_output_object": "speculation_stats",
    "generation/test_callback.py::test_it_is_told_every_round_as_the_statistics_count_it": "speculation_callback",
    "draft/test_from_candidate_generator.py::test_greedy_is_plain_greedy": "candidate_generator",
    "draft/test_custom.py::test_a_reader_is_told_every_state_and_greedy_text_is_plain": "drafter",
    "generation/test_draft_state.py::test_turns_are_the_same_and_the_draft_reads_what_is_new": "draft_state",
    f"{PICTURES}::test_readers_of_images_decode_as_in_plain": "image_grid_thw mm_token_type_ids pixel_values",
    f"{PICTURES}::test_videos_are_read_as_images_are": "pixel_values_videos video_grid_thw",
    f"{PICTURES}::test_features_are_chosen_as_the_call_says": "vision_feature_layer vision_feature_select_strategy",
    f"{OPTIONS}::test_hidden_states_and_attentions_are_those_of_plain": "output_attentions output_hidden_states",
}
SHOWN_BY = {name: test for test, names in TESTS.items() for name in names.split()}
LOCK_STEP = "rows move in lock step"
SETTINGS = "see [settings](settings.md#where-a-field-is-set)"
UNDECLARED = f"{LOCK_STEP} for one that is not declared with `register_row_wise`"
COMPILED = '`"static"`, see [calls](calls.md#compiled-rounds)'
PAGED = '`"paged"` as a keyword; a config with it decodes plainly in transformers too'
QUANTIZED = '`"quantized"`, whatever the `cache_config`; transformers makes the cache first, if it can'
MAPPED = (
    "transformers encodes the text's end again for a draft of another tokenizer; here ids are mapped to ids, and no "
    "text is encoded"
)
BEAMS = (
    "only beam search, which is not supported, reads it; greedy decoding and sampling ignore it, in transformers too"
)


SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)


def _ids(*ids):
    return torch.tensor([ids])


ARGUMENTS = (
    supported("inputs", "the same as `input_ids`", _ids(5, 3, 11, 7, 2), rows=0, changes=False),
    supported("generation_config", SETTINGS),
    supported("logits_processor", UNDECLARED, LogitsProcessorList([Shift()]), rows=3, changes=False),
    supported("stopping_criteria", UNDECLARED, StoppingCriteriaList([StopAtSum()]), rows=3, changes=False),
    supported(
        "prefix_allowed_tokens_fn",
        LOCK_STEP,
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, 64, 2))},
        rows=3,
    ),
    supported("synced_gpus", "not with every source of drafts, see [calls](calls.md#ranks-of-a-distributed-call)"),
    supported("assistant_model"),
    refused(
        "assistant_model", "beside `assistant_early_exit`, `drafter` or `candidate_generator`", assistant_early_exit=1
    ),
    supported("streamer", value=Streamed(), changes=False),
    refused("streamer", "more than one row", Streamed(), rows=2),
    supported("negative_prompt_ids", f"with `guidance_scale`; {LOCK_STEP}", _ids(9, 8, 7), guidance_scale=1.7),
    supported(
        "negative_prompt_attention_mask",
        f"with `negative_prompt_ids`; {LOCK_STEP}",
        _ids(0, 1, 1),
        negative_prompt_ids=_ids(9, 8, 7),
        guidance_scale=1.7,
    ),
    supported("custom_generate", "a repository"),
    refused("custom_generate", "a function", {"custom_generate": lambda model, input_ids: input_ids}),
    supported("trust_remote_code", "for `custom_generate`"),
    supported("tokenizer", "for `stop_strings` and drafts of other vocabularies"),
    supported("assistant_tokenizer", value=TOKENIZER, tokenizer=TOKENIZER, changes=False),
    supported("input_ids"),
    supported("attention_mask", value={}, rows=3, changes=False),
    refused("attention_mask", "of another shape than the prompt", torch.ones(1, 3, dtype=torch.int64)),
    supported("position_ids"),
    supported("token_type_ids"),
    supported(
        "inputs_embeds",
        "with or without `input_ids`, which are all that a draft model reads of the prompt",
        torch.ones(1, 3, 32).double() / 8,
        rows=0,
        changes=False,
    ),
    refused("inputs_embeds", "with `prefill_chunk_size`", torch.zeros(1, 3, 32).double(), prefill_chunk_size=2, rows=0),
    supported(
        "past_key_values",
        "a `DynamicCache` or a `StaticCache`, or an `EncoderDecoderCache` of two; rows that end early hold their "
        "padding, as in plain",
    ),
    supported("cache_params", "the name of `past_key_values` in models with recurrent layers alone"),
    ignored("logits_to_keep", "only the last position of a prompt is used", 3, rows=3, in_configs=False),
    supported("encoder_outputs", "for drafts without an encoder"),
    supported("decoder_input_ids"),
    supported("decoder_attention_mask"),
    *(
        supported(name, "read with the prompt; the draft model reads text alone")
        for name in ("image_grid_thw", "mm_token_type_ids", "pixel_values")
    ),
    *map(
        supported, ("pixel_values_videos", "video_grid_thw", "vision_feature_layer", "vision_feature_select_strategy")
    ),
    *(supported(name, "read with the prompt") for name in f"{BESIDE_PIXELS} {READ_WITH_PROMPT}".split()),
    supported("cross_attention_mask", "the last token's goes on for those that follow"),
    *(
        supported(name, "read by the encoder of an encoder-decoder", shown_by=ENCODED)
        for name in ("global_attention_mask", "pixel_values")
    ),
    ignored("output_router_logits", "plain decoding returns none of them either", True, kind="mixtral"),
    supported("adapter_names", "PEFT's, one adapter a row"),
    refused(
        "any other model argument",
        "`encoder_hidden_states` of GPT-2, for example",
        encoder_hidden_states=torch.zeros(1, 3, 32).double(),
        kind="gpt2",
    ),
)

FIELDS = (
    supported("max_length", value=20, max_new_tokens=None, changes=False),
    supported("max_new_tokens", value=5),
    supported("min_length", value=lambda text: {"min_length": 16, "eos_token_id": text[3]}),
    supported("min_new_tokens", value=lambda text: {"min_new_tokens": 9, "eos_token_id": text[3]}),
    ignored("early_stopping", BEAMS, True),
    supported("max_time", "looked at once a round", 600.0, changes=False),
    supported("stop_strings", value=lambda text: {"stop_strings": CHARACTERS[text[4]], "tokenizer": TOKENIZER}),
    refused("stop_strings", "without `tokenizer`", ["a"]),
    supported("do_sample", value={}, samples=True, changes=False),
    refused("do_sample", 'with `verifier="greedy"`', True, verifier="greedy"),
    refused("num_beams", value=2),
    supported("use_mtp", "for DeepSeek-V3 and GLM-4 MoE targets"),
    refused("use_mtp", value=True),
    supported("use_cache", "`True`", True, changes=False),
    refused("use_cache", value=False),
    supported("cache_implementation", '`"dynamic"`', "dynamic", changes=False, shown_by=DYNAMIC),
    supported("cache_implementation", COMPILED, "static", changes=False, shown_by=STATIC),
    refused("cache_implementation", value="offloaded"),
    refused("cache_implementation", value="offloaded_static"),
    refused("cache_implementation", PAGED, "paged", in_configs=False),
    *(  # older versions have no backend without a package
        refused("cache_implementation", QUANTIZED, "quantized", cache_config={"backend": "fp8"})
        for _ in range(hasattr(cache_utils, "Fp8QuantizedLayer"))
    ),
    ignored(
        "cache_config",
        'only `cache_implementation="quantized"` reads it, whose caches are not supported',
        {"cache_config": {}},
    ),
    supported(
        "max_cache_len", "with a static cache or compiled rounds", 64, cache_implementation="static", changes=False
    ),
    *(
        supported(name, value=value, samples=True)
        for name, value in {"temperature": 0.4, "top_k": 2, "top_p": 0.3, "min_p": 0.4, "top_h": 0.2}.items()
    ),
    *(
        supported(name, value=value, samples=True)
        for name, value in {"typical_p": 0.3, "epsilon_cutoff": 0.2, "eta_cutoff": 0.5}.items()
    ),
    supported("repetition_penalty", value=1.6, rows=3),
    supported("encoder_repetition_penalty", LOCK_STEP, 3.0, rows=3),
    ignored("length_penalty", BEAMS, 2.0),
    supported("no_repeat_ngram_size", value=1, rows=3),
    supported("bad_words_ids", value=lambda text: {"bad_words_ids": [[text[3]], [text[5], text[6]]]}),
    supported("renormalize_logits", value=True, samples=True, changes=False),
    supported("forced_bos_token_id", "after a prompt of one token", 9, bos_token_id=5, rows=0),
    supported("forced_eos_token_id", value=9),
    supported("remove_invalid_values", value=True, changes=False),
    supported(
        "exponential_decay_length_penalty",
        value=lambda text: {"exponential_decay_length_penalty": (1, 9.0), "eos_token_id": text[8]},
    ),
    supported("suppress_tokens", value=lambda text: {"suppress_tokens": [text[2]]}),
    supported("begin_suppress_tokens", value=lambda text: {"begin_suppress_tokens": [text[0]]}),
    supported("sequence_bias", value={"sequence_bias": {(3,): 9.0, (4, 5): -3.0}}, rows=3),
    supported("token_healing", "needs `tokenizer`"),
    supported("guidance_scale", LOCK_STEP, 1.7),
    supported("watermarking_config", value=WatermarkingConfig(bias=9.0), rows=3),
    supported("watermarking_config", f"SynthID; {LOCK_STEP}", SYNTH_ID, shown_by=HERE, rows=3, changes=False),
    supported("num_return_sequences", value=3, samples=True),
    *(supported(name, "one row, decoder-only") for name in ("output_attentions", "output_hidden_states")),
    supported("output_hidden_states", "one row, encoder-decoders too", shown_by=STATES_OF_ENCODERS),
    *(
        refused(name, "more than one row", True, return_dict_in_generate=True, rows=2)
        for name in ("output_attentions", "output_hidden_states")
    ),
    *(
        supported(name, value=True, return_dict_in_generate=True, rows=3, changes=False)
        for name in ("output_scores", "output_logits", "return_dict_in_generate")
    ),
    supported("pad_token_id", value=lambda text: {"pad_token_id": 5, "eos_token_id": text[3]}, rows=3),
    supported("bos_token_id", "the prompt of a call without one", 5, rows=0, changes=False),
    supported("eos_token_id", value=lambda text: {"eos_token_id": [text[3], text[7]]}),
    supported("encoder_no_repeat_ngram_size", LOCK_STEP, 1, rows=3, changes=False),
    supported("decoder_start_token_id"),
    supported(
        "is_assistant",
        "adds transformers' confidence criterion, which needs recorded scores, as in plain decoding; meant for its "
        f"own draft models; {LOCK_STEP}",
        True,
        return_dict_in_generate=True,
        output_scores=True,
        changes=False,
    ),
    supported("num_assistant_tokens", SETTINGS, 3, changes=False),
    supported("num_assistant_tokens_schedule", SETTINGS, "heuristic", changes=False),
    supported("assistant_confidence_threshold", SETTINGS, 0.9, rows=3, changes=False),
    supported(
        "prompt_lookup_num_tokens",
        "alone, or beside `assistant_model`",
        3,
        assistant_model=None,
        rows=3,
        changes=False,
    ),
    supported("max_matching_ngram_size", "64 where unset", 1, prompt_lookup_num_tokens=3, changes=False),
    supported("assistant_early_exit", value=1, assistant_model=None, rows=3, changes=False),
    *(ignored(name, MAPPED, 3) for name in ("assistant_lookbehind", "target_lookbehind")),
    refused("assistant_ensemble_weight", value=0.5),
    refused("speculation_type", value="dflash"),
    supported("compile_config", "compiles where plain decoding would", CompileConfig(), changes=False),
    supported("disable_compile", value=True, cache_implementation="static", changes=False),
    ignored("continuous_batching_config", "only `generate_batch()` reads it, which is not speculative"),
    ignored("low_memory", BEAMS, True),
    refused("penalty_alpha", "greedy, with `top_k` above 1, as it is by default", 0.6),
    ignored("penalty_alpha", "sampling passes over it", 0.6, samples=True),
    refused("dola_layers", value="low"),
    ignored("diversity_penalty", BEAMS, 0.5),
    ignored("num_beam_groups", BEAMS, 2),
    refused("constraints", value=[]),
    refused("force_words_ids", value=[[3]]),
    supported("prefill_chunk_size", "not supported with images", 4, rows=3, changes=False),
    ignored("transformers_version", "says which version saved the config", "5.0.0"),
)

OWN_FIELDS = (
    supported("verifier", value="block", changes=False),
    *(
        supported(name, 'for `"typical"`')
        for name in ("posterior_threshold", "posterior_alpha", "entropy_epsilon", "typical_correction")
    ),
    supported(
        "relax_only_inside",
        "with a lossy verifier: two ids, between which it decides; outside the text is plain decoding's",
    ),
    refused("relax_only_inside", value=(3, 5)),
    supported("draft_sampling", "under `do_sample=True`", "argmax", samples=True, changes=False),
    supported("suffix_store", "an object, never in JSON"),
    supported("verifier_backend", value="torch", samples=True, changes=False),
    supported("speculation_cache", value="dynamic", rows=3, changes=False),
    supported("seed", value=7, samples=True),
    supported("speculation_graphs", "CUDA graphs on a GPU", "on", changes=False),
    supported("generator", "an object, never in JSON"),
    supported("speculation_stats", "an object, never in JSON"),
    supported("speculation_callback", "called with a `RoundReport`, never in JSON"),
    supported("candidate_generator", "an object, never in JSON; one row"),
    supported("drafter", "what makes one, never in JSON"),
    supported("draft_state", "an object, never in JSON"),
)
