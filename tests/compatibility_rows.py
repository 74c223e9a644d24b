"""List every argument of `generate()` as supported, refused or not applicable, one per row.

`tests/compatibility.py` renders the table as `docs/compatibility.md`, and
`tests/test_compatibility.py` tests it.
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
from tests.support.tiny_tokenizers import letters_tokenizer

# one entry for each of the 64 ids
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"
TOKENIZER = letters_tokenizer(CHARACTERS, pad_token="a")

Options = Mapping[str, Any] | Callable[[list[int]], Mapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """Call with a draft model, using tiny models in float64."""

    options: Options  # keyword arguments, or a function of the new ids of plain greedy decoding
    rows: int = 1  # 0 for a call without a prompt
    family: str = "llama"  # model family, see `tests.support.tiny.KINDS`
    # True: `verifier="coupled"` must give the text of decoding without a draft; False: greedy
    samples: bool = False
    # the name changes the text, so the test fails if the name has no effect
    changes: bool = True
    in_configs: bool = True  # the name is also valid in a `GenerationConfig`


@dataclass(frozen=True)
class Row:
    """One name and its state.

    `tests.compatibility.INTRODUCTION` explains the states. A name may have several rows.
    """

    name: str
    state: str
    note: str  # explanation; calls that raise (empty: the call itself); or why it has no effect
    call: Call | None  # equals plain decoding, raises, or gives the same text without the name


def _row(state: str, name: str, note: str = "", value: Any = None, **more: Any) -> Row:
    """Make a row, with a call if it has a value or further options.

    `more` may contain fields of the call. If the value is a function or a mapping, it provides all
    options of the call.
    """
    settings = {field.name: more.pop(field.name) for field in fields(Call) if field.name in more}
    is_whole = isinstance(value, FunctionType | Mapping)
    options = value if is_whole else {**({} if value is None else {name: value}), **more}
    call = Call(options, **settings) if options or is_whole else None
    return Row(name, state, note, call)


supported, refused, ignored = (
    partial(_row, state) for state in ("supported", "not supported", "no effect")
)
same = partial(supported, changes=False)  # supported, but does not change the text


def _each(make: Callable[..., Row], names: str, *note_and_value: Any, **more: Any) -> list[Row]:
    """Copy one row for each of the names."""
    return [make(name, *note_and_value, **more) for name in names.split()]


class Shift(LogitsProcessor):
    """Custom processor that forbids the successor of the last id."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, (input_ids[:, -1:] + 1) % scores.shape[1], -torch.inf)


class StopAtSum(StoppingCriteria):
    """Custom criterion on the last three ids.

    It ends a row if their sum is a multiple of seven.
    """

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(1) % 7 == 0


WITH_PROMPT = "read with the prompt"
READ_WITH_PROMPT = (
    "image_sizes mm_encoder_outputs pixel_attention_mask second_per_grid_ts "
    "aspect_ratio_ids aspect_ratio_mask audio_attention_mask audio_embed_sizes "
    "audio_input_features "
    "feature_attention_mask image_attention_mask image_patches image_patches_indices "
    "image_pixel_values "
    "input_features input_features_mask input_values input_values_mask padding_mask"
)
LOCK_STEP = "rows move in lock step"
SETTINGS = "see [settings](settings.md#where-a-field-is-set)"
UNDECLARED = f"{LOCK_STEP}, unless declared with `register_row_wise`"
COMPILED = '`"static"`, see [compiled rounds](compiled.md#compiled-rounds)'
PAGED = '`"paged"` as a keyword; a config with it decodes plainly in transformers too'
QUANTIZED = (
    '`"quantized"`, whatever the `cache_config`; transformers makes the cache first, if it can'
)
MAPPED = (
    "transformers encodes the text's end again for a draft of another tokenizer; here ids are "
    "mapped to ids, and no "
    "text is encoded"
)
BEAMS = (
    "read by beam search only (not supported); greedy decoding and sampling ignore it, "
    "in transformers too"
)
ENDED = (
    "behind a row's end 0 at the padding id and -inf elsewhere; plain decoding has its results "
    "for padding"
)
WARPERS = {"temperature": 0.4, "top_k": 2, "top_p": 0.3, "min_p": 0.4, "top_h": 0.2}
WARPERS |= {"typical_p": 0.3, "epsilon_cutoff": 0.2, "eta_cutoff": 0.5}
OBJECT = "an object, never in JSON"
STATES = "output_attentions output_hidden_states"
EVERY_SECOND = {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, 64, 2))}
SYNTH_ID = SynthIDTextWatermarkingConfig(
    keys=[3, 14, 15], ngram_len=4, context_history_size=2, skip_first_ngram_calls=True
)


