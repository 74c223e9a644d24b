"""Hybrid and recurrent models: greedy text equals plain `generate`, whatever is accepted and whoever drafts."""

from functools import cache

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_speculate
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.models.language_model import cache_name
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value
from tests.generation.test_law import SIGNIFICANCE, draw, joint_law, p_value
from tests.oracle import Oracle
from tests.recurrent_cases import FLOAT32_TOLERANCE, assert_equal_caches, hooks_of
from tests.tiny import make_model, noisy_copy, ragged_prompts
from tests.tiny_recurrent import RECURRENT_KINDS

NUM_NEW = 24  # with 5 drafted tokens a row accepts every number of them
FEW_KINDS = ("qwen3_5", "lfm2", "falcon_h1", "mamba2")


@cache
def target_of(kind: str) -> PreTrainedModel:
    return hf_speculate.enable(make_model(kind))


@cache
def draft_of(kind: str) -> PreTrainedModel:
    return noisy_copy(target_of(kind))


@pytest.mark.parametrize("kind", RECURRENT_KINDS)
@pytest.mark.parametrize(
    ("batch_size", "num_drafted"),
    [(3, 5), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((1, 1), (1, 3), (1, 5), (3, 1), (3, 3)))],
)
def test_greedy_text_is_plain_whatever_number_of_tokens_is_accepted(kind, batch_size, num_drafted):
    target, inputs = target_of(kind), ragged_prompts(batch_size, seed=batch_size)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    oracle, stats = Oracle(plain[:, inputs["input_ids"].shape[1] :]), hf_speculate.SpeculationStats()
    own = {"drafter": oracle, "num_assistant_tokens": num_drafted, "speculation_stats": stats}
    ours = target.generate(**inputs, max_new_tokens=NUM_NEW, num_assistant_tokens_schedule="constant", **own)
    assert_equal_ids(plain, ours)
    assert oracle.accepted >= set(range(num_drafted + 1))
    assert stats.cache == "hybrid"
    assert "target cache: hybrid (keeps " in stats.plan
    assert not stats.lock_step
    assert not hooks_of(target)


@each_value(batch_size=[1, 3], kind=FEW_KINDS)
def test_a_passed_cache_goes_on_from_call_to_call(kind, batch_size):
    target, inputs = target_of(kind), ragged_prompts(batch_size, seed=batch_size)
    caches, texts = [], []
    for own in ({}, {"assistant_model": draft_of(kind), "num_assistant_tokens": 4}):
        kv_cache = DynamicCache(config=target.config)
        caches.append(kv_cache)
        options = {"max_new_tokens": 8, cache_name(target): kv_cache, **own}
        first = target.generate(**inputs, **options)
        more = torch.cat([first, torch.full((batch_size, 3), 7)], dim=1)
        mask = torch.ones_like(more)
        mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
        if cache_name(target) == "cache_params":  # which does not tell how much it holds
            more, mask = more[:, -4:], mask[:, -4:]
        texts.append(target.generate(more, attention_mask=mask, **options))
    assert_equal_ids(*texts)
    assert_equal_caches(*caches)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_rows_that_end_early_leave_the_states_of_plain_decoding(kind):
    target, inputs = target_of(kind), ragged_prompts(3, seed=3)
    new_ids = target.generate(**inputs, max_new_tokens=14)[:, inputs["input_ids"].shape[1] :]
    ends = [int(new_ids[0, 4]), int(new_ids[1, 9])]
    caches, texts = [], []
    for own in ({}, {"assistant_model": draft_of(kind), "num_assistant_tokens": 4}):
        caches.append(DynamicCache(config=target.config))
        options = {"max_new_tokens": 14, "eos_token_id": ends, cache_name(target): caches[-1], **own}
        texts.append(target.generate(**inputs, **options))
    assert_equal_ids(*texts)
    assert_equal_caches(*caches)


def test_prompts_are_read_in_chunks_where_several_tokens_are_read_right():
    inputs, options = ragged_prompts(3, seed=3), {"max_new_tokens": 8, "prefill_chunk_size": 4}
    for kind in ("qwen3_5", "jamba"):  # the latter reads a chunk as if nothing were before it, in plain decoding too
        assert_decodes_as_plain(target_of(kind), draft_of(kind), inputs, **options, num_assistant_tokens=3)
    ours = target_of("mamba2").generate(**inputs, **options, prompt_lookup_num_tokens=3)
    assert_equal_ids(target_of("mamba2").generate(**inputs, max_new_tokens=8), ours)  # plain decoding cuts no prompt
    with pytest.raises(UnsupportedModelError, match="prefill_chunk_size must be left out for MambaForCausalLM"):
        target_of("mamba").generate(**inputs, **options, prompt_lookup_num_tokens=3)


