"""Compare calls of one enabled model in two threads with the same calls on their own."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.models import attention_names
from tests.cases import new_pair
from tests.reliability.faults import Fault, FaultyProcessor, Mistake
from tests.support.compiled_calls import compile_config
from tests.support.tiny import cheaper_copy, ragged_prompts

SWITCH_S = 1e-5  # between threads; 500 times as often as with Python's default of 5 ms
TIMEOUT_S = 60.0
NUM_NEW = 9
ENDS = [17, 3, 40, 9]


@cache
def models():
    """Return a target with shared keys and values, whose config therefore changes, and a draft."""
    target, _ = new_pair(num_hidden_layers=1)
    return target, cheaper_copy(target)


STORE = hf_speculate.SuffixStore()
SAMPLES = {"do_sample": True, "num_assistant_tokens": 3}
ASSISTED: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": lambda: {"num_assistant_tokens": 4, "eos_token_id": ENDS},
    "greedy, adaptive": dict,
    "rejection": lambda: {**SAMPLES, "verifier": "rejection", "seed": 4, "top_k": 20},
    "block": lambda: {**SAMPLES, "verifier": "block", "seed": 5},
    "coupled": lambda: {**SAMPLES, "verifier": "coupled", "seed": [6, 7, 8]},
    "typical": lambda: {**SAMPLES, "verifier": "typical", "seed": 9},
    "copies too": lambda: {
        "num_assistant_tokens": 2,
        "prompt_lookup_num_tokens": 3,
        "suffix_store": STORE,
    },
    "static": lambda: {"num_assistant_tokens": 2, "cache_implementation": "static"},
    "compiled": lambda: {"num_assistant_tokens": 2, "compile_config": compile_config()},
    "own cache": lambda: {
        "num_assistant_tokens": 2,
        CACHE_NAME: DynamicCache(config=models()[0].config),
    },
    "lock step": lambda: {
        "stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]
    },
}


NAMES = [*ASSISTED, "plain"]


def settings():
    return [(model.config.to_dict(), model.generation_config.to_dict()) for model in models()]


def call(name: str, is_plain: bool = False) -> list[list[int]]:
    target, draft = models()
    draft_options = (
        {} if is_plain or name == "plain" else {"assistant_model": draft, **ASSISTED[name]()}
    )
    return target.generate(
        **ragged_prompts(3, seed=NAMES.index(name)), max_new_tokens=NUM_NEW, **draft_options
    ).tolist()


def together(*jobs: Callable[[threading.Barrier], Any]) -> list[Any]:
    """Run each job in a thread and return the results; jobs may wait for one another."""
    barrier = threading.Barrier(len(jobs), timeout=TIMEOUT_S)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [
                future.result(TIMEOUT_S) for future in [pool.submit(job, barrier) for job in jobs]
            ]
    finally:
        sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    # The threads are the first to compile.
    return {name: call(name, is_plain=name == "compiled") for name in NAMES}


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize(
    "shift",
    [0, *(pytest.param(shift, marks=pytest.mark.slow) for shift in range(4, len(NAMES), 4))],
)
def test_concurrent_calls_give_the_texts_of_calls_alone(shift, alone):
    before = settings()

    def walk(names):
        return lambda barrier: {name: (barrier.wait(), call(name))[1] for name in names}

    first, second = together(walk(NAMES), walk(NAMES[shift:] + NAMES[:shift]))
    assert first == second == alone
    assert (settings(), attention_names._HOLDERS) == (before, {})


@pytest.mark.fallback("lock step")
def test_failing_call_leaves_other_threads_alone(alone):
    target, draft = models()

    def fail(at):
        processors, inputs = [FaultyProcessor(Fault(at, Mistake("on purpose")))], ragged_prompts(3)
        with pytest.raises(Mistake) as caught:
            draft_options = {
                "assistant_model": draft,
                "num_assistant_tokens": 2,
                "logits_processor": processors,
            }
            target.generate(**inputs, max_new_tokens=NUM_NEW, **draft_options)
        return caught.value.__notes__

    texts, notes = together(
        lambda _: {name: call(name) for name in NAMES},
        lambda _: [fail(at) for at in range(1, NUM_NEW + 1)],
    )
    assert texts == alone
    assert [len(some) for some in notes] == [1] * NUM_NEW
    assert attention_names._HOLDERS == {}
