"""`hf-speculate bench` on a tiny pair, and what it says when it cannot."""

import json

import pytest
import torch

import hf_speculate
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.cli.prompts import read_prompts
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
COMMON = ["-n", str(NUM_NEW), "-k", "3,adaptive", "--device", "cpu"]


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
    assert names == [
        "plain, greedy",
        "transformers, defaults",
        "transformers, K = 3",
        "greedy, K = 3",
        "greedy, adaptive",
        "typical, K = 3",
        "typical, adaptive",
    ]
    assert [method["checked"] for method in result["methods"]] == [None, *["4 of 4 rows equal"] * 4, None, None]
    assert [method["is_lossy"] for method in result["methods"]] == [False] * 5 + [True] * 2
    ours = result["methods"][3]
    assert (ours["verifier"], ours["num_assistant_tokens"], ours["num_tokens"]) == ("greedy", 3, 4 * NUM_NEW)
    assert 1 < ours["mean_acceptance_length"] <= 4
    assert len(ours["acceptance_rate_per_position"]) == 3
    assert list(ours["rounds_by_draft_len"])[-1] == "3"
    assert set(ours["seconds"]) == {"prefill", "draft", "score", "verify", "bookkeeping"}
    assert all(seconds > 0 for seconds in ours["seconds"].values())
    assert result["methods"][0]["speedup"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    for method in result["methods"]:
        speed = method["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]

    categories = {(one["category"], one["method"]): one for one in result["categories"]}
    assert set(categories) == {(category, name) for category in ("code", "text") for name in names[1:]}
    assert all(one["num_prompts"] == 2 for one in categories.values())

    assert [(one["verifier"], one["posterior_threshold"]) for one in result["drift"]] == [
        ("plain, greedy", None),
        ("plain, sampling", None),
        ("typical", 0.05),
        ("typical", 0.2),
    ]
    assert result["drift"][0]["agreement_with_greedy"] == 1.0
    assert result["drift"][0]["speedup"] == 1.0
    assert all(one["num_tokens"] == 4 * NUM_NEW for one in result["drift"])

    settings, conditions = result["settings"], result["environment"]
    assert (settings["num_prompts"], settings["batch_size"], settings["do_sample"]) == (4, 1, False)
    assert settings["drift_num_assistant_tokens"] == "K = 3"
    assert settings["left_out"] == {}
    assert (conditions["target"], conditions["draft"], conditions["dtype"]) == (*pair, "float64")
    assert conditions["versions"]["torch"] == torch.__version__

    assert len(ours["draft_lens"]) == sum(ours["rounds_by_draft_len"].values()) // result["settings"]["num_prompts"]
    assert all(name in page.read_text() for name in names)

    out, err = capsys.readouterr()
    assert "4 of 4 prompts have several turns; the first one is used" in err
    assert "4 of 4 rows equal" in out
    assert "agreement with greedy" in out
    assert all(name in out for name in names)


def test_prompt_lookup_needs_no_draft(pair, questions, capsys):
    out = questions.parent / "out.json"
    words = ["bench", pair[0], str(questions), *COMMON, "-v", "greedy", "--lookup", "4", "--output", str(out)]
    assert main(words) == 0
    result = json.loads(out.read_text())
    names = ["plain, greedy", "transformers, lookup 4", "greedy, K = 3", "greedy, adaptive"]
    assert [method["name"] for method in result["methods"]] == names
    assert result["environment"]["draft"] is None
    assert main(words[:-4]) == 2
    assert "there must be --draft or --lookup, got neither" in capsys.readouterr().err


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
    assert result["reliability"]["is_reliable"] is False
    assert "not reliable; use more prompts or repeats" in err
    assert "interrupted: the results cover the calls so far" in err


def test_batches_and_draws(pair, questions, capsys):
    status, result = run(pair, questions, "-b", "2", "--do-sample", "-t", "0.8", "-v", "rejection")
    assert status == 0
    assert [method["name"] for method in result["methods"]] == [
        "plain, sampling",
        "transformers, defaults",
        "transformers, K = 3",
        "rejection, K = 3",
        "rejection, adaptive",
    ]
    assert [method["checked"] for method in result["methods"]] == [None] * 5
    assert result["drift"] == []
    assert (result["settings"]["num_prompts"], result["settings"]["batch_size"]) == (4, 2)
    assert {(one["category"], one["num_prompts"]) for one in result["categories"]} == {("code", 2), ("text", 2)}
    assert "drift" not in capsys.readouterr().out


def test_lines_of_a_text_are_prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def main\n\nclass Stack\n")
    rows = read_prompts(file, by_line=True)
    assert [(row.key, row.content) for row in rows] == [("1", "def main"), ("3", "class Stack")]
    assert [row.content for row in read_prompts(file)] == [file.read_text()]


def test_a_draft_with_another_tokenizer_is_measured_too(pair, questions, tmp_path):
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
    assert {one["num_prompts"] for one in result["categories"]} == {1}


def test_no_figure_is_shown_of_a_method_that_writes_another_text(questions, tmp_path, registry, capsys):
    hf_speculate.register_verifier("keeps all", lambda config: KeepsAll(), lossless=True)
    pair = save_pair(tmp_path, noise=0.5)
    status, result = run(pair, questions, "-v", "greedy,keeps all", "-k", "3")
    assert status == 1
    assert "keeps all, K = 3" not in [method["name"] for method in result["methods"]]
    assert "greedy, K = 3" in [method["name"] for method in result["methods"]]
    assert "its output differs from plain decoding's" in result["settings"]["left_out"]["keeps all, K = 3"]
    out, err = capsys.readouterr()
    assert "keeps all" not in out
    assert "left out: keeps all, K = 3" in err
