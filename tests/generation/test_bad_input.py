"""Every wrong call is refused with its reason, before any model runs."""

import functools

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, OpenAIGPTConfig, RwkvConfig
from transformers.generation.candidate_generator import (
    PromptLookupCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)

import hf_speculate
from hf_speculate.errors import ConfigError, KernelUnavailableError, UnsupportedGenerationError, UnsupportedModelError
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.generation.test_encoder_decoder import encoder_pair
from tests.generation.test_encoder_decoder import inputs_of as encoder_inputs
from tests.tiny import make_model, ragged_prompts
from tests.tiny_tokenizers import letters_tokenizer


@pytest.fixture
def models(monkeypatch):
    """A pair whose forwards fail the test."""
    target, draft = pair("llama")

    for model in (target, draft):

        @functools.wraps(type(model).forward)
        def forward(*args, **kwargs):
            raise AssertionError("a model ran before the refusal")

        monkeypatch.setattr(type(model), "forward", forward)
    return target, draft


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verifier": "magic"}, "verifier must be one of block, coupled, greedy, rejection, typical, got 'magic'"),
        ({"verifier_backend": "cuda"}, "verifier_backend must be one of auto, torch, triton, got 'cuda'"),
        ({"speculation_cache": "paged"}, "speculation_cache must be one of auto, dynamic, preallocated"),
        ({"num_assistant_tokens_schedule": "fastest"}, "one of adaptive, constant, heuristic, heuristic_transient"),
        ({"posterior_threshold": 0.0}, r"posterior_threshold must be in \(0, 1\), got 0.0"),
        ({"posterior_threshold": 1.0}, r"posterior_threshold must be in \(0, 1\), got 1.0"),
        ({"posterior_alpha": 0}, "posterior_alpha must be > 0 and finite, got 0"),
        ({"entropy_epsilon": -1e-5}, "entropy_epsilon must be >= 0"),
        ({"typical_correction": "best"}, "typical_correction must be one of argmax, sample, got 'best'"),
        ({"draft_sampling": "beam"}, "draft_sampling must be one of argmax, sample"),
        (
            {"num_assistant_tokens": 0},
            r"num_assistant_tokens must be in 1\.\.128, or .* per output row, got 0; leave assistant_model out",
        ),
        ({"num_assistant_tokens": 129}, r"num_assistant_tokens must be in 1\.\.128, or .* per output row, got 129"),
        ({"num_assistant_tokens": 2.5}, r"num_assistant_tokens must be in 1\.\.128, or .* per output row, got 2.5"),
        ({"assistant_confidence_threshold": 1.5}, r"assistant_confidence_threshold must be in \[0, 1\], got 1.5"),
        ({"prompt_lookup_num_tokens": 0}, r"prompt_lookup_num_tokens must be in 1\.\.128, got 0; leave it out"),
        ({"prompt_lookup_num_tokens": 129}, r"prompt_lookup_num_tokens must be in 1\.\.128, got 129"),
        ({"max_matching_ngram_size": 0}, "max_matching_ngram_size must be at least 1, got 0; leave it out"),
        ({"suffix_store": {}, "prompt_lookup_num_tokens": 3}, "suffix_store must be a SuffixStore, got dict"),
        ({"suffix_store": hf_speculate.SuffixStore()}, "suffix_store must come with prompt_lookup_num_tokens"),
        ({"seed": "x"}, "seed must be an int or one int per output row, got 'x'"),
        ({"seed": [1, 2], "do_sample": True}, "one int per output row, 1 of them, got 2"),
        ({"seed": 1, "generator": torch.Generator()}, "seed and generator must not both be set"),
        ({"generator": 5}, "generator must be a torch.Generator, got int"),
        ({"speculation_stats": {}}, "speculation_stats must be a SpeculationStats, got dict"),
        ({"verifier": "greedy", "do_sample": True}, "verifier must be a sampling one with do_sample=True"),
    ],
)
def test_wrong_fields(models, fields, message):
    target, draft = models
    with pytest.raises(ConfigError, match=message):
        target.generate(**ragged_prompts(1, seed=1), assistant_model=draft, **fields)


