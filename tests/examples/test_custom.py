"""Test the examples of a custom drafter, verifier, repository and grammar."""

import ast
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_speculate
from hf_speculate.draft.base import DraftRequest
from hf_speculate.types import Kept, NoiseKeys, SampleStrategy
from tests.cases import ACCEPTED_ALL, assert_equal_ids, pair
from tests.support.tiny import make_small_model, noisy_copy, ragged_prompts
from tests.support.tiny_tokenizers import byte_level_tokenizer
from tests.verify.test_verifiers import VerifierContract, make_keys, make_round


def test_bigram_drafter_proposes_the_token_that_followed(import_example):
    def proposed(token_ids, num, kept=None):
        draft = drafter.draft(DraftRequest(token_ids, None, num, SampleStrategy.GREEDY, kept=kept))
        return [
            ids[:num]
            for ids, num in zip(draft.token_ids.tolist(), draft.lens.tolist(), strict=True)
        ]

    setup = SimpleNamespace(num_pads=[0, 2, 3], device=torch.device("cpu"))
    drafter = import_example("custom_drafter").BigramDrafter(setup)
    texts = torch.tensor([[1, 2, 3, 4, 1], [0, 0, 7, 7, 7], [0, 0, 0, 5, 6]])
    assert proposed(texts, 3) == [[2, 3, 4], [7, 7, 7], []]
    assert 0 not in drafter.next_ids[2]  # the drafter does not learn from padding
    drafter.rows([0, 2])
    # No token has followed 9. The other row repeats itself. Later, the newest pair counts.
    for ids, lens, drafts in (
        ([[2, 9], [5, -1]], [2, 1], [[], [6, 5, 6, 5]]),
        ([[1], [-1]], [1, 0], [[2, 9, 1, 2], [6, 5, 6, 5]]),
    ):
        kept = Kept(torch.tensor(ids), torch.tensor(lens, dtype=torch.int32))
        assert proposed(texts[[0, 2], -1:], 4, kept) == drafts


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "custom_verifier.py"
HUB = ROOT / "examples" / "hub" / "top_k"
GENERATE = HUB / "custom_generate" / "generate.py"
SHARED = ("TopKVerifier", "draw", "register")


TopKVerifier = runpy.run_path(str(SCRIPT))["TopKVerifier"]


class TestTopKVerifier(VerifierContract):
    def make(self):
        return TopKVerifier(3, samples=False)

    def test_verifier_keeps_tokens_among_the_most_probable(self):
        target, draft = make_round(64, 4, has_logits=False)
        verdict = self.make().verify(target, draft, make_keys(64))
        # Token 0 is the most probable.
        ranks = target[:, :-1].argsort(dim=-1, descending=True).argsort(dim=-1)
        stays = ranks.gather(-1, draft.token_ids[..., None])[..., 0] < 3
        here = stays.long().cumprod(dim=1).sum(dim=1)
        assert torch.equal(verdict.num_accepted.long(), here)
        assert torch.equal(
            verdict.token_ids.gather(1, here[:, None]), target.argmax(-1).gather(1, here[:, None])
        )


class TestTopKVerifierThatSamples(VerifierContract):
    reads_keys = NoiseKeys._fields

    def make(self):
        return TopKVerifier(3, samples=True)


@pytest.mark.parametrize("do_sample", [False, True])
def test_hub_repository_runs_through_custom_generate(registry, do_sample):
    target, draft = pair("llama", ACCEPTED_ALL)
    stats = hf_speculate.SpeculationStats()
    inputs = ragged_prompts(2, seed=6)
    for _ in range(2):  # transformers may run the file again
        options = {
            "assistant_model": draft,
            "do_sample": do_sample,
            "max_new_tokens": 8,
            "speculation_stats": stats,
        }
        output = target.generate(
            **inputs, custom_generate=str(HUB), trust_remote_code=True, **options
        )
        assert output.shape[1] == inputs["input_ids"].shape[1] + 8
        assert stats.verifier == "top_k"
        assert stats.num_accepted > 0


def test_repository_and_script_hold_the_same_rule():
    """Compare both copies, because transformers copies only one file."""
    bodies = []
    for path in (SCRIPT, GENERATE):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies.append({getattr(node, "name", None): ast.unparse(node) for node in tree.body})
    assert all(bodies[0][name] == bodies[1][name] for name in SHARED)
    assert (
        json.loads((HUB / "generation_config.json").read_text())
        == runpy.run_path(str(GENERATE))["FIELDS"]
    )


WORDS = [
    '"a"',
    '": ',
    "[1",
    "[[",
    "]]",
    "], ",
    "true",
    "false",
    "null",
    '{"',
    '"}',
    " 12",
    "0.5",
    ', "',
]


@pytest.fixture(scope="module")
def models(import_example):
    """Return the example, a tokenizer with pieces of JSON, the grammar, and a target."""
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    grammars = import_example("grammar")
    tokenizer = byte_level_tokenizer(WORDS, pad_token="<pad>", eos_token="</s>")
    target = hf_speculate.enable(make_small_model(len(tokenizer), seed=1))
    return grammars, tokenizer, grammars.compile_json(tokenizer, target.config.vocab_size), target


@pytest.mark.fallback("lock step")
def test_grammar_processors_give_the_greedy_text_of_plain(models):
    grammars, tokenizer, grammar, target = models
    inputs = dict(
        tokenizer(
            ["x = 1; y = ", "data:", "some longer text = "], return_tensors="pt", padding=True
        )
    )
    options = {
        "max_new_tokens": 24,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    plain = target.generate(
        **inputs, **options, logits_processor=[grammars.LockStepProcessor(grammar)]
    )
    assert not torch.equal(plain, target.generate(**inputs, **options))
    for processor, is_lock_step in (
        (grammars.LockStepProcessor, True),
        (grammars.GrammarProcessor, False),
    ):
        options |= {
            "assistant_model": noisy_copy(target, 0.2),
            "logits_processor": [processor(grammar)],
        }
        options["tokenizer"] = tokenizer
        stats = options["speculation_stats"] = hf_speculate.SpeculationStats()
        assert_equal_ids(plain, target.generate(**inputs, **options, num_assistant_tokens=4))
        assert stats.lock_step == is_lock_step == ("forced text" not in stats.plan)


def test_rejected_token_counts_as_a_call_of_the_grammar(models):
    grammars, tokenizer, grammar, _ = models
    processor = grammars.GrammarProcessor(grammar)
    ((opening,), (letter,)) = (tokenizer.encode(text) for text in ("[1", "q"))

    def scores_after(token_id):
        return processor(torch.tensor([[token_id]]), torch.zeros(1, len(tokenizer)))

    assert not torch.equal(scores_after(letter), inside := scores_after(opening))
    for token_id in (letter, opening, opening):  # a rejected token and the next ones
        assert not scores_after(token_id).any()
    processor.rollback([3])
    processor.rollback([1])
    assert torch.equal(scores_after(opening), inside)
