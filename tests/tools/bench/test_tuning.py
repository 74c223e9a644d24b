"""Test tuning: its options, the fastest allowed method as the winner, and the written file."""

import json
import math
import os

import pytest
import torch

from hf_speculate import ConfigError
from hf_speculate.tools.bench.decoding import make_batches, take_in_turn
from hf_speculate.tools.bench.methods import DraftLen, parse_draft_lens, parse_thresholds
from hf_speculate.tools.bench.quality import Drift, Rule, parse_rule
from hf_speculate.tools.bench.tuning import candidates, num_steps, tune, write_fields
from tests.support.tiny import make_config
from tests.tools.bench.fakes import FakeTimes, empty_batches, instruments


def test_categories_take_turns_and_share_the_last_batches():
    items, categories = ["a1", "a2", "a3", "b1", "c1", "c2"], ["a", "a", "a", "b", "c", "c"]
    assert take_in_turn(items, categories, 4) == ["a1", "b1", "c1", "a2"]
    batches = make_batches(
        [[5, 5], [6], [7], [8], [9]], ["a", "x", "a", "y", "z"], 0, 2, torch.device("cpu")
    )
    assert [batch.category for batch in batches] == ["a", "", "z"]
    assert [[row.tolist() for row in batch.rows] for batch in batches] == [
        [[5, 5], [7]],
        [[6], [8]],
        [[9]],
    ]
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert batches[0].input_ids.tolist() == [[5, 5], [0, 7]]


def test_options_of_tuning_are_parsed():
    assert parse_rule("exact") == Rule()
    assert parse_rule("agreement=0.95") == Rule(0.95, None)
    assert parse_rule("drop=5e-2,agreement>=1") == Rule(1.0, 0.05)
    assert str(parse_rule("drop <= 0.05, agreement=1")) == "agreement >= 1, drop <= 0.05"
    lens = parse_draft_lens("3, adaptive,adaptive:16,3")
    assert lens == [DraftLen(3, False), DraftLen(None, True), DraftLen(16, True)]
    assert lens[2].fields == {
        "num_assistant_tokens": 16,
        "num_assistant_tokens_schedule": "adaptive",
    }
    assert (parse_thresholds("0.05,0.2"), parse_thresholds("")) == ([0.05, 0.2], [])
    bad = {
        parse_rule: [
            "",
            "agreement",
            "agreement<=0.9",
            "drop>=0.9",
            "exact,drop=0.1",
            "drop=1e",
            "drop=-1",
        ]
    }
    for parse, texts in (
        bad | {parse_draft_lens: ["", "5:6", "adaptive:129"], parse_thresholds: ["x", "1.5"]}
    ).items():
        for text in texts:
            with pytest.raises(ConfigError):
                parse(text)


def test_bound_applies_to_the_text_of_a_method():
    for rule, drift, do_sample, complaint in (
        (Rule(0.9), Drift(-100.0, 89, 100), False, "agreement 0.890 < 0.9"),
        (Rule(None, 0.125), Drift(-112.5, 0, 100), False, ""),
        (Rule(None, 0.1), Drift(-50.0, 0, 100), False, ""),
        (Rule(None, 0.1), Drift(-50.0, 0, 100), True, "drop 0.500 > 0.1"),
        (Rule(0.9, 0.1), Drift(math.nan, 95, 100), False, "drop nan > 0.1"),
    ):
        assert rule.complaint(drift, Drift(-100.0, 100, 100), do_sample) == complaint


LENS = [DraftLen(2, False), DraftLen(5, False), DraftLen(8, False), DraftLen(16, True)]
GREEDY = ["greedy, K = 2", "greedy, K = 5", "greedy, K = 8", "greedy, adaptive up to 16"]
PLAIN = "plain, greedy"
NUM_BATCHES = 8
METHODS = candidates(Rule(), LENS, [0.1], False, {})


