"""`verifier="coupled"` gives one text for a row seed and a prompt, with every assistant and with none, in float64."""

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from tests.cases import ACCEPTED_ALL, Streamed, Unchanged, assert_decodes_as_plain, assert_equal_ids, pair
from tests.tiny import make_law_model, make_model, noisy_copy, ragged_prompts

NUM_SEQUENCES = 1000
NUM_LONG_SINGLES = 12  # long calls of one row
NUM_LONG = 64
NUM_NEW = 24
VOCAB_SIZE = 64
SCORE_TOLERANCE = 1e-5  # scores are rounded to float32, whose resolution at these magnitudes is 1e-6
COUPLED = {"do_sample": True, "verifier": "coupled", "top_k": 0}

WARPERS = {"plain": {}, "warped": {"temperature": 0.7, "top_p": 0.9}}
# The drafter, then how it drafts; calls take these in turn.
WAYS = [
    ("near", {"num_assistant_tokens": 3}),
    ("near", {"num_assistant_tokens": 5, "draft_sampling": "argmax"}),
    ("far", {"num_assistant_tokens": 1}),
    ("far", {"num_assistant_tokens": 4, "draft_sampling": "argmax"}),
    ("near", {"num_assistant_tokens": 8, "assistant_confidence_threshold": 0.2}),
    ("far", {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}),
]


@pytest.fixture(scope="module")
def models():
    """The smallest target there is, a draft that is often right, and one that knows nothing of it."""
    target = hf_speculate.enable(make_law_model(VOCAB_SIZE, seed=0))
    return {"target": target, "near": noisy_copy(target, 0.1), "far": make_law_model(VOCAB_SIZE, seed=1)}


@pytest.fixture(scope="module", params=WARPERS)
def texts(models, request):
    """Warpers, prompts, and the new tokens that the target draws alone: all rows in one call."""
    warpers = WARPERS[request.param]
    inputs = ragged_prompts(NUM_SEQUENCES, seed=1)
    seeds = list(range(NUM_SEQUENCES))
    ids = models["target"].generate(**inputs, **COUPLED, **warpers, seed=seeds, max_new_tokens=NUM_LONG)
    return warpers, inputs, ids[:, -NUM_LONG:]


def assert_rows_are_drawn_with_assistants_too(
    models, texts, rows: list[int], batch_size: int, num_new: int = NUM_LONG
) -> None:
    warpers, inputs, alone = texts
    for call, begin in enumerate(range(0, len(rows), batch_size)):
        some = rows[begin : begin + batch_size]
        longest = int(inputs["attention_mask"][some].sum(1).max())  # so the padding differs from the great batch's
        drafter, options = WAYS[call % len(WAYS)]
        ids = models["target"].generate(
            **{name: value[some, -longest:] for name, value in inputs.items()},
            **COUPLED,
            **warpers,
            **options,
            seed=some,
            assistant_model=models[drafter],
            max_new_tokens=num_new,
        )
        assert torch.equal(ids[:, -num_new:], alone[some, :num_new]), (some, drafter, options)


def test_the_text_is_the_same_for_a_thousand_rows_at_once(models, texts):
    warpers, inputs, alone = texts
    drafter, options = WAYS[0]
    ids = models["target"].generate(
        **inputs,
        **COUPLED,
        **warpers,
        **options,
        seed=list(range(NUM_SEQUENCES)),
        assistant_model=models[drafter],
        max_new_tokens=NUM_LONG,
    )
    assert_equal_ids(ids[:, -NUM_LONG:], alone)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 1])
def test_the_text_is_the_same_for_a_thousand_rows_in_small_calls(models, texts, batch_size):
    rows, num_new = list(range(NUM_SEQUENCES)), NUM_LONG
    if batch_size == 1:  # a thousand long calls take ten minutes: each law draws the beginning of every other row
        assert_rows_are_drawn_with_assistants_too(models, texts, rows[:NUM_LONG_SINGLES], batch_size)
        rows, num_new = rows[NUM_LONG_SINGLES + bool(texts[0]) :: len(WARPERS)], NUM_NEW
    assert_rows_are_drawn_with_assistants_too(models, texts, rows, batch_size, num_new)


def test_rows_of_one_prompt_differ_by_their_seed(models):
    inputs = ragged_prompts(1, seed=2)
    options = {**COUPLED, "num_return_sequences": 8, "seed": 3, "max_new_tokens": 12}
    alone = models["target"].generate(**inputs, **options)
    assert len({tuple(row) for row in alone.tolist()}) == 8
    assert_equal_ids(
        alone, models["target"].generate(**inputs, **options, assistant_model=models["near"], num_assistant_tokens=5)
    )
    assert not torch.equal(alone, models["target"].generate(**inputs, **{**options, "seed": 4}))


def test_a_token_depends_on_the_text_before_it_not_on_where_the_prompt_ended(models):
    """A token's position counts real tokens, so a text goes on in the same way wherever the call begins."""
    target, draft = models["target"], models["near"]
    prompt = ragged_prompts(1, seed=2)["input_ids"]
    whole = target.generate(prompt, **COUPLED, seed=6, max_new_tokens=20)
    for assistant in ({}, {"assistant_model": draft, "num_assistant_tokens": 5}):
        begin, mask = whole[:, :-9], torch.ones_like(whole[:, :-9])  # transformers would mask a drawn id of 0
        longer = target.generate(begin, attention_mask=mask, **COUPLED, seed=6, max_new_tokens=9, **assistant)
        assert_equal_ids(whole, longer)