def _ids(*ids):
    return torch.tensor([ids])


ARGUMENTS = (
    same("inputs", "the same as `input_ids`", _ids(5, 3, 11, 7, 2), rows=0),
    supported("generation_config", SETTINGS),
    same("logits_processor", UNDECLARED, LogitsProcessorList([Shift()]), rows=3),
    same("stopping_criteria", UNDECLARED, StoppingCriteriaList([StopAtSum()]), rows=3),
    supported("prefix_allowed_tokens_fn", LOCK_STEP, EVERY_SECOND, rows=3),
    supported(
        "synced_gpus",
        "not with every source of drafts, see [scaling](scaling.md#ranks-of-a-distributed-call)",
    ),
    supported("assistant_model"),
    refused(
        "assistant_model",
        "beside `assistant_early_exit`, `drafter` or `candidate_generator`",
        assistant_early_exit=1,
    ),
    same("streamer", value=Streamed()),
    refused("streamer", "more than one row", Streamed(), rows=2),
    supported(
        "negative_prompt_ids",
        f"with `guidance_scale`; {LOCK_STEP}",
        _ids(9, 8, 7),
        guidance_scale=1.7,
    ),
    supported(
        "negative_prompt_attention_mask",
        f"with `negative_prompt_ids`; {LOCK_STEP}",
        _ids(0, 1, 1),
        negative_prompt_ids=_ids(9, 8, 7),
        guidance_scale=1.7,
    ),
    supported("custom_generate", "a repository"),
    refused(
        "custom_generate", "a function", {"custom_generate": lambda model, input_ids: input_ids}
    ),
    supported("trust_remote_code", "for `custom_generate`"),
    supported("tokenizer", "for `stop_strings` and drafts of other vocabularies"),
    same("assistant_tokenizer", value=TOKENIZER, tokenizer=TOKENIZER),
    supported("input_ids"),
    same("attention_mask", value={}, rows=3),
    refused(
        "attention_mask", "of another shape than the prompt", torch.ones(1, 3, dtype=torch.int64)
    ),
    *_each(supported, "position_ids token_type_ids"),
    same(
        "inputs_embeds",
        "with or without `input_ids`; a draft model reads only these of the prompt",
        torch.ones(1, 3, 32).double() / 8,
        rows=0,
    ),
    refused(
        "inputs_embeds",
        "with `prefill_chunk_size`",
        torch.zeros(1, 3, 32).double(),
        prefill_chunk_size=2,
        rows=0,
    ),
    supported(
        "cache",
        "a `DynamicCache` or a `StaticCache`, or an `EncoderDecoderCache` of two; rows that end "
        "early hold their "
        "padding, as in plain",
    ),
    supported("past_key_values", "another name of `cache`, with a warning since transformers 5.24"),
    supported(
        "cache_params", "the same, in models with recurrent layers alone before transformers 5.24"
    ),
    ignored(
        "logits_to_keep", "only the last position of a prompt is used", 3, rows=3, in_configs=False
    ),
    supported("encoder_outputs", "for drafts without an encoder"),
    *_each(supported, "decoder_input_ids decoder_attention_mask"),
    *_each(
        supported,
        "image_grid_thw mm_token_type_ids pixel_values",
        f"{WITH_PROMPT}, also by a [capable draft model](drafts.md#pictures)",
    ),
    *_each(
        supported,
        "pixel_values_videos video_grid_thw vision_feature_layer vision_feature_select_strategy",
    ),
    *_each(supported, READ_WITH_PROMPT, WITH_PROMPT),
    supported("cross_attention_mask", "the last token's mask also holds for the next tokens"),
    *_each(
        supported, "global_attention_mask pixel_values", "read by the encoder of an encoder-decoder"
    ),
    ignored(
        "output_router_logits", "plain decoding returns none of them either", True, family="mixtral"
    ),
    supported("adapter_names", "PEFT's, one adapter a row"),
    refused(
        "any other model argument",
        "`encoder_hidden_states` of GPT-2, for example",
        encoder_hidden_states=torch.zeros(1, 3, 32).double(),
        family="gpt2",
    ),
)