def test_fastest_method_wins_and_slow_ones_leave_early():
    times = FakeTimes(dict(zip([PLAIN, *GREEDY], [1.0, 0.9, 0.5, 0.7, 0.6], strict=True)))
    tuned = tune(METHODS, empty_batches(NUM_BATCHES), Rule(), instruments(times))
    assert tuned.winner.name == "greedy, K = 5"
    assert tuned.fields == {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    ranked = [
        (GREEDY[1], "", 8),
        (GREEDY[3], "", 8),
        (GREEDY[2], "slower", 2),
        (GREEDY[0], "slower", 2),
    ]
    assert [
        (trial.method.name, trial.complaint, len(trial.runs)) for trial in tuned.trials
    ] == ranked
    late = {
        PLAIN: 1.0,
        GREEDY[0]: [0.5] * 2 + [0.9] * 6,
        GREEDY[1]: 0.6,
        GREEDY[2]: 1.0,
        GREEDY[3]: 1.0,
    }
    tuned_late = tune(METHODS, empty_batches(NUM_BATCHES), Rule(), instruments(FakeTimes(late)))
    assert tuned_late.winner.name == GREEDY[1]  # later prompts count as well
    assert len(times.calls) + len([PLAIN, *GREEDY]) == num_steps(4, NUM_BATCHES)
    assert tuned.as_dict()["tried"][0]["speedup"] == pytest.approx(
        {"min": 2.0, "median": 2.0, "max": 2.0}
    )


def test_interrupted_tuning_keeps_measurements_without_winner():
    times = FakeTimes(
        dict.fromkeys([PLAIN, *GREEDY], 1.0), errors={(GREEDY[0], 1): KeyboardInterrupt()}
    )
    tuned = tune(METHODS, empty_batches(NUM_BATCHES), Rule(), instruments(times))
    assert (tuned.as_dict()["is_interrupted"], tuned.winner, tuned.fields) == (True, None, {})
    assert {trial.method.name: len(trial.runs) for trial in tuned.trials} == dict.fromkeys(
        GREEDY, 1
    )


def test_winner_is_the_fastest_method_inside_the_bounds():
    methods = candidates(Rule(min_agreement=0.9), LENS[:2], [0.05, 0.2], False, {})[:4]
    names = ["greedy, K = 2", "greedy, K = 5", "typical 0.05, K = 2", "typical 0.05, K = 5"]
    assert [method.name for method in methods] == names
    texts = {PLAIN: [1], names[0]: [1], names[1]: [1], names[2]: [2], names[3]: [3]}
    times = FakeTimes(dict(zip([PLAIN, *names], [1.0, 0.6, 0.1, 0.2, 0.4], strict=True)), texts)
    taken = instruments(
        times,
        {1: Drift(-1.0, 100, 100), 2: Drift(-9.0, 80, 100), 3: Drift(-2.0, 95, 100)},
        names[1:2],
    )
    tuned = tune(methods, empty_batches(2), Rule(min_agreement=0.9), taken)
    assert tuned.winner.name == names[3]
    assert (tuned.fields["verifier"], tuned.fields["posterior_threshold"]) == ("typical", 0.05)
    tried = {
        trial["name"]: (trial["out"], trial["agreement_with_greedy"])
        for trial in tuned.as_dict()["tried"]
    }
    wrong = "differs from plain decoding: 0 of 2 rows equal, 2 differ"
    assert [tried[name] for name in names] == [
        (None, None),
        (wrong, None),
        ("agreement 0.800 < 0.9", 0.8),
        (None, 0.95),
    ]
    tight = tune(methods, empty_batches(2), Rule(max_drop=0.001), taken)
    assert tight.winner.name == names[0]


def test_grid_holds_the_methods_allowed_by_the_rule():
    exact = candidates(Rule(), LENS[:1], [0.1], True, {})
    assert [method.verifier for method in exact] == ["rejection", "block", "coupled"]
    times = FakeTimes(
        {
            "plain, sampling": 1.0,
            "rejection, K = 2": 0.5,
            "block, K = 2": 0.9,
            "coupled, K = 2": 0.9,
        }
    )
    tuned = tune(exact, empty_batches(2), Rule(), instruments(times))
    assert "verifier" not in tuned.fields  # the default for sampling
    for fields, alphas in (({}, [0.2, 0.5]), ({"posterior_alpha": 0.6}, [0.6, 0.6])):
        bounded = candidates(
            Rule(max_drop=0.1), LENS[:1], [0.04, 0.25], True, {"draft_sampling": "argmax"} | fields
        )
        assert all(method.fields["draft_sampling"] == "argmax" for method in bounded)
        assert [method.name for method in bounded[3:]] == [
            "typical 0.04, K = 2",
            "typical 0.25, K = 2",
        ]
        assert [method.fields["posterior_alpha"] for method in bounded[3:]] == alphas
    assert candidates(Rule(), LENS[:1], [0.1], False, {}, "typical") == []


FIELDS = {"verifier": "typical", "posterior_threshold": 0.2, "num_assistant_tokens": 5}


def test_winner_replaces_earlier_fields_and_keeps_others(tmp_path, monkeypatch):
    others = {"eos_token_id": 7, "temperature": 0.5, "draft_sampling": "argmax"}
    tuned = {
        "_from_model_config": True,
        "verifier": "block",
        "num_assistant_tokens_schedule": "adaptive",
    }
    path = tmp_path / "generation_config.json"
    path.write_text(before := json.dumps(others | tuned))
    with monkeypatch.context() as crash, pytest.raises(TypeError):
        crash.setattr(os, "replace", None)
        write_fields(tmp_path, FIELDS)
    assert (path.read_text(), os.listdir(tmp_path)) == (before, [path.name])
    assert write_fields(tmp_path, FIELDS) == path
    assert json.loads(path.read_text()) == others | FIELDS
    path.unlink()  # settings that apply without a file are saved too
    (tmp_path / "config.json").write_text(
        json.dumps(make_config("llama").to_dict() | {"eos_token_id": 9})
    )
    saved = json.loads(write_fields(tmp_path, FIELDS).read_text())
    assert (saved["eos_token_id"], saved["verifier"], "_from_model_config" in saved) == (
        9,
        "typical",
        False,
    )
