"""What users write is read; the fastest method that the rule allows wins, and is written."""

import json
import math
import os

import pytest
import torch

from hf_speculate import ConfigError
from hf_speculate.tools.bench.batches import make_batches, take_in_turn
from hf_speculate.tools.bench.drift import Drift
from hf_speculate.tools.bench.methods import (
    DraftLen,
    assisted_methods,
    our_methods,
    parse_draft_lens,
    parse_thresholds,
    threshold_methods,
)
from hf_speculate.tools.bench.rules import Rule, parse_rule
from hf_speculate.tools.bench.saving import write_fields
from hf_speculate.tools.bench.tuning import candidates, num_steps, tune
from tests.tiny import make_config
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.tools.bench.fakes import FakeTimes, empty_batches, instruments


def test_categories_take_turns():
    items, categories = ["a1", "a2", "a3", "b1", "c1", "c2"], ["a", "a", "a", "b", "c", "c"]
    assert take_in_turn(items, categories, 4) == ["a1", "b1", "c1", "a2"]
    assert take_in_turn(items, categories, None) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_batch_has_one_category_and_the_rest_is_decoded_together():
    tokenizer = byte_level_tokenizer([], eos_token="<end>", pad_token="<pad>")
    texts, categories = ["aa", "x", "a", "y", "z"], ["a", "x", "a", "y", "z"]
    batches = make_batches(tokenizer(texts)["input_ids"], categories, tokenizer.pad_token_id, 2, torch.device("cpu"))
    assert [batch.category for batch in batches] == ["a", "", "z"]
    assert [[tokenizer.decode(row) for row in batch.rows] for batch in batches] == [["aa", "a"], ["x", "y"], ["z"]]
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert batches[0].attention_mask.tolist() == [[1, 1], [0, 1]]
    assert batches[0].input_ids[1, 0] == tokenizer.pad_token_id


TWO_LENS = [DraftLen(None, True), DraftLen(5, False)]


def test_every_verifier_meets_every_number_of_tokens():
    methods = our_methods(["greedy", "typical"], TWO_LENS, False, {"draft_sampling": "argmax"})
    names = ["greedy, adaptive", "greedy, K = 5", "typical, adaptive", "typical, K = 5"]
    assert [method.name for method in methods] == names
    assert [method.is_lossy for method in methods] == [False, False, True, True]
    assert [method.num_assistant_tokens for method in methods] == [None, 5, None, 5]
    assert methods[3].fields == {"verifier": "typical", "draft_sampling": "argmax", **TWO_LENS[1].fields}
    assisted = [method.name for method in assisted_methods([*TWO_LENS, DraftLen(8, False)], False)]
    assert assisted == ["transformers, defaults", "transformers, K = 5"]  # the first constant number


def test_alpha_goes_along_with_the_threshold_unless_it_is_set():
    def alphas(fields):
        methods = threshold_methods(["typical"], [0.04, 0.09, 0.25], TWO_LENS[1:], True, fields)
        return [method.fields["posterior_alpha"] for method in methods]

    assert alphas({}) == [0.2, 0.3, 0.5]
    assert alphas({"posterior_alpha": 0.6}) == [0.6] * 3


PLAIN_DRIFT = Drift(-100.0, 100, 100)


