"""Test that every invalid call raises an error naming the invalid argument before a model runs."""

import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator as ReadsStates,
)

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import (
    ConfigError,
    KernelUnavailableError,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from tests.cases import assert_decodes_as_plain, pair
from tests.support.tiny import make_model, ragged_prompts
from tests.support.tiny_tokenizers import letters_tokenizer

ONES = torch.ones(2, 6, dtype=torch.int64)
LOOKUP = PromptLookupCandidateGenerator()
CHOICES = (
    "verifier",
    "verifier_backend",
    "speculation_cache",
    "num_assistant_tokens_schedule",
    "draft_sampling",
)


@pytest.fixture
def models():
    """Return a pair of models; running either of them fails the test."""

    def fail(*args):
        raise AssertionError("a model ran before the error")

    hooks = [model.register_forward_pre_hook(fail) for model in pair("llama")]
    yield pair("llama")
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({name: "magic"}, "got 'magic'") for name in CHOICES),
        *(
            ({name: -1.0}, "got -1.0")
            for name in ("posterior_threshold", "posterior_alpha", "entropy_epsilon")
        ),
        ({"num_assistant_tokens": -1}, "got -1; leave"),
        ({"prompt_lookup_num_tokens": 0}, "got 0; leave"),
        *(({name: {}}, "got dict") for name in ("suffix_store", "speculation_stats")),
        ({"num_assistant_tokens": 129}, "got 129"),
        ({"assistant_confidence_threshold": 1.5}, "got 1.5"),
        ({"max_matching_ngram_size": 0}, "got 0"),
        ({"suffix_store": hf_speculate.SuffixStore()}, "must come with prompt_lookup_num_tokens"),
        ({"seed": [1, 2], "do_sample": True}, "got 2"),
        ({"seed": 1, "generator": torch.Generator()}, "must not both be set"),
        ({"assistant_early_exit": 2, "assistant_model": None}, "in 1..1 for 2 layers, got 2"),
        ({"assistant_early_exit": True, "assistant_model": None}, "got True"),
        (
            {"assistant_model": "no-such-folder"},
            "assistant_model must name a draft head or a causal language model",
        ),
    ],
)
def test_invalid_fields_are_refused(models, fields, message):
    target, draft = models
    with pytest.raises(ConfigError) as error:
        target.generate(
            **ragged_prompts(1, seed=1),
            **{"assistant_model": draft, "num_assistant_tokens": 3, "max_new_tokens": 3, **fields},
        )
    assert message in str(error.value)
    assert next(iter(fields)) in str(error.value) or "draft head" in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"assistant_model": torch.compile(pair("llama")[1])}, "got OptimizedModule"),
        (lambda: {"assistant_model": object()}, "must be a transformers model that can generate"),
        (
            lambda: {
                "tokenizer": letters_tokenizer("ab"),
                "assistant_tokenizer": letters_tokenizer("xyz"),
            },
            r"must share at least 10% .* got 0 of 2 tokens",
        ),
        (lambda: {"candidate_generator": lambda **_: 3}, "CandidateGenerator, got int"),
        (
            lambda: {"candidate_generator": lambda **_: object.__new__(ReadsStates)},
            "reads return_shared_kv_states",
        ),
        (
            lambda: {"candidate_generator": LOOKUP, "prompt_lookup_num_tokens": 3},
            (
                "pass one draft source, got candidate_generator and prompt_lookup_num_tokens; omit "
                "one of them$"
            ),
        ),
        (
            lambda: {
                "candidate_generator": LOOKUP,
                "prompt_lookup_num_tokens": 3,
                "assistant_early_exit": 1,
            },
            (
                "got assistant_early_exit and candidate_generator and prompt_lookup_num_tokens; "
                "omit all but one$"
            ),
        ),
        (
            lambda: {"candidate_generator": LOOKUP, "num_assistant_tokens_schedule": "adaptive"},
            "must be 'constant'",
        ),
    ],
)
def test_invalid_draft_sources_are_refused(models, make, message):
    target, draft = models
    options = make()
    if "candidate_generator" not in options:
        options = {"assistant_model": draft, **options}
    with pytest.raises(ValueError, match=message):  # raised by transformers
        target.generate(**ragged_prompts(1, seed=1), max_new_tokens=3, **options)


def with_gradient_checkpointing(model):
    name = "activation_checkpointing_enable"  # the name in newer versions
    getattr(model.train(), name if hasattr(model, name) else "gradient_checkpointing_enable")()


def with_indexed_attention(model):
    model.config.layer_types = ["full_attention", "indexed_attention"]


def in_stages(model):
    model.config.distributed_config = SimpleNamespace(pp_size=2)


def without_a_cache(model):
    model.__class__ = type("Cacheless", (type(model),), {"forward": lambda self, input_ids: None})


def without_weights(model):
    model.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_weights, "must have weights, got LlamaForCausalLM on the meta device"),
        (without_a_cache, "must take a cache, got Cacheless"),
        (with_gradient_checkpointing, "in training mode with gradient checkpoint"),
        (with_indexed_attention, "got indexed_attention in LlamaForCausalLM"),
        (in_stages, "must lie whole in every process or be split by tensor parallel"),
    ],
)
def test_unsupported_models_are_refused(models, change, message):
    (target, draft), llama = models, make_model("llama")
    change(llama)
    for first, another in ((llama, draft), (target, llama)):
        with pytest.raises(UnsupportedModelError, match=message):
            hf_speculate.generate(first, **ragged_prompts(1, seed=1), assistant_model=another)