FIELDS = (
    same("max_length", value=20, max_new_tokens=None),
    supported("max_new_tokens", value=5),
    supported("min_length", value=lambda text: {"min_length": 16, "eos_token_id": text[3]}),
    supported("min_new_tokens", value=lambda text: {"min_new_tokens": 9, "eos_token_id": text[3]}),
    ignored("early_stopping", BEAMS, True),
    same("max_time", "looked at once a round", 600.0),
    supported(
        "stop_strings",
        value=lambda text: {"stop_strings": CHARACTERS[text[4]], "tokenizer": TOKENIZER},
    ),
    refused("stop_strings", "without `tokenizer`", ["a"]),
    same("do_sample", value={}, samples=True),
    refused("do_sample", 'with `verifier="greedy"`', True, verifier="greedy"),
    refused("num_beams", value=2),
    supported("use_mtp", "for the listed [model types](#model-types)"),
    refused("use_mtp", value=True),
    same("use_cache", "`True`", True),
    refused("use_cache", value=False),
    same("cache_implementation", '`"dynamic"`', "dynamic"),
    same("cache_implementation", COMPILED, "static"),
    *(refused("cache_implementation", value=name) for name in ("offloaded", "offloaded_static")),
    refused("cache_implementation", PAGED, "paged", in_configs=False),
    *(  # older versions have no backend that works without an extra package
        refused("cache_implementation", QUANTIZED, "quantized", cache_config={"backend": "fp8"})
        for _ in range(hasattr(cache_utils, "Fp8QuantizedLayer"))
    ),
    ignored(
        "cache_config",
        'read by `cache_implementation="quantized"` only (not supported)',
        {"cache_config": {}},
    ),
    same(
        "max_cache_len", "with a static cache or compiled rounds", 64, cache_implementation="static"
    ),
    *(supported(name, value=value, samples=True) for name, value in WARPERS.items()),
    supported("repetition_penalty", value=1.6, rows=3),
    supported("encoder_repetition_penalty", value=3.0, rows=3),
    ignored("length_penalty", BEAMS, 2.0),
    supported("no_repeat_ngram_size", value=1, rows=3),
    supported(
        "bad_words_ids", value=lambda text: {"bad_words_ids": [[text[3]], [text[5], text[6]]]}
    ),
    same("renormalize_logits", value=True, samples=True),
    supported("forced_bos_token_id", "after a prompt of one token", 9, bos_token_id=5, rows=0),
    supported("forced_eos_token_id", value=9),
    same("remove_invalid_values", value=True),
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
    supported("watermarking_config", f"SynthID; {LOCK_STEP}", SYNTH_ID, rows=3),
    supported("num_return_sequences", value=3, samples=True),
    *_each(supported, STATES, "one row, decoder-only"),
    supported("output_hidden_states", "one row, encoder-decoders too"),
    *_each(refused, STATES, "more than one row", True, return_dict_in_generate=True, rows=2),
    *_each(same, "output_scores output_logits", ENDED, True, return_dict_in_generate=True, rows=3),
    same("return_dict_in_generate", value=True, rows=3),
    supported(
        "pad_token_id", value=lambda text: {"pad_token_id": 5, "eos_token_id": text[3]}, rows=3
    ),
    same("bos_token_id", "the prompt of a call without one", 5, rows=0),
    supported("eos_token_id", value=lambda text: {"eos_token_id": [text[3], text[7]]}),
    supported("encoder_no_repeat_ngram_size", value=1, rows=3),
    supported("decoder_start_token_id"),
    same(
        "is_assistant",
        "adds transformers' confidence criterion; it needs recorded scores, as in plain "
        "decoding; meant for its "
        f"own draft models; {LOCK_STEP}",
        True,
        return_dict_in_generate=True,
        output_scores=True,
    ),
    same("num_assistant_tokens", SETTINGS, 3),
    same("num_assistant_tokens_schedule", SETTINGS, "heuristic"),
    same("assistant_confidence_threshold", SETTINGS, 0.9, rows=3),
    same(
        "prompt_lookup_num_tokens",
        "alone, or beside `assistant_model`",
        3,
        assistant_model=None,
        rows=3,
    ),
    same("max_matching_ngram_size", "64 where unset", 1, prompt_lookup_num_tokens=3),
    same("assistant_early_exit", value=1, assistant_model=None, rows=3),
    *_each(ignored, "assistant_lookbehind target_lookbehind", MAPPED, 3),
    refused("assistant_ensemble_weight", value=0.5),
    refused("speculation_type", value="dflash"),
    same("compile_config", "compiles where plain decoding would", CompileConfig()),
    same("disable_compile", value=True, cache_implementation="static"),
    ignored("continuous_batching_config", "read by `generate_batch()` only, without speculation"),
    ignored("low_memory", BEAMS, True),
    refused("penalty_alpha", "greedy, with `top_k` above 1, as it is by default", 0.6),
    ignored("penalty_alpha", "sampling passes over it", 0.6, samples=True),
    refused("dola_layers", value="low"),
    ignored("diversity_penalty", BEAMS, 0.5),
    ignored("num_beam_groups", BEAMS, 2),
    refused("constraints", value=[]),
    refused("force_words_ids", value=[[3]]),
    same("prefill_chunk_size", "not supported with images", 4, rows=3),
    ignored("transformers_version", "the version of transformers in the saved config", "5.0.0"),
)