def test_an_empty_prompt(models):
    target, draft = models
    with pytest.raises(UnsupportedGenerationError, match="must hold at least one token, got an empty one"):
        target.generate(torch.zeros(1, 0, dtype=torch.int64), assistant_model=draft, max_new_tokens=3)


def test_a_wrapper_around_a_model(models):
    target, draft = models
    wrapped = torch.compile(draft)
    with pytest.raises(UnsupportedModelError, match=r"got OptimizedModule; .*compile it in place"):
        target.generate(**ragged_prompts(1, seed=1), assistant_model=wrapped)
    with pytest.raises(UnsupportedModelError, match=r"got OptimizedModule; .*compile in place, with model\.compile"):
        hf_speculate.enable(wrapped)


def test_a_draft_of_another_vocabulary(models):
    target, _ = models
    with pytest.raises(UnsupportedModelError, match=r"must have the target's vocabulary of 64 tokens, or .* got 2000"):
        target.generate(**ragged_prompts(1, seed=1), assistant_model=make_model("qwen2", vocab_size=2000))


def test_a_draft_of_another_tokenizer(models):
    target, draft = models
    with pytest.raises(UnsupportedModelError, match=r"must share at least 10% .* got 0 of 2 tokens \(0\.0%\)"):
        target.generate(
            **ragged_prompts(1, seed=1),
            assistant_model=draft,
            tokenizer=letters_tokenizer("ab"),
            assistant_tokenizer=letters_tokenizer("xyz"),
        )


def test_prompt_lookup_beside_a_candidate_generator(models):
    target, _ = models
    options = {"candidate_generator": PromptLookupCandidateGenerator(), "prompt_lookup_num_tokens": 3}
    with pytest.raises(UnsupportedGenerationError, match="got candidate_generator and prompt_lookup_num_tokens"):
        target.generate(**ragged_prompts(1, seed=1), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"assistant_early_exit": 0}, ConfigError, r"assistant_early_exit must be in 1\.\.1 for 2 layers, got 0"),
        ({"assistant_early_exit": 2}, ConfigError, r"assistant_early_exit must be in 1\.\.1 for 2 layers, got 2"),
        ({"assistant_early_exit": True}, ConfigError, "got True"),
        ({"candidate_generator": 3}, ConfigError, "must be a CandidateGenerator or make one, got int"),
        (
            {"candidate_generator": lambda **_: 3},
            UnsupportedGenerationError,
            "a transformers CandidateGenerator, got int",
        ),
        (
            {"candidate_generator": PromptLookupCandidateGenerator(), "num_assistant_tokens_schedule": "adaptive"},
            ConfigError,
            "must be 'constant' with candidate_generator, got 'adaptive'",
        ),
        (
            {"candidate_generator": lambda **_: object.__new__(SinglePositionMultiTokenCandidateGenerator)},
            UnsupportedGenerationError,
            "got SinglePositionMultiTokenCandidateGenerator, which reads return_shared_kv_states",
        ),
    ],
)
def test_wrong_sources_of_drafts(models, options, error, message):
    target, _ = models
    with pytest.raises(error, match=message):
        target.generate(**ragged_prompts(1, seed=1), max_new_tokens=3, **options)


def test_an_assistant_that_is_no_model(models):
    target, _ = models
    with pytest.raises(UnsupportedModelError, match="assistant_model must be a transformers model that can generate"):
        target.generate(**ragged_prompts(1, seed=1), assistant_model=object())
    with pytest.raises(ConfigError, match="a draft head must be a folder or a Hub repository"):
        target.generate(**ragged_prompts(1, seed=1), assistant_model="draft")


def test_an_unfit_assistant_is_a_value_error_as_in_transformers():
    config = RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, context_length=32)
    rwkv = AutoModelForCausalLM.from_config(config)
    inputs = ragged_prompts(1, seed=1)
    target, draft = make_model("llama"), pair("llama")[1]
    larger = make_model("llama", vocab_size=2048)
    for model, assistant in ((rwkv, draft), (target, larger)):
        for decode in (model.generate, functools.partial(hf_speculate.generate, model)):
            with pytest.raises(ValueError, match=r"stateful|recurrent state|tokenizers"):
                decode(**inputs, assistant_model=assistant, max_new_tokens=3)
    assert issubclass(UnsupportedModelError, TypeError)


