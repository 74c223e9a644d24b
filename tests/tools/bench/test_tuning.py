"""The fastest method that the rule allows wins, by a clock that the test holds."""

from itertools import pairwise

import pytest

from hf_speculate.tools.bench.drift import Drift
from hf_speculate.tools.bench.methods import DraftLen
from hf_speculate.tools.bench.rules import Rule
from hf_speculate.tools.bench.tuning import candidates, num_steps, rungs, tune
from tests.tools.bench.fakes import FakeTimes, empty_batches, instruments

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
    decoded = {name: sorted(index for method, index in times.calls if method == name) for name in (PLAIN, *GREEDY[:2])}
    assert decoded == {PLAIN: list(range(8)), GREEDY[1]: list(range(8)), GREEDY[0]: [0, 1]}
    assert len(times.calls) + len([PLAIN, *GREEDY]) == num_steps(4, NUM_BATCHES)
    first = tuned.as_dict()["tried"][0]
    assert first["speedup"] == pytest.approx({"min": 2.0, "median": 2.0, "max": 2.0})
    assert (first["num_prompts"], first["out"], first["drop"]) == (8, None, None)


def test_an_interrupted_tuning_has_no_winner_and_keeps_what_it_measured():
    times = FakeTimes(dict(zip([PLAIN, *GREEDY], [1.0, 0.9, 0.5, 0.7, 0.6], strict=True)), interrupted_at=8)
    tuned = tune(greedy_methods(), empty_batches(NUM_BATCHES), Rule(), instruments(times))
    assert (tuned.is_interrupted, tuned.winner, tuned.fields) == (True, None, {})
    assert {trial.method.name: len(trial.runs) for trial in tuned.trials} == dict.fromkeys(GREEDY, 1)
    result = tuned.as_dict()
    assert result["is_interrupted"]
    assert not result["reliability"]["is_reliable"]


def test_later_prompts_count_too():
    late = {PLAIN: 1.0, GREEDY[0]: [0.5] * 2 + [0.9] * 6, GREEDY[1]: 0.6, GREEDY[2]: 1.0, GREEDY[3]: 1.0}
    tuned = tune(greedy_methods(), empty_batches(NUM_BATCHES), Rule(), instruments(FakeTimes(late)))
    assert tuned.winner.name == GREEDY[1]


def test_a_method_with_another_text_is_out_however_fast():
    times = FakeTimes(dict(zip([PLAIN, *GREEDY], [1.0, 0.1, 0.5, 0.7, 0.6], strict=True)))
    tuned = tune(greedy_methods(), empty_batches(NUM_BATCHES), Rule(), instruments(times, wrong=[GREEDY[0]]))
    assert tuned.winner.name == GREEDY[1]
    assert tuned.trials[-1].complaint == "differs from plain decoding: 0 of 2 rows equal, 2 differ"
    assert len(tuned.trials[-1].runs) == 2


def test_lossy_methods_win_only_inside_the_bounds():
    rule = Rule(min_agreement=0.9)
    methods = candidates(rule, LENS[1:2], [0.05, 0.2], False, {})
    names = [method.name for method in methods]
    assert names == ["greedy, K = 5", "typical 0.05, K = 5", "typical 0.2, K = 5"]
    times = FakeTimes(
        dict(zip([PLAIN, *names], [1.0, 0.6, 0.2, 0.4], strict=True)),
        {PLAIN: [1], names[0]: [1], names[1]: [2], names[2]: [3]},
    )
    drifts = {1: Drift(-1.0, 100, 100), 2: Drift(-9.0, 80, 100), 3: Drift(-2.0, 95, 100)}
    tuned = tune(methods, empty_batches(3), rule, instruments(times, drifts))
    assert tuned.winner.name == "typical 0.2, K = 5"
    assert tuned.fields["verifier"] == "typical"
    assert tuned.fields["posterior_threshold"] == 0.2
    tried = {one["name"]: one for one in tuned.as_dict()["tried"]}
    assert tried[names[1]]["out"] == "agreement 0.800 < 0.9"
    assert tried[names[2]]["agreement_with_greedy"] == 0.95
    assert tried[names[2]]["drop"] == pytest.approx(0.01)
    assert tried[names[0]]["agreement_with_greedy"] is None

    tight = tune(methods, empty_batches(3), Rule(max_drop=0.001), instruments(times, drifts))
    assert tight.winner.name == "greedy, K = 5"
    assert [trial.complaint for trial in tight.trials] == ["", "drop 0.080 > 0.001", "drop 0.010 > 0.001"]


def test_nothing_wins_where_the_rule_lets_nothing_through():
    rule = Rule(min_agreement=0.99)
    methods = candidates(rule, LENS[1:2], [0.05], False, {}, "typical")
    times = FakeTimes({PLAIN: 1.0, methods[0].name: 0.1}, {PLAIN: [1], methods[0].name: [2]})
    drifts = {1: Drift(-1.0, 100, 100), 2: Drift(-1.0, 80, 100)}
    tuned = tune(methods, empty_batches(5), rule, instruments(times, drifts))
    assert tuned.winner is None
    assert tuned.trials[0].complaint


def test_the_grid_holds_what_the_rule_allows():
    lens = LENS[:1]
    assert [method.verifier for method in candidates(Rule(), lens, [0.1], True, {})] == [
        "rejection",
        "block",
        "coupled",
    ]
    assert all(not method.is_lossy for method in candidates(Rule(), lens, [0.1], True, {}))
    bounded = candidates(Rule(max_drop=0.1), lens, [0.1, 0.2], True, {"draft_sampling": "argmax"})
    assert [method.name for method in bounded if method.is_lossy] == ["typical 0.1, K = 2", "typical 0.2, K = 2"]
    assert all(method.fields["draft_sampling"] == "argmax" for method in bounded)
    assert candidates(Rule(), lens, [0.1], False, {}, "typical") == []


@pytest.mark.parametrize("num_methods", [1, 2, 3, 8, 41])
@pytest.mark.parametrize("num_batches", [1, 2, 3, 7, 100])
def test_rungs_use_every_batch_once_and_halve_the_methods(num_methods, num_batches):
    found = rungs(num_methods, num_batches)
    assert sum(size for _, size in found) == num_batches
    assert found[0][0] == num_methods
    assert all(2 * later >= earlier >= later for (earlier, _), (later, _) in pairwise(found))
    assert found[-1][0] >= min(num_methods, 2)


def test_a_verifier_that_goes_unsaid_is_not_written_when_tokens_are_drawn():
    names = {method.name for method in candidates(Rule(), LENS[:1], [], True, {})}
    for fastest, expected in (("rejection, K = 2", None), ("block, K = 2", "block")):
        times = FakeTimes({"plain, sampling": 1.0, **dict.fromkeys(names, 0.9), fastest: 0.5})
        methods = candidates(Rule(), LENS[:1], [], True, {})
        tuned = tune(methods, empty_batches(2), Rule(), instruments(times), do_sample=True)
        assert tuned.winner.name == fastest
        assert tuned.fields.get("verifier") == expected
