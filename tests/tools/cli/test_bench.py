"""Test `hf-speculate bench` and `tune` on a tiny pair: compared methods and the saved winner."""

import functools
import json
from pathlib import Path

import pytest
from transformers import GenerationMixin

import hf_speculate
from hf_speculate.config import SpeculationConfig
from hf_speculate.tools.cli.main import main
from tests.cases import KeepsAll
from tests.support.tiny import make_model
from tests.support.tiny_tokenizers import byte_level_tokenizer
from tests.tools.dataset.common import save_pair

QUESTIONS = [
    {
        "question_id": 81 + index,
        "category": "code" if index % 2 else "text",
        "turns": [text, "and then?"],
    }
    for index, text in enumerate(["def main", "class Stack", "x = ", "import"])
]
NUM_NEW = 8
LENGTH = ["-n", str(NUM_NEW), "--device", "cpu"]


@pytest.fixture
def pair(folder):
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    return file


def run(pair, prompts, *extra):
    out = prompts.parent / "out.json"
    status = main(
        [
            "bench",
            pair[0],
            str(prompts),
            "-d",
            pair[1],
            *LENGTH,
            "-k",
            "3",
            *extra,
            "--output",
            str(out),
        ]
    )
    return status, json.loads(out.read_text())


def test_greedy_and_lossy_methods_are_compared_with_plain(pair, questions, capsys):
    page = questions.with_name("report.html")
    status, result = run(
        pair, questions, "-k", "3,adaptive", "--thresholds", "0.05,0.2", "--html", str(page)
    )
    assert status == 0
    names = [method["name"] for method in result["methods"]]
    ours = [
        f"{verifier}, {length}"
        for verifier in ("greedy", "typical")
        for length in ("K = 3", "adaptive")
    ]
    assert names == ["plain, greedy", "transformers, defaults", "transformers, K = 3", *ours]
    assert [method["checked"] for method in result["methods"]] == [
        None,
        *["4 of 4 rows equal"] * 4,
        None,
        None,
    ]
    assert [method["is_lossy"] for method in result["methods"]] == [False] * 5 + [True] * 2
    ours = result["methods"][3]
    assert (ours["verifier"], ours["num_assistant_tokens"], ours["num_tokens"]) == (
        "greedy",
        3,
        4 * NUM_NEW,
    )
    assert 1 < ours["mean_acceptance_length"] <= 4
    assert 1 < len(ours["draft_lens"]) < sum(ours["rounds_by_draft_len"].values())  # from one call
    categories = {
        (entry["category"], entry["method"]): entry["num_prompts"] for entry in result["categories"]
    }
    assert categories == {
        (category, name): 2 for category in ("code", "text") for name in names[1:]
    }
    assert [entry["posterior_threshold"] for entry in result["drift"]] == [None, None, 0.05, 0.2]
    assert result["drift"][0]["agreement_with_greedy"] == 1.0
    settings, conditions = result["settings"], result["environment"]
    assert (settings["num_prompts"], settings["left_out"], settings["command"][:19]) == (
        4,
        {},
        "hf-speculate bench ",
    )
    assert (conditions["target"], conditions["draft"], conditions["dtype"]) == (*pair, "float64")
    out, err = capsys.readouterr()
    assert all(name in page.read_text() and name in out for name in names)
    assert "4 of 4 prompts have several turns; the first one is used" in err


