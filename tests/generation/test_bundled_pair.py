"""The bundled pair: what a batch of it does, row by row."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_ROWS = 8
MAX_SHARE_APART = 0.01  # of tokens a round; rows that advance by their own counts lose nothing to their neighbours


@pytest.fixture(scope="module")
def models():
    target, draft = (
        AutoModelForCausalLM.from_pretrained(EXAMPLES / "pair" / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    return hf_speculate.enable(target), draft


@pytest.fixture(scope="module")
def prompts():
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines][:: len(lines) // NUM_ROWS][:NUM_ROWS]


@pytest.mark.slow
def test_tokens_a_round_in_a_batch_are_those_of_single_rows(models, prompts):
    target, draft = models
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pair" / "target", padding_side="left")
    options = {"max_new_tokens": 48, "assistant_model": draft, "num_assistant_tokens": 5}
    batch = hf_speculate.SpeculationStats()
    target.generate(
        **tokenizer(prompts, return_tensors="pt", padding=True), **options, speculation_stats=batch, do_sample=False
    )
    num_emitted = num_rounds = 0
    for prompt in prompts:
        stats = hf_speculate.SpeculationStats()
        target.generate(**tokenizer(prompt, return_tensors="pt"), **options, speculation_stats=stats)
        num_emitted += stats.num_emitted
        num_rounds += stats.num_rounds
    alone = num_emitted / num_rounds
    assert alone > 2
    assert abs(batch.mean_acceptance_length - alone) <= MAX_SHARE_APART * alone
