"""Methods alternate, and what they are compared with is plain decoding at the same time."""

import pytest
import torch

from hf_speculate.tools.bench.measuring import Run, measure, ratios
from hf_speculate.tools.bench.methods import Method
from tests.tools.bench.fakes import FakeTimes, empty_batches

PLAIN, OURS, THEIRS = Method("plain", "plain"), Method("ours", "ours"), Method("theirs", "transformers")


def test_methods_take_turns_batch_by_batch_and_time():
    times = FakeTimes({"plain": 2.0, "ours": [1.0, 0.5], "theirs": 4.0})
    steps = []
    measured = measure(
        [PLAIN, OURS, THEIRS], empty_batches(2), times, repeats=2, clock=times.clock, on_step=steps.append
    )
    there, back = ["plain", "ours", "theirs"], ["theirs", "ours", "plain"]
    assert [name for name, _ in times.calls] == there + back + there + back
    assert [index for _, index in times.calls] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    assert [step.method.name for step in steps if step.run is None] == there
    assert [(step.method.name, step.run.batch) for step in steps if step.run is not None] == times.calls
    assert [run.seconds for run in measured.runs["ours"]] == [1.0, 0.5, 1.0, 0.5]
    assert [run.tokens_per_s for run in measured.runs["plain"]] == [5.0] * 4
    assert ratios(measured.runs["ours"], measured.runs["plain"]) == [2.0, 4.0, 2.0, 4.0]
    assert measured.left_out == {}


def test_a_text_counts_up_to_and_with_its_end():
    times = FakeTimes({"plain": 1.0}, {"plain": [5, 6, 7, 0, 0]}, frozenset({7, 9}))
    (run,) = measure([PLAIN], empty_batches(1), times, clock=times.clock).runs["plain"]
    assert run.texts == [[5, 6, 7]]
    assert run.num_tokens == run.tokens_per_s == 3


@pytest.mark.parametrize(("at", "num_kept"), [(0, 0), (3, 1), (5, 1), (6, 2)])
def test_an_interrupt_keeps_the_calls_that_plain_decoding_has_made_too(at, num_kept):
    # The second batch is decoded in the reverse order, so plain decoding comes last.
    times = FakeTimes({"plain": 1.0, "ours": 1.0, "theirs": 1.0}, interrupted_at=at)
    measured = measure([PLAIN, OURS, THEIRS], empty_batches(3), times, clock=times.clock)
    assert measured.is_interrupted
    expected = dict.fromkeys(("plain", "ours", "theirs"), num_kept) if num_kept else {}
    assert {name: len(runs) for name, runs in measured.runs.items()} == expected


def test_the_time_per_token_leaves_the_first_token_out():
    run = Run(0, 0, 5.0, [[1] * 11, [1] * 3], None, first_token_s=3.0)
    assert run.ms_per_token == 200.0
    assert run._replace(first_token_s=None).ms_per_token is None
    assert run._replace(texts=[[1]]).ms_per_token is None


class _Fails(FakeTimes):
    """One method raises from its second batch on."""

    def __init__(self, name):
        super().__init__({"plain": 1.0, "ours": 1.0, "theirs": 1.0})
        self.name = name

    def __call__(self, method, batch, seed, max_new_tokens=None):
        if method.name == self.name and batch.number == 1:
            raise ValueError("not for this pair\nand more")
        return super().__call__(method, batch, seed, max_new_tokens)


def test_what_transformers_cannot_do_is_left_out_with_the_reason():
    times = _Fails("theirs")
    measured = measure([PLAIN, OURS, THEIRS], empty_batches(3), times, clock=times.clock)
    assert measured.left_out == {"theirs": "ValueError: not for this pair"}
    assert {name: len(runs) for name, runs in measured.runs.items()} == {"plain": 3, "ours": 3}


def test_what_fails_of_ours_is_an_error():
    times = _Fails("ours")
    with pytest.raises(ValueError, match="not for this pair"):
        measure([PLAIN, OURS, THEIRS], empty_batches(3), times, clock=times.clock)


def test_every_method_is_warmed_up_first_and_the_global_generator_is_left_alone():
    seen = []

    class Seeds(FakeTimes):
        def __call__(self, method, batch, seed, max_new_tokens=None):
            torch.manual_seed(seed)
            seen.append((method.name, seed, max_new_tokens is not None))
            return super().__call__(method, batch, seed, max_new_tokens)

    before = torch.get_rng_state()
    times = Seeds({"plain": 1.0, "ours": 1.0})
    measure([PLAIN, OURS], empty_batches(2), times, seed=5, clock=times.clock)
    assert torch.equal(torch.get_rng_state(), before)
    assert [entry[2] for entry in seen] == [True] * 2 + [False] * 4
    assert {(name, seed) for name, seed, is_warm_up in seen if not is_warm_up} == {
        ("plain", 5),
        ("ours", 5),
        ("plain", 6),
        ("ours", 6),
    }