def test_rules_numbers_and_thresholds_are_read():
    assert parse_rule("exact") == Rule()
    assert parse_rule("agreement=0.95") == Rule(0.95, None)
    assert parse_rule("drop=5e-2,agreement>=1") == Rule(1.0, 0.05)
    assert str(parse_rule("drop <= 0.05, agreement=1")) == "agreement >= 1, drop <= 0.05"
    lens = parse_draft_lens("3, adaptive,adaptive:16,3")
    assert lens == [DraftLen(3, False), DraftLen(None, True), DraftLen(16, True)]
    assert [one.label for one in lens] == ["K = 3", "adaptive", "adaptive up to 16"]
    assert lens[0].fields == {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    assert lens[2].fields == {"num_assistant_tokens": 16, "num_assistant_tokens_schedule": "adaptive"}
    assert (parse_thresholds("0.05,0.2"), parse_thresholds("")) == ([0.05, 0.2], [])
    bad = {parse_rule: ["", "agreement", "agreement<=0.9", "drop>=0.9", "exact,drop=0.1", "drop=1e", "drop=-1"]}
    for parse, texts in (bad | {parse_draft_lens: ["", "5:6", "adaptive:0"], parse_thresholds: ["x", "1.5"]}).items():
        for text in texts:
            with pytest.raises(ConfigError):
                parse(text)


@pytest.mark.parametrize(
    ("rule", "drift", "do_sample", "complaint"),
    [
        (Rule(0.9), Drift(-100.0, 89, 100), False, "agreement 0.890 < 0.9"),
        (Rule(None, 0.125), Drift(-112.5, 0, 100), False, ""),
        (Rule(None, 0.1), Drift(-50.0, 0, 100), False, ""),
        (Rule(None, 0.1), Drift(-50.0, 0, 100), True, "drop 0.500 > 0.1"),
        (Rule(None, 0.1), Drift(math.nan, 0, 100), False, "drop nan > 0.1"),
        (Rule(0.9, 0.1), Drift(-150.0, 95, 100), False, "drop 0.500 > 0.1"),
    ],
)
def test_a_bound_holds_for_the_text_of_a_method(rule, drift, do_sample, complaint):
    assert rule.complaint(drift, PLAIN_DRIFT, do_sample) == complaint


LENS = [DraftLen(2, False), DraftLen(5, False), DraftLen(8, False), DraftLen(16, True)]
GREEDY = ["greedy, K = 2", "greedy, K = 5", "greedy, K = 8", "greedy, adaptive up to 16"]
PLAIN = "plain, greedy"
NUM_BATCHES = 8


def greedy_methods():
    return candidates(Rule(), LENS, [0.1], False, {})


def test_the_fastest_method_wins_and_slow_ones_leave_early():
    times = FakeTimes(dict(zip([PLAIN, *GREEDY], [1.0, 0.9, 0.5, 0.7, 0.6], strict=True)))
    tuned = tune(greedy_methods(), empty_batches(NUM_BATCHES), Rule(), instruments(times))
    assert tuned.winner.name == "greedy, K = 5"
    assert tuned.fields == {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    assert [trial.method.name for trial in tuned.trials] == [GREEDY[1], GREEDY[3], GREEDY[2], GREEDY[0]]
    assert [trial.complaint for trial in tuned.trials] == ["", "", "slower", "slower"]
    assert [len(trial.runs) for trial in tuned.trials] == [8, 8, 2, 2]
    late = {PLAIN: 1.0, GREEDY[0]: [0.5] * 2 + [0.9] * 6, GREEDY[1]: 0.6, GREEDY[2]: 1.0, GREEDY[3]: 1.0}
    tuned_late = tune(greedy_methods(), empty_batches(NUM_BATCHES), Rule(), instruments(FakeTimes(late)))
    assert tuned_late.winner.name == GREEDY[1]  # later prompts count too
    assert len(times.calls) + len([PLAIN, *GREEDY]) == num_steps(4, NUM_BATCHES)
    assert tuned.as_dict()["tried"][0]["speedup"] == pytest.approx({"min": 2.0, "median": 2.0, "max": 2.0})


def test_an_interrupted_tuning_has_no_winner_and_keeps_what_it_measured():
    times = FakeTimes(dict(zip([PLAIN, *GREEDY], [1.0, 0.9, 0.5, 0.7, 0.6], strict=True)), interrupted_at=8)
    tuned = tune(greedy_methods(), empty_batches(NUM_BATCHES), Rule(), instruments(times))
    assert (tuned.is_interrupted, tuned.winner, tuned.fields) == (True, None, {})
    assert {trial.method.name: len(trial.runs) for trial in tuned.trials} == dict.fromkeys(GREEDY, 1)
    assert tuned.as_dict()["is_interrupted"]


def test_a_method_with_another_text_is_out_however_fast():
    times = FakeTimes({PLAIN: 1.0, GREEDY[0]: 0.1, GREEDY[1]: 0.5})
    tuned = tune(greedy_methods()[:2], empty_batches(2), Rule(), instruments(times, wrong=[GREEDY[0]]))
    assert tuned.winner.name == GREEDY[1]
    assert tuned.trials[-1].complaint == "differs from plain decoding: 0 of 2 rows equal, 2 differ"


def test_lossy_methods_win_only_inside_the_bounds():
    rule = Rule(min_agreement=0.9)
    methods = candidates(rule, LENS[1:2], [0.05, 0.2], False, {})
    names = [method.name for method in methods]
    assert names == ["greedy, K = 5", "typical 0.05, K = 5", "typical 0.2, K = 5"]
    texts = {PLAIN: [1], names[0]: [1], names[1]: [2], names[2]: [3]}
    times = FakeTimes(dict(zip([PLAIN, *names], [1.0, 0.6, 0.2, 0.4], strict=True)), texts)
    drifts = {1: Drift(-1.0, 100, 100), 2: Drift(-9.0, 80, 100), 3: Drift(-2.0, 95, 100)}
    tuned = tune(methods, empty_batches(3), rule, instruments(times, drifts))
    assert tuned.winner.name == "typical 0.2, K = 5"
    assert (tuned.fields["verifier"], tuned.fields["posterior_threshold"]) == ("typical", 0.2)
    tried = {one["name"]: one for one in tuned.as_dict()["tried"]}
    assert tried[names[1]]["out"] == "agreement 0.800 < 0.9"
    assert (tried[names[2]]["agreement_with_greedy"], tried[names[0]]["agreement_with_greedy"]) == (0.95, None)

    tight = tune(methods, empty_batches(3), Rule(max_drop=0.001), instruments(times, drifts))
    assert tight.winner.name == "greedy, K = 5"
    assert [trial.complaint for trial in tight.trials] == ["", "drop 0.080 > 0.001", "drop 0.010 > 0.001"]


def test_the_grid_holds_what_the_rule_allows():
    lens = LENS[:1]
    exact = candidates(Rule(), lens, [0.1], True, {})
    assert [method.verifier for method in exact] == ["rejection", "block", "coupled"]
    times = FakeTimes({"plain, sampling": 1.0, "rejection, K = 2": 0.5, "block, K = 2": 0.9, "coupled, K = 2": 0.9})
    tuned = tune(exact, empty_batches(2), Rule(), instruments(times), do_sample=True)
    assert "verifier" not in tuned.fields  # of the default when tokens are drawn
    bounded = candidates(Rule(max_drop=0.1), lens, [0.1, 0.2], True, {"draft_sampling": "argmax"})
    assert [method.name for method in bounded if method.is_lossy] == ["typical 0.1, K = 2", "typical 0.2, K = 2"]
    assert all(method.fields["draft_sampling"] == "argmax" for method in bounded)
    assert candidates(Rule(), lens, [0.1], False, {}, "typical") == []


FIELDS = {"verifier": "typical", "posterior_threshold": 0.2, "num_assistant_tokens": 5}


def test_other_entries_stay_and_what_was_tuned_before_goes(tmp_path):
    kept = {"eos_token_id": 7, "temperature": 0.5, "draft_sampling": "argmax"}
    tuned = {"_from_model_config": True, "verifier": "block", "num_assistant_tokens_schedule": "adaptive"}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(kept | tuned))
    assert write_fields(tmp_path, FIELDS) == path
    assert json.loads(path.read_text()) == kept | FIELDS
    path.unlink()  # what the model did without the file goes along
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama").to_dict() | {"eos_token_id": 9}))
    saved = json.loads(write_fields(tmp_path, FIELDS).read_text())
    assert (saved["eos_token_id"], saved["verifier"], "_from_model_config" in saved) == (9, "typical", False)


def test_a_crash_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": 7}')
    monkeypatch.setattr(os, "replace", None)
    with pytest.raises(TypeError):
        write_fields(tmp_path, FIELDS)
    assert path.read_text() == '{"eos_token_id": 7}'
    assert os.listdir(tmp_path) == ["generation_config.json"]
