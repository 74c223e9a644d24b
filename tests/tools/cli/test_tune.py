"""`hf-speculate tune`: what wins is written where `enable` finds it, and what cannot be is said."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate.tools.bench import tuning
from hf_speculate.tools.bench.measuring import measure
from hf_speculate.tools.cli.main import main
from tests.tools.bench.fakes import save_pair

NUM_NEW = 8
COMMON = ["-n", str(NUM_NEW), "--device", "cpu"]


@pytest.fixture
def pair(tmp_path):
    return save_pair(tmp_path / "pair")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def main\nclass Stack\nx = \nimport\n")
    return str(file)


@pytest.fixture
def seconds(monkeypatch):
    """Seconds of every method's calls, by name, which the test fills in; models decode all the same."""
    made_up: dict[str, float] = {}

    def measured(methods, batches, decode, **options):
        found = measure(methods, batches, decode, **options)
        runs = {
            name: [run._replace(seconds=made_up.get(name, 1.0)) for run in of_it] for name, of_it in found.runs.items()
        }
        return found._replace(runs=runs)

    monkeypatch.setattr(tuning, "measure", measured)
    return made_up


def test_the_winner_is_written_and_picked_up(pair, prompts, seconds, tmp_path, capsys):
    seconds |= {"greedy, K = 3": 0.5, "greedy, K = 2": 0.7}
    path = tmp_path / "pair" / "target" / "generation_config.json"
    before = json.loads(path.read_text())
    out = tmp_path / "out.json"
    extra = ["-k", "2,3,adaptive:4", "--write", pair[0], "--output", str(out)]
    assert main(["tune", pair[0], prompts, "-d", pair[1], *COMMON, *extra]) == 0
    shown, err = capsys.readouterr()
    assert "best: greedy, K = 3" in shown
    assert f"written to {path}" in err
    fields = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    assert json.loads(path.read_text()) == before | fields
    result = json.loads(out.read_text())
    assert (result["winner"], result["fields"]) == ("greedy, K = 3", fields)
    assert [one["name"] for one in result["tried"]] == ["greedy, K = 3", "greedy, K = 2", "greedy, adaptive up to 4"]
    assert result["settings"]["quality"] == "exact"

    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    model = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(pair[0]))
    draft = AutoModelForCausalLM.from_pretrained(pair[1])
    inputs = tokenizer("def main", return_tensors="pt")
    stats = hf_speculate.SpeculationStats()
    model.generate(
        inputs["input_ids"],
        attention_mask=torch.ones_like(inputs["input_ids"]),
        assistant_model=draft,
        max_new_tokens=NUM_NEW,
        speculation_stats=stats,
    )
    assert stats.verifier == "greedy"
    assert max(stats.rounds_by_draft_len) == 3
    assert 0 not in stats.rounds_by_draft_len


def test_a_lossy_winner_is_written_with_its_threshold(pair, prompts, seconds, tmp_path, capsys):
    seconds |= {"typical 0.2, K = 2": 0.5}
    extra = ["-k", "2", "--thresholds", "0.01,0.2", "--quality", "agreement=0.01,drop=50", "--write", pair[0]]
    assert main(["tune", pair[0], prompts, "-d", pair[1], *COMMON, *extra]) == 0
    saved = json.loads((tmp_path / "pair" / "target" / "generation_config.json").read_text())
    assert (saved["verifier"], saved["posterior_threshold"], saved["num_assistant_tokens"]) == ("typical", 0.2, 2)
    shown = capsys.readouterr().out
    assert "agreement" in shown
    model = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(pair[0]))
    draft = AutoModelForCausalLM.from_pretrained(pair[1])
    stats = hf_speculate.SpeculationStats()
    ids = torch.tensor([[70, 80, 90]])
    model.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=4, speculation_stats=stats
    )
    assert stats.verifier == "typical"


def test_nothing_is_written_where_plain_decoding_wins(pair, prompts, seconds, tmp_path, capsys):
    seconds |= dict.fromkeys(["greedy, K = 2", "greedy, adaptive"], 1.5)
    path = tmp_path / "pair" / "target" / "generation_config.json"
    before = path.read_text()
    assert main(["tune", pair[0], prompts, "-d", pair[1], *COMMON, "-k", "2,adaptive", "--write", pair[0]]) == 1
    assert path.read_text() == before
    assert "do not speculate: plain decoding is as fast as any method; nothing is written" in capsys.readouterr().out