def test_a_model_without_a_cache():
    config = OpenAIGPTConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = AutoModelForCausalLM.from_config(config)
    target, draft = pair("llama")
    for one, other in ((model, draft), (target, model)):
        with pytest.raises(UnsupportedModelError, match="must take past_key_values, got OpenAIGPTLMHeadModel"):
            hf_speculate.generate(one, **ragged_prompts(1, seed=1), assistant_model=other)


@pytest.mark.parametrize("kind", ["cpmant", "fsmt", "kosmos-2", "kosmos-2.5", "prophetnet"])
def test_a_model_that_reads_in_a_way_of_its_own(models, kind):
    target, draft = models
    other = make_model("llama")
    other.config.model_type = kind
    for one, another in ((other, draft), (target, other)):
        with pytest.raises(UnsupportedModelError, match="must read several tokens after a cached text, got LlamaFor"):
            hf_speculate.generate(one, **ragged_prompts(1, seed=1), assistant_model=another)


def test_states_that_gradient_checkpointing_drops(models):
    target, draft = models
    other = make_model("llama").train()
    other.gradient_checkpointing_enable()
    inputs = ragged_prompts(1, seed=1)
    for one, another in ((other, draft), (target, other)):
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM in training mode with gradient checkpoint"):
            hf_speculate.generate(one, **inputs, assistant_model=another)


def test_prompt_tuning():
    target, draft = make_model("llama"), pair("llama")[1]
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = hf_speculate.enable(get_peft_model(target, config).eval())
    with pytest.raises(UnsupportedModelError, match="a prepare_inputs_for_generation of its own"):
        wrapped.generate(**ragged_prompts(1, seed=1), assistant_model=draft, max_new_tokens=3)


def test_rotary_embeddings_that_change_past_a_border():
    target = make_model(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, max_position_embeddings=32
    )
    draft = pair("llama")[1]
    inputs = ragged_prompts(1, seed=1)
    short = hf_speculate.generate(target, **inputs, assistant_model=draft, num_assistant_tokens=5, max_new_tokens=8)
    assert torch.equal(short, target.generate(**inputs, max_new_tokens=8))
    with pytest.raises(UnsupportedModelError, match="max_length must be at most 32 for LlamaForCausalLM with dynamic"):
        hf_speculate.generate(target, **inputs, assistant_model=draft, max_new_tokens=40)


def test_a_generate_that_never_comes_to_the_loop(monkeypatch):
    target, draft = make_model("llama"), pair("llama")[1]
    monkeypatch.setattr(type(target), "generate", lambda self, **kwargs: torch.zeros(1, 1))
    with pytest.raises(UnsupportedModelError, match="got LlamaForCausalLM with a loop of its own"):
        hf_speculate.generate(target, **ragged_prompts(1, seed=1), assistant_model=draft, max_new_tokens=3)


def test_a_layer_type_that_cannot_be_rolled_back_by_row(models):
    _, draft = models
    other = make_model("llama")
    other.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(UnsupportedModelError, match="got indexed_attention in LlamaForCausalLM"):
        hf_speculate.generate(other, **ragged_prompts(1, seed=1), assistant_model=draft)


def test_a_cache_that_holds_the_whole_prompt(models):
    target, draft = models
    cache = DynamicCache(config=target.config)
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), layer)
    with pytest.raises(UnsupportedGenerationError, match="must hold fewer tokens than the prompt, for 1 rows, got 4"):
        target.generate(torch.ones(1, 4, dtype=torch.int64), past_key_values=cache, assistant_model=draft)


def test_a_cache_of_another_batch_size(models):
    target, draft = models
    cache = DynamicCache(config=target.config)
    for layer in range(2):
        cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), layer)
    with pytest.raises(UnsupportedGenerationError, match="for 1 rows, got 3 of 5 tokens for 2 rows"):
        target.generate(torch.ones(1, 5, dtype=torch.int64), past_key_values=cache, assistant_model=draft)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"posterior_alpha": -1.0}, "posterior_alpha must be > 0"), ({"verifier": "magic"}, "got 'magic'; register your")],
)
def test_fields_are_checked_without_an_assistant_too(models, fields, message):
    target, _ = models
    with pytest.raises(ConfigError, match=message):
        target.generate(**ragged_prompts(1, seed=1), **fields)


