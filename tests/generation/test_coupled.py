"""Test `verifier="coupled"`: a row's seed and prompt give the same text with every assistant."""

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import Unchanged, assert_decodes_as_plain, assert_equal_ids
from tests.support.tiny import make_small_model, noisy_copy, ragged_prompts

NUM_SEQUENCES = 1000
NUM_NEW = 24
VOCAB_SIZE = 64
COUPLED = {"do_sample": True, "verifier": "coupled", "top_k": 0}

WARPERS = {"plain": {}, "warped": {"temperature": 0.7, "top_p": 0.9}}
# Drafters with their options. The calls cycle through the entries.
METHODS = [
    ("near", {"num_assistant_tokens": 3}),
    ("near", {"num_assistant_tokens": 5, "draft_sampling": "argmax"}),
    ("far", {"num_assistant_tokens": 1}),
    ("far", {"num_assistant_tokens": 4, "draft_sampling": "argmax"}),
    ("near", {"num_assistant_tokens": 8, "assistant_confidence_threshold": 0.2}),
    ("far", {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}),
]


@pytest.fixture(scope="module")
def models():
    """Return a minimal target, a draft that is often right, and an unrelated draft."""
    target = hf_speculate.enable(make_small_model(VOCAB_SIZE, seed=0))
    return {
        "target": target,
        "near": noisy_copy(target, 0.1),
        "far": make_small_model(VOCAB_SIZE, seed=1),
    }


@pytest.fixture(scope="module", params=WARPERS)
def texts(models, request):
    """Return warpers, prompts, and the new tokens of all rows from one call of the target alone."""
    warpers = WARPERS[request.param]
    inputs = ragged_prompts(NUM_SEQUENCES, seed=1)
    seeds = list(range(NUM_SEQUENCES))
    ids = models["target"].generate(
        **inputs, **COUPLED, **warpers, seed=seeds, max_new_tokens=NUM_NEW
    )
    return warpers, inputs, ids[:, -NUM_NEW:]


@pytest.mark.parametrize(
    ("num_rows", "batch_size"),
    [(1000, 1000), (60, 8), *(pytest.param(1000, size, marks=pytest.mark.slow) for size in (8, 1))],
)
def test_row_text_is_the_same_with_every_assistant_and_batch(models, texts, num_rows, batch_size):
    warpers, inputs, alone = texts
    for call, begin in enumerate(range(0, num_rows, batch_size)):
        rows = list(range(begin, min(begin + batch_size, num_rows)))
        # The padding differs from the padding in the large batch.
        longest = int(inputs["attention_mask"][rows].sum(1).max())
        drafter, options = METHODS[call % len(METHODS)]
        rows_alone = {name: value[rows, -longest:] for name, value in inputs.items()}
        draft_options = {**COUPLED, **warpers, **options, "assistant_model": models[drafter]}
        ids = models["target"].generate(
            **rows_alone, **draft_options, seed=rows, max_new_tokens=NUM_NEW
        )
        assert torch.equal(ids[:, -NUM_NEW:], alone[rows]), (rows, drafter, options)


def test_token_does_not_depend_on_where_the_prompt_ended(models):
    """Start calls anywhere in a text, because a token's position counts only real tokens."""
    target, draft = models["target"], models["near"]
    prompt = ragged_prompts(1, seed=2)["input_ids"]
    whole = target.generate(prompt, **COUPLED, seed=6, max_new_tokens=20)
    for assistant in ({}, {"assistant_model": draft, "num_assistant_tokens": 5}):
        # transformers would mask an id of 0 if one is drawn.
        begin, mask = whole[:, :-9], torch.ones_like(whole[:, :-9])
        longer = target.generate(
            begin, attention_mask=mask, **COUPLED, seed=6, max_new_tokens=9, **assistant
        )
        assert_equal_ids(whole, longer)


@pytest.mark.fallback("lock step")
def test_lock_step_rows_draw_the_tokens_of_the_target_alone(models):
    options = {
        **COUPLED,
        "seed": [1, 2, 3],
        "max_new_tokens": NUM_NEW,
        "logits_processor": [Unchanged()],
    }
    assert assert_decodes_as_plain(
        models["target"], models["near"], ragged_prompts(3, seed=1), **options
    ).lock_step


def test_seed_is_drawn_from_the_generator(models):
    prompt, texts = ragged_prompts(1, seed=6)["input_ids"], []
    for assistant in ({}, {"assistant_model": models["far"], "num_assistant_tokens": 5}):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(5)
        options = {**COUPLED, **assistant, "max_new_tokens": 12}
        texts += [
            models["target"].generate(prompt, **options, generator=source)
            for source in (generator, generator, None)
        ]
    for alone, assisted in zip(texts[:3], texts[3:], strict=True):
        assert_equal_ids(alone, assisted)
    assert not torch.equal(*texts[:2])


@pytest.mark.parametrize(
    ("keyword", "passed", "settled"),
    [(None, None, True), (None, False, False), (True, False, True)],
)
def test_do_sample_is_resolved_as_in_transformers(keyword, passed, settled):
    model, stats = (
        hf_speculate.enable(make_small_model(VOCAB_SIZE, seed=0)),
        hf_speculate.SpeculationStats(),
    )
    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=True, verifier="coupled")
    options = {} if keyword is None else {"do_sample": keyword}
    if passed is not None:
        options["generation_config"] = GenerationConfig(do_sample=passed)
    model.generate(
        **ragged_prompts(1, seed=1), **options, max_new_tokens=3, speculation_stats=stats
    )
    assert (stats.verifier == "coupled") == settled


def test_unsupported_options_without_an_assistant_raise(models):
    attentions = {"output_attentions": True, "return_dict_in_generate": True}
    for options in ({"num_beams": 2}, {"use_cache": False}, {"use_mtp": True}, attentions):
        with pytest.raises(UnsupportedGenerationError):
            models["target"].generate(
                **ragged_prompts(2, seed=1), **COUPLED, max_new_tokens=3, **options
            )
