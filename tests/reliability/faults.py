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
        self.fault, self.method = fault, method

    def put(self, value):
        if self.method == "put":
            self.fault.tick()

    def end(self):
        if self.method == "end":
            self.fault.tick()


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
    drafted = {"assistant_model": draft, "num_assistant_tokens": 2}
    copied = {
        "prompt_lookup_num_tokens": 2,
        "num_assistant_tokens_schedule": "constant",
    }  # else a first round may be plain
    match place:
        case "foreign processor":
            return ExitStack(), drafted | {"logits_processor": LogitsProcessorList([FaultyProcessor(fault)])}
        case "row-wise processor":
            return ExitStack(), drafted | {"logits_processor": LogitsProcessorList([RowWiseProcessor(fault)])}
        case "foreign criterion":
            return ExitStack(), drafted | {"stopping_criteria": StoppingCriteriaList([FaultyCriterion(fault)])}
        case "row-wise criterion":
            return ExitStack(), drafted | {"stopping_criteria": StoppingCriteriaList([RowWiseCriterion(fault)])}
        case "streamer put" | "streamer end":
            return ExitStack(), drafted | {"streamer": FaultyStreamer(fault, place.split()[1])}
        case "callback":
            return ExitStack(), drafted | {"speculation_callback": fault.tick}
        case "target forward":
            return hook(target, fault), drafted
        case "target layer":
            return hook(target.model.layers[1].self_attn, fault), drafted
        case "draft forward":
            return hook(draft, fault), drafted
        case "candidates":
            return ExitStack(), {"candidate_generator": FaultyCandidates(fault)}
        case "store reader" | "store add":
            return ExitStack(), copied | {"suffix_store": FaultyStore(fault, place.split()[1])}
        case "allocation":
            return patch(ragged_layer, "_zeros", fault), drafted
        case "handing back":
            return patch(PreallocatedKVCache, "_states", fault), drafted
    raise ValueError(f"no such place: {place}")