OWN_FIELDS = (
    same("verifier", value="block"),
    *_each(
        supported,
        "posterior_threshold posterior_alpha entropy_epsilon typical_correction",
        'for `"typical"`',
    ),
    supported(
        "relax_only_inside",
        "with a lossy verifier: it decides between two ids; outside, the text is plain decoding's",
    ),
    refused("relax_only_inside", value=(3, 5)),
    same("draft_sampling", "under `do_sample=True`", "argmax", samples=True),
    same("grammar_draft", "needs `tokenizer` and a processor with `forced_text()`", False),
    refused("grammar_draft", "without such a processor", True),
    supported("suffix_store", OBJECT),
    same("verifier_backend", value="torch", samples=True),
    same("speculation_cache", value="dynamic", rows=3),
    supported("seed", value=7, samples=True),
    same("speculation_graphs", "CUDA graphs on a GPU", "on"),
    same("speculation_hooks", "targets with [hooks of your own](supported.md#hooks)", "trusted"),
    *_each(supported, "generator speculation_stats", OBJECT),
    supported("speculation_callback", "called with a `RoundReport`, never in JSON"),
    supported("candidate_generator", f"{OBJECT}; one row"),
    supported("drafter", "a factory, never in JSON"),
    supported("draft_state", OBJECT),
)
