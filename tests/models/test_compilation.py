"""What cannot be compiled runs eagerly, says why, and is tried again only where that can help."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.engine.model_state import model_state
from hf_speculate.models.compilation import Compilation, CompileSettings
from tests.tiny import make_model


def doubled(model: torch.nn.Module, values: Tensor) -> Tensor:
    return 2 * values


def compilation_of(model: Any, backend: str | Callable[..., Any]) -> tuple[Compilation, list[str]]:
    """A call's compilation of the model, and the reasons that it is told."""
    reasons: list[str] = []
    return Compilation(model, CompileSettings(backend), model_state(model).units, reasons.append), reasons


def run_until_the_limit(compilation: Compilation) -> list[Any]:
    """Results for three numbers of dimensions, of which torch compiles two."""
    with torch._dynamo.config.patch(recompile_limit=2):
        return [compilation.run("double", doubled, torch.ones((1,) * num)) for num in (1, 2, 3)]


def test_a_recompile_limit_holds_for_the_call_alone() -> None:
    model = make_model("llama", num_hidden_layers=1)
    first, reasons = compilation_of(model, "eager")
    results = run_until_the_limit(first)
    assert [result is None for result in results] == [False, False, True]
    assert len(reasons) == 1
    assert "recompile limit" in reasons[0]
    assert first.run("double", doubled, torch.ones(1)) is None  # the rest of the call runs eagerly
    later, reasons = compilation_of(model, "eager")
    assert torch.equal(later.run("double", doubled, torch.ones(1)), torch.tensor([2.0]))
    assert not reasons


def test_a_failure_of_the_backend_is_told_by_the_last_line_of_its_cause() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("lowering stopped\n\nno such instruction: fma7\n")

    model = make_model("llama", num_hidden_layers=1)
    compilation, reasons = compilation_of(model, fails)
    assert compilation.run("double", doubled, torch.ones(1)) is None
    assert reasons[0].endswith("which cannot be compiled: NotImplementedError: no such instruction: fma7")
    later, reasons = compilation_of(model, fails)
    assert not later.is_working
    assert reasons


def test_a_graph_break_is_told_by_its_first_line() -> None:
    def broken(model: torch.nn.Module, values: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return values

    compilation, reasons = compilation_of(make_model("llama", num_hidden_layers=1), "eager")
    assert compilation.run("broken", broken, torch.ones(1)) is None
    assert "graph_break" in reasons[0]


@pytest.mark.compiler
def test_inductor_names_what_stopped_it() -> None:
    def unknown(model: torch.nn.Module, values: Tensor) -> Tensor:
        return values + 1

    compilation, reasons = compilation_of(make_model("llama", num_hidden_layers=1), "inductor")
    with torch._inductor.config.patch(post_grad_custom_pre_pass=_refuse):
        assert compilation.run("unknown", unknown, torch.ones(3)) is None
    assert reasons[0].endswith("no such pass")


def _refuse(graph: torch.fx.Graph) -> None:
    raise RuntimeError("passes failed\nno such pass")
