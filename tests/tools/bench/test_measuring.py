"""Test that methods take turns with plain decoding, and that doubtful numbers are flagged."""

from dataclasses import replace

import pytest
import torch

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.decoding import Run, measure, of_equal_texts, ratios, up_to_eos
from hf_speculate.tools.bench.methods import Method
from hf_speculate.tools.bench.results import counted_runs, method_entry, reliability
from tests.tools.bench.fakes import FakeTimes, empty_batches

PLAIN, OURS, THEIRS = (
    Method("plain", "plain"),
    Method("ours", "ours"),
    Method("theirs", "transformers"),
)
BATCH = empty_batches(1)[0]


def test_methods_take_turns_over_batches():
    times, steps, state = (
        FakeTimes({"plain": 2.0, "ours": [1.0, 0.5], "theirs": 4.0}),
        [],
        torch.get_rng_state(),
    )
    options = {"repeats": 2, "seed": 5, "on_step": lambda *step: steps.append(step)}
    measured = measure([PLAIN, OURS, THEIRS], empty_batches(2), times, **options)
    there, back = ["plain", "ours", "theirs"], ["theirs", "ours", "plain"]
    assert [name for name, _ in times.calls] == there + back + there + back
    assert [index for _, index in times.calls] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    assert times.seeds == [5] * 3 + [6] * 3 + [7] * 3 + [8] * 3
    assert torch.equal(torch.get_rng_state(), state)
    assert [method.name for method, run in steps[:3] if run is None] == there
    assert [(method.name, run.batch.number) for method, run in steps[3:]] == times.calls
    assert [run.seconds for run in measured.runs["ours"]] == [1.0, 0.5, 1.0, 0.5]
    assert ratios(measured.runs["ours"], measured.runs["plain"]) == [2.0, 4.0, 2.0, 4.0]
    assert measured.left_out == {}


def test_text_is_counted_up_to_its_eos_inclusive():
    assert up_to_eos([5, 6, 7, 0, 0], frozenset({7, 9})) == [5, 6, 7]
    run = Run(BATCH, 0, 5.0, [[5, 6, 7], [5]], None, first_token_s=3.0)
    assert (run.num_tokens, run.tokens_per_s) == (4, 0.8)
    assert run.ms_per_token == 1000.0  # excluding the first token


def test_failing_transformers_method_is_left_out_with_a_reason():
    seconds, error = (
        {"plain": 1.0, "ours": 1.0, "theirs": 1.0},
        ValueError("not for this pair\nand more"),
    )
    measured = measure(
        [PLAIN, OURS, THEIRS], empty_batches(3), FakeTimes(seconds, errors={("theirs", 1): error})
    )
    assert measured.left_out == {"theirs": "ValueError: not for this pair"}
    assert {name: len(runs) for name, runs in measured.runs.items()} == {"plain": 3, "ours": 3}
    with pytest.raises(ValueError, match="not for this pair"):
        measure(
            [PLAIN, OURS, THEIRS], empty_batches(3), FakeTimes(seconds, errors={("ours", 1): error})
        )


DRAFTS = Method("greedy, K = 4", "ours")
COPIES = Method("copies", "ours", {"prompt_lookup_num_tokens": 4})  # drafts cost nothing


def test_few_or_scattered_measurements_are_doubted():
    seconds = [1.2, 1.4, 1.2, 1.2, 1.2]
    runs = [
        Run(BATCH, at, duration, [[1] * 11], None, first_token_s=1.0)
        for at, duration in enumerate(seconds)
    ]
    few, scattered = reliability(runs[:2], 2, 2)["reasons"]
    assert "2 prompts, 2 repeats" in few
    assert "20 to 40 ms per token" in scattered
    assert reliability([*runs[2:], *runs[2:]], 1, 2)["is_reliable"]


def test_speedup_above_the_bound_is_noise():
    stats, texts = SpeculationStats(num_batch_rounds=10, num_longest=40), [[1] * 40]
    stats.rounds_by_draft_len[4] = 10
    for method, seconds, bound, is_noise in (
        (DRAFTS, 0.47, 2, False),
        (DRAFTS, 0.4, 2, True),
        (COPIES, 0.4, 4, False),
    ):
        run = Run(BATCH, 0, seconds, texts, stats)
        entry = method_entry(method, [run], [Run(BATCH, 0, 1.0, texts, None)], None, cost=0.25)
        assert (entry["speedup_bound"], entry["is_noise"]) == (bound, is_noise)


def runs_of(*texts):
    """Return one call on each batch, given the number of its text."""
    return [
        Run(batch, 0, 1.0, [[text]], None)
        for batch, text in zip(empty_batches(len(texts)), texts, strict=True)
    ]


def test_calls_count_if_all_exact_texts_are_equal():
    lossy = Method("lossy", "ours", is_lossy=True)
    methods = [PLAIN, OURS, THEIRS, lossy]
    runs = {
        "plain": runs_of(1, 1, 1),
        "ours": runs_of(1, 2, 1),
        "theirs": runs_of(1, 1, 3),
        "lossy": runs_of(9, 9, 9),
    }
    counted = of_equal_texts(runs, methods)
    assert {name: [run.batch.number for run in of_it] for name, of_it in counted.items()} == {
        name: [0] for name in runs
    }
    reasons = []
    assert counted_runs(runs, methods, reasons)[1].startswith("1 of 3 calls") and not reasons
    sampled = [replace(method, do_sample=True) for method in methods]
    assert of_equal_texts(runs, sampled) == runs


def test_calls_without_equal_texts_are_doubted():
    runs, reasons = {"plain": runs_of(1), "ours": runs_of(2)}, []
    counted, words = counted_runs(runs, [PLAIN, OURS], reasons)
    assert counted == runs and words.startswith("0 of 1 calls")
    assert "use --dtype float32" in reasons[0]
