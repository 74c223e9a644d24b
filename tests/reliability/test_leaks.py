"""Test that memory does not grow with the number of short calls."""

import contextlib
import gc
import tracemalloc
from collections.abc import Callable
from statistics import linear_regression
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from tests.reliability.faults import Fault, FaultyCriterion, FaultyProcessor, Mistake
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

# Samples are taken after the same kinds of calls. A schedule keeps the newest 30 rounds of each
# size, which are complete after 400 calls.
NUM_CALLS, NUM_WARM, EVERY = 800, 440, 40
# One object leaked by one of the ten kinds of calls gives 0.1.
OBJECTS_A_CALL = 0.04
# Python's free lists grow for several hundred calls: by 200 bytes per call up to the 150th, by 45
# from the 100th to the 500th, by 3 after the 1000th. A tensor takes 72 bytes without its data.
TRACED_BYTES_A_CALL = 64.0
NEVER = 10**9  # no call reaches this fault


def slopes(run: Callable[[int], Any]) -> tuple[float, float]:
    """Return the traced bytes and objects that each call of `run` adds after the warm-up.

    `run` gets the number of the call.
    """
    counts, num_bytes, num_objects = range(NUM_WARM, NUM_CALLS, EVERY), [], []
    tracemalloc.start()
    for number in range(NUM_CALLS):
        run(number)
        if number in counts:
            # The lists contain only numbers: later samples would count one object per earlier
            # sample.
            gc.collect()
            num_bytes.append(tracemalloc.get_traced_memory()[0])
            num_objects.append(len(gc.get_objects()))
    tracemalloc.stop()
    return linear_regression(counts, num_bytes).slope, linear_regression(counts, num_objects).slope


def calls() -> Callable[[int], Any]:
    """Return a function that runs ten kinds of calls in turn, one of which fails."""
    target = hf_speculate.enable(make_model("llama", num_hidden_layers=1))
    draft, recurrent = noisy_copy(target), hf_speculate.enable(make_model("mamba2"))
    store = hf_speculate.SuffixStore(max_bytes=1 << 20)
    inputs = [ragged_prompts(batch_size, seed=batch_size) for batch_size in (1, 3)]
    samples = {"do_sample": True, "num_assistant_tokens": 2}
    calls: list[Callable[[int], dict[str, Any]]] = [
        lambda _: {"target": recurrent, "assistant_model": None, "prompt_lookup_num_tokens": 3},
        lambda _: {"num_assistant_tokens": 2, "speculation_cache": "preallocated"},
        lambda number: {**samples, "verifier": "rejection", "seed": number},
        lambda number: {**samples, "verifier": "block", "seed": number},
        lambda number: {
            **samples,
            "verifier": "coupled",
            "seed": number,
            "speculation_cache": "dynamic",
        },
        lambda _: {"verifier": "typical", "return_dict_in_generate": True, "output_scores": True},
        lambda _: {"assistant_model": None, "prompt_lookup_num_tokens": 3, "suffix_store": store},
        lambda _: {"num_assistant_tokens": 2, CACHE_NAME: DynamicCache(config=target.config)},
        lambda _: {"stopping_criteria": [FaultyCriterion(Fault(NEVER, Mistake()))]},
        lambda _: {"logits_processor": [FaultyProcessor(Fault(3, Mistake("on purpose")))]},
    ]
    # Take every sample after the same kinds of calls.
    assert EVERY % (len(calls) * len(inputs)) == 0

    def run(number: int) -> None:
        options = {"assistant_model": draft, **calls[number % len(calls)](number)}
        fails = (
            pytest.raises(Mistake) if "logits_processor" in options else contextlib.nullcontext()
        )
        with fails:
            options.pop("target", target).generate(
                **inputs[number // len(calls) % 2], max_new_tokens=4, **options
            )
        if number % EVERY == 0:
            store.reset()  # its bound is tested elsewhere

    return run


@pytest.mark.fallback("lock step", "because a draft model as large as its target")
@pytest.mark.slow
def test_memory_is_constant_over_hundreds_of_short_calls():
    leaked: list[Any] = []
    of_lists = slopes(lambda number: leaked.append([number]) if number % 10 == 0 else None)
    of_tensors = slopes(lambda _: leaked.append(torch.ones(1)))
    of_calls = slopes(calls())
    assert of_calls[0] < TRACED_BYTES_A_CALL < of_tensors[0]
    assert of_calls[1] < OBJECTS_A_CALL < min(of_lists[1], of_tensors[1])
