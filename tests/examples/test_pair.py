"""Tests the committed model pair, its prompts and its measurements, all offline."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAIR = EXAMPLES / "pair"
MAX_PAIR_BYTES = 40_000_000
CATEGORIES = {"code completion", "docstring", "edit", "repetitive table"}


@pytest.fixture(scope="module")
def tokenizer():
    """The target's tokenizer."""
    return AutoTokenizer.from_pretrained(PAIR / "target", local_files_only=True)


@pytest.fixture(scope="module")
def models():
    """Both models as float32, which every CPU runs fast."""
    names = ("target", "draft")
    return {
        name: AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32, local_files_only=True).eval()
        for name in names
    }


@pytest.fixture(scope="module")
def measurements():
    """The record behind the pair's README."""
    return json.loads((PAIR / "measurements.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def prompts():
    """The held-out prompts."""
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_pair_is_small_enough_to_be_committed():
    files = [path for path in PAIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_PAIR_BYTES


def test_both_models_share_one_vocabulary(models, tokenizer):
    other = AutoTokenizer.from_pretrained(PAIR / "draft", local_files_only=True)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert {model.config.vocab_size for model in models.values()} == {len(tokenizer)}


@pytest.mark.parametrize("name", ["target", "draft"])
def test_generation_config_ends_and_pads_but_does_not_sample(models, tokenizer, name):
    config = models[name].generation_config
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert not config.do_sample


def test_prompts_are_spec_bench_lines_of_four_categories_with_eight_each(prompts):
    assert [prompt["question_id"] for prompt in prompts] == list(range(1, len(prompts) + 1))
    for prompt in prompts:
        assert prompt.keys() == {"question_id", "category", "turns"}
        assert prompt["turns"] and all(isinstance(turn, str) and turn for turn in prompt["turns"])
    counts = Counter(prompt["category"] for prompt in prompts)
    assert counts.keys() == CATEGORIES
    assert min(counts.values()) >= 8


def test_held_out_modules_were_not_trained_on(import_example):
    sources = json.loads((PAIR / "sources.json").read_text(encoding="utf-8"))
    held_out = set(import_example("pair_training.corpus").HELD_OUT_MODULES)
    assert len(sources["held_out"]) >= 15
    assert set(sources["held_out"]) <= held_out
    assert held_out.isdisjoint(sources["training"])


def test_draft_agrees_with_the_target_far_above_chance(models, tokenizer, prompts):
    """The committed claim is in measurements.json; half of all positions is far below it and far above chance."""
    batch = tokenizer(prompts[0]["turns"][0], return_tensors="pt")
    with torch.inference_mode():
        ids = models["target"].generate(**batch, max_new_tokens=96, do_sample=False)
        guesses = models["draft"](input_ids=ids).logits.argmax(-1)[0, batch["input_ids"].shape[1] - 1 : -1]
    new_ids = ids[0, batch["input_ids"].shape[1] :]
    assert (guesses == new_ids).float().mean() >= 0.5


def test_readme_says_what_was_measured(import_example, measurements):
    report = import_example("pair_training.report")
    assert (PAIR / "README.md").read_text(encoding="utf-8") == report.render(measurements)


def test_bounds_follow_from_the_measured_figures(import_example, measurements):
    pair = measurements["pair"]
    expected = import_example("pair_training.report").pair_bounds(pair["acceptance"], pair["timings"])
    for batch_size, record in expected.items():
        assert pair["bounds"][batch_size] == pytest.approx(record)


def test_walk_judges_the_first_refused_token_only(import_example):
    acceptance = import_example("pair_training.acceptance")
    walk = acceptance.walk_rounds([[True, False, False, True, True, True, True]], 2)
    assert walk == acceptance.Walk(num_accepted=4, num_verified=6, num_rounds=3, num_tokens=6)


def test_bound_is_the_closed_form(import_example):
    a, num, cost, factor = 0.8, 4, 0.1, 1.2
    closed = (1 - a ** (num + 1)) / ((1 - a) * (num * cost + factor))
    assert import_example("pair_training.acceptance").bound(a, num, cost, factor) == pytest.approx(closed)