@pytest.mark.parametrize(
    ("is_assisted", "options"),
    [(True, {}), (True, {"do_sample": True}), (False, {"do_sample": True, "verifier": "coupled"})],
)
def test_triton_by_name_where_it_cannot_run(models, is_assisted, options, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    target, draft = models
    with pytest.raises(KernelUnavailableError, match='backend must be "auto" or "torch"'):
        target.generate(
            **ragged_prompts(1, seed=1),
            **options,
            assistant_model=draft if is_assisted else None,
            verifier_backend="triton",
            max_new_tokens=3,
        )


@pytest.mark.parametrize("door", [hf_speculate.enable, hf_speculate.disable, hf_speculate.is_enabled])
def test_a_door_is_for_models_that_generate(door):
    with pytest.raises(UnsupportedModelError, match="model must be a transformers model that can generate, got Linear"):
        door(torch.nn.Linear(1, 1))


MASK_SHAPES = [(2, 4), (2, 8), (3, 6), (4, 6), (1, 6)]


@each_value(
    drafts=[{"num_assistant_tokens": 3}, {"prompt_lookup_num_tokens": 3, "assistant_model": None}],
    has_padding=[True, False],
    shape=MASK_SHAPES,
)
def test_an_attention_mask_of_another_shape_than_the_prompt(models, shape, has_padding, drafts):
    target, draft = models
    mask = torch.ones(shape, dtype=torch.int64)
    mask[0, 0] = int(not has_padding)
    if shape[0] == 1 and not has_padding:
        return  # as in plain generate, a row of ones masks nothing in any row
    message = rf"attention_mask must be \[2, 6\] for 2 rows of 6 tokens, got \[{shape[0]}, {shape[1]}\]"
    for inputs in (
        {"input_ids": torch.ones(2, 6, dtype=torch.int64)},
        {"inputs_embeds": torch.ones(2, 6, 32).double()},
    ):
        if "inputs_embeds" in inputs and shape[1] != 6:
            message = r"attention_mask must be \[B, 6\] for 6 inputs_embeds"
        with pytest.raises(UnsupportedGenerationError, match=message):
            target.generate(**inputs, attention_mask=mask, **{"assistant_model": draft, **drafts})


@pytest.mark.parametrize("num_columns", [4, 8, 10])
def test_an_attention_mask_that_does_not_fit_a_cache(models, num_columns):
    target, draft = models
    cache = DynamicCache(config=target.config)
    for layer in range(2):
        cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), layer)
    ids, mask = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, num_columns, dtype=torch.int64)
    message = r"attention_mask must be \[2, 9\] for 2 rows of 3 cached and 6 more tokens, got"
    with pytest.raises(UnsupportedGenerationError, match=message):
        target.generate(ids, attention_mask=mask, past_key_values=cache, assistant_model=draft)


def test_an_attention_mask_of_another_shape_than_the_decoders_prompt():
    target, draft = encoder_pair("t5")
    inputs, prompt = encoder_inputs("t5", 2), torch.tensor([[1, 5, 6], [1, 7, 8]])
    for shape in ((2, 2), (2, 5), (3, 3)):
        mask = torch.ones(shape, dtype=torch.int64)
        mask[0, 1] = 0
        with pytest.raises(
            UnsupportedGenerationError, match=r"decoder_attention_mask must be \[2, 3\] for 2 rows of 3"
        ):
            target.generate(
                **inputs, decoder_input_ids=prompt, decoder_attention_mask=mask, assistant_model=draft, max_new_tokens=3
            )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_row_of_ones_masks_nothing_in_any_row(batch_size):
    ids = ragged_prompts(batch_size, seed=1, min_len=6, max_len=6)["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones(1, ids.shape[1], dtype=torch.int64)}
    for more in ({}, {"num_return_sequences": 2, "do_sample": True, "verifier": "coupled", "seed": 1}):
        assert_decodes_as_plain(*pair("llama"), inputs, max_new_tokens=6, **more)
