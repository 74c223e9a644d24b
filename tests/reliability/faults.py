"""Define faults that raise a given error at their n-th call, and the places in a call for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_speculate


class Mistake(RuntimeError):
    """Error class of a user."""


class Halt(BaseException):
    """Error that `except Exception` does not catch."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "mistake": lambda: Mistake("on purpose", 7),
    "out of memory": lambda: torch.OutOfMemoryError("out of memory, on purpose"),
    "interrupt": lambda: KeyboardInterrupt("on purpose"),
    "halt": lambda: Halt("on purpose", [1, 2]),
    "stop iteration": lambda: StopIteration("on purpose"),
}


class Fault:
    """Fault that raises `error` at its n-th call, counted from 1."""

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


class FaultyCriterion(StoppingCriteria):
    def __init__(self, fault: Fault):
        self.fault = fault

    def __call__(self, input_ids, scores, **kwargs):
        self.fault.tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


RowWiseProcessor = hf_speculate.register_row_wise(type("RowWiseProcessor", (FaultyProcessor,), {}))
RowWiseCriterion = hf_speculate.register_row_wise(type("RowWiseCriterion", (FaultyCriterion,), {}))


class FaultyStreamer:
    def __init__(self, fault: Fault, method: str):
        self.put = self.end = lambda *_: None
        setattr(self, method, fault.tick)


def hook(module: torch.nn.Module, fault: Fault) -> AbstractContextManager:
    return module.register_forward_hook(fault.tick)


def put_in(
    place: str, fault: Fault, target: Any, draft: Any
) -> tuple[AbstractContextManager, dict[str, Any]]:
    """Return a context and options for a call, so that `fault` ticks at `place`."""
    layer = target.model.layers[1].self_attn
    hooked = {"target forward": target, "target layer": layer, "draft forward": draft}.get(place)
    options: dict[str, dict[str, Any]] = {
        "foreign processor": {"logits_processor": LogitsProcessorList([FaultyProcessor(fault)])},
        "row-wise processor": {"logits_processor": LogitsProcessorList([RowWiseProcessor(fault)])},
        "foreign criterion": {"stopping_criteria": StoppingCriteriaList([FaultyCriterion(fault)])},
        "row-wise criterion": {
            "stopping_criteria": StoppingCriteriaList([RowWiseCriterion(fault)])
        },
        "streamer put": {"streamer": FaultyStreamer(fault, "put")},
        "streamer end": {"streamer": FaultyStreamer(fault, "end")},
        "callback": {"speculation_callback": fault.tick},
    }
    drafts = {"assistant_model": draft, "num_assistant_tokens": 2}
    inside = nullcontext() if hooked is None else hook(hooked, fault)
    return inside, drafts | options.get(place, {})
