"""`hf-speculate bench` and `tune` on a tiny pair: what is compared, and what wins is written."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_speculate
from hf_speculate.tools.bench import tuning
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.measuring import measure
from hf_speculate.tools.cli.main import main
from tests.cases import KeepsAll
from tests.tiny import make_model
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.tools.bench.fakes import EOS, save_pair

TEXTS = ["def main", "class Stack", "x = ", "import"]
QUESTIONS = [
    {"question_id": 81 + index, "category": "code" if index % 2 else "text", "turns": [text, "and then?"]}
    for index, text in enumerate(TEXTS)
]
NUM_NEW = 8
LENGTH = ["-n", str(NUM_NEW), "--device", "cpu"]
COMMON = [*LENGTH, "-k", "3,adaptive"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    return file


def run(pair, prompts, *extra):
    out = prompts.parent / "out.json"
    status = main(["bench", pair[0], str(prompts), "-d", pair[1], *COMMON, *extra, "--output", str(out)])
    return status, json.loads(out.read_text())


def test_greedy_methods_are_compared_with_plain_decoding_and_lossy_ones_with_the_target(pair, questions, capsys):
    page = questions.with_name("report.html")
    status, result = run(pair, questions, "--thresholds", "0.05,0.2", "--html", str(page))
    assert status == 0
    names = [method["name"] for method in result["methods"]]
    ours = [f"{verifier}, {length}" for verifier in ("greedy", "typical") for length in ("K = 3", "adaptive")]
    assert names == ["plain, greedy", "transformers, defaults", "transformers, K = 3", *ours]
    assert [method["checked"] for method in result["methods"]] == [None, *["4 of 4 rows equal"] * 4, None, None]
    assert [method["is_lossy"] for method in result["methods"]] == [False] * 5 + [True] * 2
    ours = result["methods"][3]
    assert (ours["verifier"], ours["num_assistant_tokens"], ours["num_tokens"]) == ("greedy", 3, 4 * NUM_NEW)
    assert 1 < ours["mean_acceptance_length"] <= 4
    assert len(ours["acceptance_rate_per_position"]) == 3
    assert len(ours["draft_lens"]) == sum(ours["rounds_by_draft_len"].values()) // 4
    assert all(seconds > 0 for seconds in ours["seconds"].values())

    categories = {(one["category"], one["method"]): one for one in result["categories"]}
    assert set(categories) == {(category, name) for category in ("code", "text") for name in names[1:]}
    assert all(one["num_prompts"] == 2 for one in categories.values())

    assert [one["verifier"] for one in result["drift"]] == ["plain, greedy", "plain, sampling", "typical", "typical"]
    assert [one["posterior_threshold"] for one in result["drift"]] == [None, None, 0.05, 0.2]
    assert result["drift"][0]["agreement_with_greedy"] == 1.0
    assert all(one["num_tokens"] == 4 * NUM_NEW for one in result["drift"])

    settings, conditions = result["settings"], result["environment"]
    assert (settings["num_prompts"], settings["batch_size"], settings["left_out"]) == (4, 1, {})
    assert (conditions["target"], conditions["draft"], conditions["dtype"]) == (*pair, "float64")
    out, err = capsys.readouterr()
    assert all(name in page.read_text() and name in out for name in names)
    assert "4 of 4 prompts have several turns; the first one is used" in err
    assert "agreement with greedy" in out


def test_batches_and_draws(pair, questions, capsys):
    status, result = run(pair, questions, "-b", "2", "--do-sample", "-t", "0.8", "-v", "rejection")
    assert status == 0
    names = [method["name"] for method in result["methods"]]
    assert (names[0], *names[3:]) == ("plain, sampling", "rejection, K = 3", "rejection, adaptive")
    assert {method["checked"] for method in result["methods"]} == {None}
    assert (result["settings"]["num_prompts"], result["settings"]["batch_size"], result["drift"]) == (4, 2, [])


def test_an_interrupted_benchmark_keeps_its_measurements(pair, questions, monkeypatch, capsys):
    calls = []

    class Interrupted(Decoder):
        def __call__(self, *arguments, **options):
            calls.append(arguments)
            if len(calls) == 7:  # three warm-ups, and one batch of each of the three methods
                raise KeyboardInterrupt
            return super().__call__(*arguments, **options)

    monkeypatch.setattr("hf_speculate.tools.cli.measuring.Decoder", Interrupted)
    options = ["-k", "adaptive", "-v", "greedy", "--json"]
    assert main(["bench", pair[0], str(questions), "-d", pair[1], *COMMON, *options]) == 130
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["is_interrupted"]
    names = ["plain, greedy", "transformers, defaults", "greedy, adaptive"]
    assert [(one["name"], one["num_tokens"]) for one in result["methods"]] == [(name, NUM_NEW) for name in names]
    assert "not reliable; use more prompts or repeats" in err
    assert "interrupted: the results cover the calls so far" in err


def test_prompt_lookup_needs_no_draft_and_a_draft_may_have_another_tokenizer(pair, questions, tmp_path, capsys):
    words = ["bench", pair[0], str(questions), *COMMON, "-k", "3", "-v", "greedy", "--json"]
    assert main([*words, "--lookup", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in result["methods"]] == ["plain, greedy", "transformers, lookup 4", "greedy, K = 3"]
    assert main(words) == 2
    assert "there must be --draft or --lookup, got neither" in capsys.readouterr().err
    tokenizer = byte_level_tokenizer(["de", "cl"], eos_token=EOS)
    draft = make_model("llama", vocab_size=len(tokenizer), seed=1)
    draft.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    others = (pair[0], str(tmp_path / "other"))
    status, result = run(others, questions, "-v", "greedy", "-k", "3", "--num-prompts", "2")
    assert status == 0
    assert result["methods"][-1]["name"] == "greedy, K = 3"
    assert result["methods"][-1]["checked"] == "2 of 2 rows equal"
    assert result["settings"]["num_prompts"] == 2


def test_no_figure_is_shown_of_a_method_that_writes_another_text(questions, tmp_path, registry, capsys):
    hf_speculate.register_verifier("keeps all", lambda config: KeepsAll(), lossless=True)
    pair = save_pair(tmp_path, noise=0.5)
    status, result = run(pair, questions, "-v", "greedy,keeps all", "-k", "3")
    assert status == 1
    assert "keeps all, K = 3" not in [method["name"] for method in result["methods"]]
    assert "its output differs from plain decoding's" in result["settings"]["left_out"]["keeps all, K = 3"]
    assert "keeps all" not in capsys.readouterr().out


@pytest.fixture
def own(tmp_path):
    return save_pair(tmp_path / "pair")


@pytest.fixture
def seconds(monkeypatch):
    """Seconds of every method's calls, by name, which the test fills in; models decode all the same."""
    made_up: dict[str, float] = {}

    def measured(methods, batches, decode, **options):
        found = measure(methods, batches, decode, **options)
        slowed = [(name, made_up.get(name, 1.0), runs) for name, runs in found.runs.items()]
        return found._replace(runs={name: [run._replace(seconds=one) for run in runs] for name, one, runs in slowed})

    monkeypatch.setattr(tuning, "measure", measured)
    return made_up


