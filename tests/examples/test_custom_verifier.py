"""The top-k example: a verifier of one's own, as a script and as a repository for the Hub."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.types import DraftOut, NoiseKeys
from tests.cases import ACCEPTED_ALL, pair
from tests.tiny import ragged_prompts
from tests.verify.test_verifiers import VOCAB_SIZE, VerifierContract, make_keys, make_round

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "custom_verifier.py"
HUB = ROOT / "examples" / "hub" / "top_k"
GENERATE = HUB / "custom_generate" / "generate.py"
SHARED = ("TopKVerifier", "draw", "register")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load(SCRIPT)


class TestTopKVerifier(VerifierContract):
    def make(self):
        return example.TopKVerifier(3, samples=False)

    @pytest.mark.parametrize("num_likeliest", [1, 3, VOCAB_SIZE, 1000])
    def test_it_keeps_what_is_among_the_likeliest(self, num_likeliest):
        target, draft = make_round(64, 4, has_law=False)
        verdict = example.TopKVerifier(num_likeliest, samples=False).verify(target, draft, make_keys(64))
        places = target[:, :-1].argsort(dim=-1, descending=True).argsort(dim=-1)  # 0 is the likeliest
        stays = places.gather(-1, draft.token_ids[..., None])[..., 0] < num_likeliest
        assert torch.equal(verdict.num_accepted.long(), stays.long().cumprod(dim=1).sum(dim=1))
        here = verdict.num_accepted.long()[:, None]
        assert torch.equal(verdict.token_ids.gather(1, here), target.argmax(-1).gather(1, here))

    def test_ties_at_the_border_stay(self):
        target = torch.zeros(1, 2, VOCAB_SIZE)
        for token_id in range(VOCAB_SIZE):
            draft = DraftOut(torch.tensor([[token_id]]), torch.ones(1, dtype=torch.int32), None, None)
            assert self.make().verify(target, draft, make_keys(1)).num_accepted.tolist() == [1]


class TestTopKVerifierThatSamples(VerifierContract):
    reads_keys = NoiseKeys._fields

    def make(self):
        return example.TopKVerifier(3, samples=True)

    def test_it_draws_the_token_after_the_kept_ones(self):
        target, draft = torch.zeros(64, 1, VOCAB_SIZE), make_round(64, 0, has_law=False)[1]
        assert len(self.make().verify(target, draft, make_keys(64)).token_ids.unique()) > 1


@pytest.mark.slow
def test_the_script_compares_it_with_greedy(registry, run):
    printed = run("custom_verifier.py", "--max-new-tokens", "8", "--num-assistant-tokens", "3")
    found = re.findall(r"^(\w+) +mean acceptance length \S+, acceptance rate (\S+)$", printed, re.M)
    assert [name for name, _ in found] == ["greedy", "top_k"]
    assert 0 < float(found[0][1]) < float(found[1][1]) <= 1


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_repository_runs_through_custom_generate(registry, do_sample):
    target, draft = pair("llama", ACCEPTED_ALL)
    stats = hf_speculate.SpeculationStats()
    inputs = ragged_prompts(2, seed=6)
    for _ in range(2):  # transformers may run the file again
        output = target.generate(
            **inputs,
            custom_generate=str(HUB),
            trust_remote_code=True,
            assistant_model=draft,
            do_sample=do_sample,
            max_new_tokens=8,
            speculation_stats=stats,
        )
        assert output.shape[1] == inputs["input_ids"].shape[1] + 8
        assert stats.verifier == "top_k"
        assert stats.num_accepted > 0


def test_the_repository_holds_the_scripts_rule():
    """transformers copies one file only, so the rule stands in both."""
    bodies = []
    for path in (SCRIPT, GENERATE):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies.append({getattr(node, "name", None): ast.unparse(node) for node in tree.body})
    assert all(bodies[0][name] == bodies[1][name] for name in SHARED)


def test_the_repository_says_its_fields_the_same_way_twice():
    fields = json.loads((HUB / "generation_config.json").read_text(encoding="utf-8"))
    assert fields == load(GENERATE).FIELDS
    loaded = GenerationConfig.from_pretrained(HUB)
    assert all(getattr(loaded, name) == value for name, value in fields.items())
    card = (HUB / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` | " in card for name in fields)