def test_length_dependent_rotary_embeddings_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target = hf_speculate.enable(
        make_model("llama", rope_parameters=rope, max_position_embeddings=32)
    )
    draft, inputs = pair("llama")[1], ragged_prompts(1, seed=1)
    assert_decodes_as_plain(target, draft, inputs, max_new_tokens=8)
    with pytest.raises(UnsupportedModelError, match="max_length must be at most 32"):
        target.generate(**inputs, assistant_model=draft, max_new_tokens=40)


def test_use_cache_false_is_refused_in_a_call_only():
    target, draft = make_model("mpt"), pair("mpt")[1]
    assert target.config.use_cache is False
    target.generation_config = GenerationConfig.from_model_config(target.config)
    hf_speculate.enable(target)
    assert_decodes_as_plain(target, draft, {"input_ids": ONES}, max_new_tokens=8)
    assert target.generation_config.use_cache is False
    own = GenerationConfig(use_cache=False, max_new_tokens=8)
    for options in ({"use_cache": False, "max_new_tokens": 8}, {"generation_config": own}):
        with pytest.raises(
            UnsupportedGenerationError,
            match="use_cache must be True with assistant_model, got False",
        ):
            target.generate(ONES, assistant_model=draft, **options)


def held(model, num_rows, num_tokens):
    cache = DynamicCache(config=model.config)
    for layer in range(2):
        cache.update(*torch.zeros(2, num_rows, 2, num_tokens, 8), layer)
    return cache


@pytest.mark.parametrize(
    ("ids", "num_held", "more", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), (), {}, "at least one token, got an empty one"),
        (ONES, (2, 6), {}, "must hold fewer tokens than the prompt, for 2 rows, got 6"),
        (ONES, (1, 3), {}, "for 2 rows, got 3 of 6 tokens for 1 row;"),
        (
            ONES[:1, :1],
            (),
            {"attention_mask": torch.ones(1, 4)},
            r"must be \[1, 1\] for 1 row of 1 token, got \[1, 4\]",
        ),
        (
            ONES,
            (2, 3),
            {"attention_mask": torch.ones(2, 4)},
            r"must be \[2, 9\] for 2 rows of 3 cached and 6 more",
        ),
        (
            ONES,
            (),
            {"attention_mask": torch.ones(2, 4)},
            r"attention_mask must be \[2, 6\] .* got \[2, 4\]",
        ),
        (ONES, (), {"attention_mask": 1 - torch.eye(6)[:1]}, r"must be \[2, 6\] .* got \[1, 6\]"),
        (
            None,
            (),
            {"inputs_embeds": torch.ones(2, 6, 32), "attention_mask": torch.ones(2, 4)},
            r"must be \[B, 6\]",
        ),
    ],
)
def test_mismatched_prompts_caches_and_masks_are_refused(models, ids, num_held, more, message):
    target, draft = models
    options = {CACHE_NAME: held(target, *num_held)} if num_held else {}
    for drafts in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(UnsupportedGenerationError, match=message):
            target.generate(ids, **options, **more, **drafts, max_new_tokens=3)


@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
def test_triton_by_name_is_refused_without_a_device(models, verifier, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    target, draft = models
    options = {
        "verifier": verifier,
        "do_sample": verifier != "greedy",
        "verifier_backend": "triton",
    }
    options["assistant_model"] = draft if verifier != "coupled" else None
    with pytest.raises(KernelUnavailableError, match='backend must be "auto" or "torch"'):
        target.generate(**ragged_prompts(1, seed=1), **options, max_new_tokens=3)


@pytest.mark.parametrize(
    "function", [hf_speculate.enable, hf_speculate.disable, hf_speculate.is_enabled]
)
def test_enable_refuses_models_without_generate(function):
    with pytest.raises(
        UnsupportedModelError, match="must be a transformers model that can generate, got Linear"
    ):
        function(torch.nn.Linear(1, 1))


def test_mistyped_keyword_error_names_the_nearest():
    target, _ = pair("llama")
    for name, nearest in (
        ("num_asistant_tokens", "num_assistant_tokens"),
        ("asistant_model", "assistant_model"),
        ("max_new_token", "max_new_tokens"),
    ):
        for decode in (target.generate, functools.partial(hf_speculate.generate, target)):
            with pytest.raises(ConfigError, match=f"{name} must be .*; did you mean {nearest}\\?"):
                decode(**ragged_prompts(1, seed=1), **{name: 3}, max_length=3)
    with pytest.raises(ValueError, match="not used by the model"):
        target.generate(**ragged_prompts(1, seed=1), something_else=3)


@pytest.mark.fallback("lock step", "gains nothing")
def test_error_of_user_code_is_raised_unchanged():
    class OwnError(ValueError):
        pass

    def refuse(input_ids, scores):
        raise OwnError("bad 'input_ids'")

    target, draft = pair("llama")
    for arguments in ({}, {"assistant_model": draft}):
        with pytest.raises(OwnError, match="bad 'input_ids'"):
            target.generate(
                **ragged_prompts(1, seed=1),
                max_new_tokens=3,
                logits_processor=[refuse],
                **arguments,
            )