def test_the_winner_is_written_and_picked_up(own, questions, seconds, tmp_path, capsys):
    seconds |= {"greedy, K = 3": 0.5, "greedy, K = 2": 0.7}
    path = tmp_path / "pair" / "target" / "generation_config.json"
    before = json.loads(path.read_text())
    out = tmp_path / "out.json"
    extra = ["-k", "2,3,adaptive:4", "--write", own[0], "--output", str(out)]
    assert main(["tune", own[0], str(questions), "-d", own[1], *LENGTH, *extra]) == 0
    shown, err = capsys.readouterr()
    assert "best: greedy, K = 3" in shown
    assert f"written to {path}" in err
    fields = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    assert json.loads(path.read_text()) == before | fields
    result = json.loads(out.read_text())
    assert (result["winner"], result["fields"]) == ("greedy, K = 3", fields)
    assert [one["name"] for one in result["tried"]] == ["greedy, K = 3", "greedy, K = 2", "greedy, adaptive up to 4"]

    model = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(own[0]))
    draft = AutoModelForCausalLM.from_pretrained(own[1])
    stats = hf_speculate.SpeculationStats()
    model.generate(torch.tensor([[70, 80]]), assistant_model=draft, max_new_tokens=NUM_NEW, speculation_stats=stats)
    assert max(stats.rounds_by_draft_len) == 3
    assert 0 not in stats.rounds_by_draft_len


def test_a_lossy_winner_is_written_with_its_threshold_and_nothing_where_plain_wins(own, questions, seconds, capsys):
    words = ["tune", own[0], str(questions), "-d", own[1], *LENGTH, "-k", "2", "--write", own[0]]
    path = Path(own[0]) / "generation_config.json"
    before = path.read_text()
    seconds["greedy, K = 2"] = 1.5
    assert main(words) == 1
    assert path.read_text() == before
    assert "do not speculate: plain decoding is as fast as any method; nothing is written" in capsys.readouterr().out
    seconds["typical 0.2, K = 2"] = 0.5
    assert main([*words, "--thresholds", "0.01,0.2", "--quality", "agreement=0.01,drop=50"]) == 0
    saved = json.loads(path.read_text())
    assert (saved["verifier"], saved["posterior_threshold"], saved["num_assistant_tokens"]) == ("typical", 0.2, 2)
    assert "agreement" in capsys.readouterr().out
