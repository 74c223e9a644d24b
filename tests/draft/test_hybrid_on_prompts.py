"""With the bundled pair, on every category of the bundled prompts, the hybrid keeps up with the better of the two."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

EXAMPLES = Path(__file__).parents[2] / "examples"
CATEGORIES = ("code completion", "docstring", "edit", "repetitive table")
NUM_PROMPTS, NUM_NEW = 4, 64


@pytest.fixture(scope="module")
def models():
    folders = (EXAMPLES / "pair" / "target", EXAMPLES / "pair" / "draft")
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def prompts_of(category: str) -> list[str]:
    entries = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    return [entry["turns"][0] for entry in entries if entry["category"] == category][:NUM_PROMPTS]


def mean_acceptance_length(models, category: str, with_model: bool, with_copies: bool) -> float:
    target, draft = models
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pair" / "target")
    options = {"num_assistant_tokens_schedule": "constant", "max_new_tokens": NUM_NEW}
    options |= {"assistant_model": draft, "num_assistant_tokens": 5} if with_model else {}
    options |= {"prompt_lookup_num_tokens": 10} if with_copies else {}
    num_rounds = num_emitted = 0
    for prompt in prompts_of(category):
        stats = hf_speculate.SpeculationStats()
        hf_speculate.generate(target, **tokenizer(prompt, return_tensors="pt"), **options, speculation_stats=stats)
        num_rounds, num_emitted = num_rounds + stats.num_rounds, num_emitted + stats.num_emitted
    return num_emitted / num_rounds


@pytest.mark.slow
@pytest.mark.parametrize("category", CATEGORIES)
def test_each_category_keeps_at_least_what_the_better_of_the_two_keeps(models, category):
    alone = [mean_acceptance_length(models, category, *which) for which in ((True, False), (False, True))]
    assert mean_acceptance_length(models, category, True, True) >= max(alone)


def test_these_are_all_categories():
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["category"] for line in lines} == set(CATEGORIES)