def test_a_draft_draws_with_the_noise_of_the_target():
    """A draft that equals the target then proposes what the target draws: nothing is refused."""
    target, draft = pair("llama", ACCEPTED_ALL)
    stats = hf_speculate.SpeculationStats()
    options = {**COUPLED, "seed": 1, "max_new_tokens": NUM_NEW, "speculation_stats": stats}
    target.generate(**ragged_prompts(4, seed=1), **options, assistant_model=draft, num_assistant_tokens=5)
    assert stats.num_accepted == stats.num_verified > 0


def test_rows_in_lock_step_draw_what_the_target_draws_alone(models):
    options = {**COUPLED, "seed": [1, 2, 3], "max_new_tokens": NUM_NEW, "logits_processor": [Unchanged()]}
    assert assert_decodes_as_plain(models["target"], models["near"], ragged_prompts(3, seed=1), **options).lock_step


def test_a_streamer_gets_the_same_text(models):
    prompt = ragged_prompts(1, seed=6)["input_ids"]
    for assistant in ({}, {"assistant_model": models["near"], "num_assistant_tokens": 5}):
        streamer = Streamed()
        ids = models["target"].generate(prompt, **COUPLED, **assistant, seed=8, max_new_tokens=14, streamer=streamer)
        assert streamer.ids == ids[0].tolist()
        assert streamer.has_ended


def test_a_generator_draws_the_seed_and_moves_on(models):
    prompt = ragged_prompts(1, seed=6)["input_ids"]
    texts = []
    for assistant in ({}, {"assistant_model": models["far"], "num_assistant_tokens": 5}):
        make = torch.Generator().manual_seed(5)
        options = {**COUPLED, **assistant, "generator": make, "max_new_tokens": 12}
        texts.append([models["target"].generate(prompt, **options) for _ in range(2)])
    assert_equal_ids(texts[0][0], texts[1][0])
    assert_equal_ids(texts[0][1], texts[1][1])
    assert not torch.equal(*texts[0])


def test_an_unset_seed_is_drawn_from_torchs_generator(models):
    prompt = ragged_prompts(1, seed=6)["input_ids"]
    texts = []
    for assistant in ({}, {"assistant_model": models["far"], "num_assistant_tokens": 5}, {}):
        torch.manual_seed(3)
        texts.append(models["target"].generate(prompt, **COUPLED, **assistant, max_new_tokens=12))
    assert_equal_ids(texts[0], texts[1])
    assert_equal_ids(texts[0], texts[2])


def is_drawn_by_us(model, **options) -> bool:
    stats = hf_speculate.SpeculationStats()
    model.generate(**ragged_prompts(1, seed=1), **options, max_new_tokens=3, speculation_stats=stats)
    return stats.verifier == "coupled"


@pytest.mark.parametrize("keyword", [None, False, True])
@pytest.mark.parametrize("passed", [None, False, True])
@pytest.mark.parametrize("own", [None, False, True])
def test_do_sample_is_settled_as_transformers_settles_it(keyword, passed, own):
    model = hf_speculate.enable(make_law_model(VOCAB_SIZE, seed=0))
    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=own, verifier="coupled")
    options = {} if keyword is None else {"do_sample": keyword}
    if passed is not None:
        options["generation_config"] = GenerationConfig(do_sample=passed)
    settled = next((value for value in (keyword, passed, own) if value is not None), False)
    assert is_drawn_by_us(model, **options) == settled


@pytest.mark.parametrize("options", [{"verifier": "coupled"}, {"verifier": "block", "do_sample": True, "top_k": 5}])
def test_everything_else_without_an_assistant_is_plain_bit_for_bit(models, options):
    target, inputs = models["target"], ragged_prompts(2, seed=1)
    texts = []
    for ours in ({}, {"verifier": options["verifier"]}):
        torch.manual_seed(4)
        own = {name: value for name, value in options.items() if name != "verifier"}
        texts.append(target.generate(**inputs, max_new_tokens=12, **own, **ours))
    assert_equal_ids(*texts)


def test_once_without_enabling():
    target = make_law_model(VOCAB_SIZE, seed=0)
    inputs = ragged_prompts(2, seed=1)
    options = {**COUPLED, "seed": 1, "max_new_tokens": 9}
    once = hf_speculate.generate(target, **inputs, **options)
    assert_equal_ids(once, hf_speculate.enable(target).generate(**inputs, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "the generation mode must be greedy or sampling with verifier='coupled', got beam_sample"),
        ({"use_cache": False}, "use_cache must be True with verifier='coupled', got False; set verifier='rejection'"),
        (
            {"cache_implementation": "offloaded_static"},
            "StaticCache of .* on one .* verifier='coupled', got an offloaded StaticCache",
        ),
        ({"cache_implementation": "paged"}, "cache_implementation must be left out with verifier='coupled', got 'pag"),
        ({"use_mtp": True}, "use_mtp must be left out with verifier='coupled', got one; set verifier='rejection'"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions must be left out for more"),
    ],
)
def test_what_the_target_cannot_do_is_refused_with_a_way_out(models, options, message):
    inputs = ragged_prompts(2, seed=1)
    with pytest.raises(UnsupportedGenerationError, match=message):
        models["target"].generate(**inputs, **COUPLED, max_new_tokens=3, **options)


def test_a_target_that_cannot_take_part_is_refused_with_a_way_out():
    model = make_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match=r"must be able to roll back, got Llama.*; set verifier="):
        hf_speculate.generate(model, **ragged_prompts(1, seed=1), **COUPLED, max_new_tokens=3)


def test_what_concerns_a_draft_only_is_not_refused(models):
    config = GenerationConfig(pad_token_id=0, num_assistant_tokens=3, assistant_confidence_threshold=0.5)
    ids = models["target"].generate(**ragged_prompts(1, seed=1), **COUPLED, generation_config=config, max_new_tokens=3)
    assert ids.shape[1] == ragged_prompts(1, seed=1)["input_ids"].shape[1] + 3