def test_rows_move_in_lock_step_where_attention_counts_columns():
    """Inkling's temperature grows with the column."""
    if "inkling" not in RECURRENT_KINDS:
        pytest.skip("transformers has no Inkling")
    target = hf_speculate.enable(make_model("inkling", log_scaling_n_floor=4, log_scaling_alpha=2.0))
    inputs, stats = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    oracle = Oracle(plain[:, inputs["input_ids"].shape[1] :])
    own = {"drafter": oracle, "num_assistant_tokens": 3, "speculation_stats": stats}
    assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=NUM_NEW, **own))
    assert stats.lock_step


def test_rows_of_a_draft_whose_modules_of_one_class_write_several_states():
    """Inkling's layers hold four convolutions; the draft model's rows pass over tokens that they hold already."""
    if "inkling" not in RECURRENT_KINDS:
        pytest.skip("transformers has no Inkling")
    inputs = ragged_prompts(3, seed=1)
    assert_decodes_as_plain(target_of("inkling"), draft_of("inkling"), inputs, max_new_tokens=8, num_assistant_tokens=3)


@pytest.mark.parametrize("kind", ["qwen3_5", "mamba"])
def test_an_unknown_class_is_compared_with_plain_decoding_and_no_hook_stays(kind):
    model = make_model(kind)
    model.__class__ = type(f"My{type(model).__name__}", (type(model),), {})  # transformers looks for "mamba" in it
    target = hf_speculate.enable(model)
    stats = assert_decodes_as_plain(
        target, None, ragged_prompts(3, seed=3), max_new_tokens=8, prompt_lookup_num_tokens=3
    )
    assert "self-test: passed" in stats.plan
    assert not hooks_of(target)


@pytest.mark.parametrize("kind", ["qwen3_5", "falcon_h1"])
def test_attentions_are_those_of_plain_decoding(kind):
    target, inputs = hf_speculate.enable(make_model(kind, attn_implementation="eager")), ragged_prompts(1, seed=1)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_attentions": True}
    own = {"assistant_model": draft_of(kind), "num_assistant_tokens": 3}
    plain, ours = target.generate(**inputs, **options), target.generate(**inputs, **options, **own)
    for layers, others in zip(plain.attentions, ours.attentions, strict=True):
        assert all(torch.allclose(*pair, atol=FLOAT32_TOLERANCE) for pair in zip(layers, others, strict=True))


def test_the_first_layers_draft_if_an_attention_layer_is_among_them():
    inputs, options = ragged_prompts(3, seed=3), {"max_new_tokens": 12, "num_assistant_tokens": 3}
    for kind, num_layers in (("qwen3_5", 2), ("mamba", 1), ("jamba", 2)):
        assert_decodes_as_plain(target_of(kind), None, inputs, **options, assistant_early_exit=num_layers)
    with pytest.raises(ConfigError, match="assistant_early_exit must leave an attention layer in Qwen3_5ForCausalLM"):
        target_of("qwen3_5").generate(**inputs, **options, assistant_early_exit=1)


def test_what_cannot_be_rolled_back_is_refused_by_name():
    inputs, drafts = ragged_prompts(1, seed=1), {"prompt_lookup_num_tokens": 3}
    with pytest.raises(UnsupportedModelError, match="got 'preallocated': it has recurrent layers"):
        target_of("lfm2").generate(**inputs, **drafts, speculation_cache="preallocated")
    model = hf_speculate.enable(make_model("qwen3_5"))
    mixer = next(module for module in model.modules() if hasattr(module, "conv1d"))
    mixer.forward = mixer.forward  # as accelerate does where it moves weights
    with pytest.raises(UnsupportedModelError, match="whose Qwen3_5GatedDeltaNet has a replaced forward"):
        model.generate(**inputs, **drafts)
    del mixer.forward
    model._tp_size = 2
    with pytest.raises(UnsupportedModelError, match="with recurrent state and split by tensor parallelism"):
        model.generate(**inputs, **drafts)
    model._tp_size = 1
    model.compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="Qwen3_5ForCausalLM with recurrent state and compiled in place"):
        model.generate(**inputs, **drafts)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verifier"), [("qwen3_5", "rejection"), ("mamba2", "block")])
def test_the_joint_distribution_of_three_sampled_tokens_is_the_targets(kind, verifier):
    small = {"vocab_size": 6, "dtype": torch.float32}
    target = hf_speculate.enable(make_model(kind, **small))
    draft = make_model(kind, seed=1, **small)
    for model in (target, draft):
        model.get_output_embeddings().weight.mul_(0.25)  # no text is certain
    options = {"max_new_tokens": 3, "num_assistant_tokens": 2, "draft_sampling": "sample", "verifier": verifier}
    counts = draw(target, draft, 10_000, num_rows=1000, **options)
    assert p_value(counts, joint_law(target, 3)) > SIGNIFICANCE
    assert p_value(counts, joint_law(draft, 3)) < SIGNIFICANCE
