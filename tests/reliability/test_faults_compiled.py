"""An error in a compiled round arrives as it is, gives the pooled buffers back, and the next call runs compiled."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import hf_speculate
from hf_speculate.engine.model_state import model_state
from hf_speculate.models import attention_switch
from tests.cases import assert_equal_ids, each_value
from tests.reliability.faults import ERRORS, Fault, put_in
from tests.tiny import make_model, noisy_copy, ragged_prompts

K = 2
PLACES = {  # a round runs the draft step K times, and the target's forward
    "draft": (1, "tokens were drafted, round 1"),
    "draft again": (7, "tokens were drafted, round 3"),
    "target": (3, "the target scored tokens, round 1"),
    "target again": (9, "the target scored tokens, round 3"),
}


class Ticking:
    """torch.compile's "eager" backend, with a fault before each run of a graph."""

    def __init__(self) -> None:
        self.fault: Fault | None = None

    def compile(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if self.fault is not None:
                self.fault.tick()
            return graph.forward(*args)

        return run


@cache
def compiled_pair():
    """Models and how they are compiled; shared, as compiling takes longer than all calls."""
    target = hf_speculate.enable(make_model("llama", num_hidden_layers=1))
    ticking = Ticking()
    config = CompileConfig(backend=ticking.compile, mode="default")
    config._compile_all_devices = True  # transformers compiles on a CPU only with this flag
    return target, noisy_copy(target), ticking, config


def pooled(model) -> list[int]:
    return model_state(model).buffers.addresses()


def run_after(error: BaseException, at: int, **options: Any) -> None:
    """A call that fails where `options` or the compiled graphs say, then a right one."""
    target, draft, ticking, config = compiled_pair()
    inputs = ragged_prompts(3, seed=3)
    own = {"assistant_model": draft, "num_assistant_tokens": K, "compile_config": config, "max_new_tokens": 12}
    plain = target.generate(**inputs, max_new_tokens=12)
    ticking.fault = None
    target.generate(**inputs, **own)
    before = [pooled(model) for model in (target, draft)]
    if not options:
        ticking.fault = Fault(at, error)
    with pytest.raises(type(error)) as caught:
        target.generate(**inputs, **own, **options)
    ticking.fault = None
    assert caught.value is error
    assert attention_switch._HOLDERS == {}
    assert [pooled(model) for model in (target, draft)] == before
    stats = hf_speculate.SpeculationStats()
    assert_equal_ids(plain, target.generate(**inputs, **own, speculation_stats=stats))
    assert (stats.compiled, stats.fallbacks) == (["target", "draft"], [])


@each_value(place=PLACES, name=ERRORS)
def test_an_error_in_a_compiled_forward(place, name):
    at, note = PLACES[place]
    error = ERRORS[name]()
    run_after(error, at)
    assert error.__notes__ == [f"hf_speculate: raised while {note}"]


@pytest.mark.parametrize("place", ["foreign processor", "row-wise criterion"])
def test_an_error_in_the_users_code_between_compiled_forwards(place):
    target, draft, _, _ = compiled_pair()
    error = ERRORS["mistake"]()
    _, options = put_in(place, Fault(5, error), target, draft)
    run_after(error, 0, **{name: options[name] for name in options if name.startswith(("logits", "stopping"))})
    assert len(error.__notes__) == 1


def test_buffers_that_cannot_be_allocated():
    target, draft, _, config = compiled_pair()
    inputs = ragged_prompts(3, seed=3)
    for model in (target, draft):
        model_state(model).buffers.clear()
    own = {"assistant_model": draft, "num_assistant_tokens": K, "compile_config": config, "max_new_tokens": 12}
    error = ERRORS["out of memory"]()
    inside, _ = put_in("allocation", Fault(2, error), target, draft)
    with inside, pytest.raises(torch.OutOfMemoryError) as caught:
        target.generate(**inputs, **own)
    assert caught.value is error
    assert error.__notes__ == ["hf_speculate: raised while the target read the prompt"]
    assert_equal_ids(target.generate(**inputs, max_new_tokens=12), target.generate(**inputs, **own))
