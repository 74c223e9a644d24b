"""The grammar example: xgrammar's own processor in lock step, and the adapter that takes calls back."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import hf_speculate
from tests.cases import assert_equal_ids
from tests.tiny import make_law_model, noisy_copy
from tests.tiny_tokenizers import byte_level_tokenizer

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "grammar.py"
NUM_NEW = 24
WORDS = ['"a"', '": ', "[1", "[[", "]]", "], ", "true", "false", "null", '{"', '"}', " 12", "0.5", ', "']


def load():
    spec = importlib.util.spec_from_file_location("examples_grammar", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load()


@pytest.fixture(scope="module")
def models():
    """A tokenizer that knows pieces of JSON, the grammar, and a pair of its size."""
    tokenizer = byte_level_tokenizer(WORDS, pad_token="<pad>", eos_token="</s>")
    target = hf_speculate.enable(make_law_model(len(tokenizer), seed=1))
    grammar = example.compile_json(tokenizer, target.config.vocab_size)
    return tokenizer, grammar, target, noisy_copy(target, 0.2)


def inputs_of(tokenizer, batch_size):
    prompts = ["x = 1; y = ", "data:", "some longer text = "][:batch_size]
    return dict(tokenizer(prompts, return_tensors="pt", padding=True))


def options_of(tokenizer):
    return {"max_new_tokens": NUM_NEW, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_both_ways_give_the_greedy_text_of_plain(models, batch_size):
    tokenizer, grammar, target, draft = models
    inputs, options = inputs_of(tokenizer, batch_size), options_of(tokenizer)
    plain = target.generate(**inputs, **options, logits_processor=[example.LockStepProcessor(grammar)])
    assert not torch.equal(plain, target.generate(**inputs, **options))
    for processor, is_lock_step in ((example.LockStepProcessor, True), (example.GrammarProcessor, False)):
        assert_equal_ids(plain, target.generate(**inputs, **options, logits_processor=[processor(grammar)]))
        stats = hf_speculate.SpeculationStats()
        ours = target.generate(
            **inputs,
            **options,
            assistant_model=draft,
            num_assistant_tokens=4,
            logits_processor=[processor(grammar)],
            speculation_stats=stats,
        )
        assert_equal_ids(plain, ours)
        assert stats.lock_step == is_lock_step


def test_a_token_that_the_grammar_refuses_counts_as_a_call_all_the_same(models):
    tokenizer, grammar, _, _ = models
    processor = example.GrammarProcessor(grammar)
    size = len(tokenizer)
    (opening,), (letter,) = (tokenizer.encode(text) for text in ("[1", "q"))
    first = processor(torch.tensor([[letter]]), torch.zeros(1, size))
    inside = processor(torch.tensor([[opening]]), torch.zeros(1, size))
    assert not torch.equal(first, inside)
    for token_id in (letter, opening, opening):  # a refused one, and what follows it
        assert torch.equal(processor(torch.tensor([[token_id]]), torch.zeros(1, size)), torch.zeros(1, size))
    processor.rollback([3])
    processor.rollback([1])
    assert torch.equal(processor(torch.tensor([[opening]]), torch.zeros(1, size)), inside)


@pytest.mark.slow
def test_the_script_compares_both_ways(run):
    printed = run("grammar.py", "--max-new-tokens", "16", "--num-assistant-tokens", "3")
    pattern = r"^(lock step|rollback) +mean acceptance length (\S+), acceptance rate (\S+)$"
    (one, *ones), (other, *others) = re.findall(pattern, printed, re.M)
    assert (one, other) == ("lock step", "rollback")
    assert list(map(float, ones)) < list(map(float, others))  # drafts obey
