"""Faults that raise one given error object at their n-th call, and where they can be put into a call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator

import hf_speculate
from hf_speculate.cache import ragged_layer
from hf_speculate.cache.preallocated import PreallocatedKVCache


class Mistake(RuntimeError):
    """An error of the user's own class."""


class Halt(BaseException):
    """An error that no `except Exception` sees."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "mistake": lambda: Mistake("on purpose", 7),
    "out of memory": lambda: torch.OutOfMemoryError("out of memory, on purpose"),
    "interrupt": lambda: KeyboardInterrupt("on purpose"),
    "halt": lambda: Halt("on purpose", [1, 2]),
    "stop iteration": lambda: StopIteration("on purpose"),
}


class Fault:
    """Raises `error` at its n-th call, counted from 1."""

    def __init__(self, at: int, error: BaseException):
        self.at, self.error, self.num_calls = at, error, 0

    def tick(self, *_: Any, **__: Any) -> None:
        self.num_calls += 1
        if self.num_calls == self.at:
            raise self.error


class FaultyProcessor(LogitsProcessor):
    def __init__(self, fault: Fault):
        self.fault = fault

    def __call__(self, input_ids, scores):
        self.fault.tick()
        return scores


class RowWiseProcessor(FaultyProcessor):
    """Declared to look at each row by itself."""


class FaultyCriterion(StoppingCriteria):
    def __init__(self, fault: Fault):
        self.fault = fault

    def __call__(self, input_ids, scores, **kwargs):
        self.fault.tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class RowWiseCriterion(FaultyCriterion):
    """Declared to look at each row by itself."""


hf_speculate.register_row_wise(RowWiseProcessor)
hf_speculate.register_row_wise(RowWiseCriterion)


class FaultyStreamer:
    def __init__(self, fault: Fault, method: str):
        self.put = self.end = lambda *_: None
        setattr(self, method, fault.tick)


class FaultyCandidates(CandidateGenerator):
    """Repeats the last token twice."""

    def __init__(self, fault: Fault):
        self.fault = fault

    def get_candidates(self, input_ids, **kwargs):
        self.fault.tick()
        return torch.cat([input_ids, input_ids[:, -1:], input_ids[:, -1:]], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        pass


class FaultyStore(hf_speculate.SuffixStore):
    def __init__(self, fault: Fault, method: str):
        super().__init__()
        self.fault, self.method = fault, method

    def add(self, token_ids):
        if self.method == "add":
            self.fault.tick()
        super().add(token_ids)

    def reader(self, max_match_len):
        if self.method == "reader":
            self.fault.tick()
        return super().reader(max_match_len)


@contextmanager
def hook(module: torch.nn.Module, fault: Fault):
    handle = module.register_forward_hook(fault.tick)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def patch(owner: object, name: str, fault: Fault):
    """Ticks before each call of a function of ours."""
    original = getattr(owner, name)

    def ticking(*args: Any, **kwargs: Any) -> Any:
        fault.tick()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(owner, name, ticking)
        yield


def put_in(place: str, fault: Fault, target: Any, draft: Any) -> tuple[AbstractContextManager, dict[str, Any]]:
    """What to run a call in, and its options, so that `fault` ticks at `place`."""
    inside: dict[str, Callable[[], AbstractContextManager]] = {
        "target forward": lambda: hook(target, fault),
        "target layer": lambda: hook(target.model.layers[1].self_attn, fault),
        "draft forward": lambda: hook(draft, fault),
        "allocation": lambda: patch(ragged_layer, "_zeros", fault),
        "handing back": lambda: patch(PreallocatedKVCache, "_states", fault),
    }
    schedule = {"prompt_lookup_num_tokens": 2, "num_assistant_tokens_schedule": "constant"}  # or round 1 may be plain
    given: dict[str, dict[str, Any]] = {
        "foreign processor": {"logits_processor": LogitsProcessorList([FaultyProcessor(fault)])},
        "row-wise processor": {"logits_processor": LogitsProcessorList([RowWiseProcessor(fault)])},
        "foreign criterion": {"stopping_criteria": StoppingCriteriaList([FaultyCriterion(fault)])},
        "row-wise criterion": {"stopping_criteria": StoppingCriteriaList([RowWiseCriterion(fault)])},
        "streamer put": {"streamer": FaultyStreamer(fault, "put")},
        "streamer end": {"streamer": FaultyStreamer(fault, "end")},
        "callback": {"speculation_callback": fault.tick},
        "candidates": {"candidate_generator": FaultyCandidates(fault)},
        "store reader": {**schedule, "suffix_store": FaultyStore(fault, "reader")},
        "store add": {**schedule, "suffix_store": FaultyStore(fault, "add")},
    }
    options = given.get(place, {})
    if not {"candidate_generator", "suffix_store"} & options.keys():
        options |= {"assistant_model": draft, "num_assistant_tokens": 2}
    return inside.get(place, ExitStack)(), options