def test_sampled_prompt_lookup_is_not_compared_with_plain(pair, questions, capsys):
    words = [
        "bench",
        pair[0],
        str(questions),
        *LENGTH,
        "-k",
        "3",
        "-b",
        "2",
        "--do-sample",
        "-v",
        "rejection",
        "--json",
    ]
    assert main(words) == 2
    assert "there must be --draft or --lookup, got neither" in capsys.readouterr().err
    assert main([*words, "--lookup", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    names = [entry["name"] for entry in result["methods"] if entry["checked"] is None]
    assert names == ["plain, sampling", "transformers, lookup 4", "rejection, K = 3"]
    assert (result["settings"]["batch_size"], result["drift"]) == (2, [])


def test_interrupted_benchmark_keeps_its_measurements(pair, questions, monkeypatch, capsys):
    # Three warm-ups, and one batch for each of three methods.
    left, generate = iter(range(6)), GenerationMixin.generate

    @functools.wraps(generate)
    def interrupted(model, **arguments):
        # transformers also calls `generate` of the draft.
        if model.name_or_path == pair[0] and next(left, None) is None:
            raise KeyboardInterrupt
        return generate(model, **arguments)

    monkeypatch.setattr(GenerationMixin, "generate", interrupted)
    status, result = run(pair, questions, "-k", "adaptive", "-v", "greedy", "--json")
    assert (status, result["is_interrupted"]) == (130, True)
    names = ["plain, greedy", "transformers, defaults", "greedy, adaptive"]
    assert [(entry["name"], entry["num_tokens"]) for entry in result["methods"]] == [
        (name, NUM_NEW) for name in names
    ]
    out, err = capsys.readouterr()
    assert json.loads(out) == result
    assert "not reliable; use more prompts or repeats" in err


def test_draft_may_have_another_tokenizer(pair, questions, tmp_path):
    tokenizer, second = byte_level_tokenizer(["de", "cl"], eos_token="<end>"), tmp_path / "other"
    make_model(
        "llama", vocab_size=len(tokenizer), seed=1, num_hidden_layers=1, hidden_size=8
    ).save_pretrained(second)
    tokenizer.save_pretrained(second)
    status, result = run((pair[0], str(second)), questions, "-v", "greedy", "--num-prompts", "2")
    assert (status, result["methods"][-1]["checked"]) == (0, "2 of 2 rows equal")


def test_method_with_a_different_text_shows_no_speedup(questions, tmp_path, registry, capsys):
    hf_speculate.register_verifier("keeps all", lambda config: KeepsAll(), lossless=True)
    status, result = run(save_pair(tmp_path, noise=0.5), questions, "-v", "greedy,keeps all")
    assert status == 1
    assert (
        "its output differs from plain decoding's"
        in result["settings"]["left_out"]["keeps all, K = 3"]
    )
    assert "keeps all" not in capsys.readouterr().out


def test_winner_is_saved_unless_plain_decoding_wins(questions, tmp_path, monkeypatch, capsys):
    generate, now = GenerationMixin.generate, [0.0]
    default = SpeculationConfig().posterior_threshold
    # Duration of a call in seconds by threshold and K. The models still decode.
    seconds = {(default, 2): 1.5, (default, 3): 1.5}

    @functools.wraps(generate)
    def timed(model, **arguments):
        # Plain decoding has no request.
        request = getattr(arguments.get("custom_generate"), "request", None)
        config = request and request.config
        now[0] += seconds.get(
            config and (config.posterior_threshold, config.num_assistant_tokens), 1.0
        )
        return generate(model, **arguments)

    monkeypatch.setattr(GenerationMixin, "generate", timed)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    target, draft = save_pair(tmp_path / "pair")
    path, out = Path(target) / "generation_config.json", tmp_path / "out.json"
    words = [
        "tune",
        target,
        str(questions),
        "-d",
        draft,
        *LENGTH,
        "-k",
        "2,3",
        "--write",
        target,
        "-o",
        str(out),
    ]
    before = path.read_text()
    assert main(words) == 1
    assert path.read_text() == before
    assert (
        "do not speculate: plain decoding is as fast as any method; nothing is written"
        in capsys.readouterr().out
    )
    seconds[default, 3] = 0.5
    assert main(words) == 0
    shown, err = capsys.readouterr()
    assert "best: greedy, K = 3" in shown and f"written to {path}" in err
    fields = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    assert json.loads(path.read_text()) == json.loads(before) | fields
    result = json.loads(out.read_text())
    assert (result["winner"], result["fields"]) == ("greedy, K = 3", fields)
    seconds[0.2, 2] = 0.2
    assert main([*words, "--thresholds", "0.01,0.2", "--quality", "agreement=0.01,drop=50"]) == 0
    saved = json.loads(path.read_text())
    assert (saved["verifier"], saved["posterior_threshold"], saved["num_assistant_tokens"]) == (
        "typical",
        0.2,
        2,
    )
