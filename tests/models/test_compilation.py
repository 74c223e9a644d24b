"""What cannot be compiled runs eagerly, says why, and is tried again in the next call."""

import torch
from torch import Tensor
from transformers import CompileConfig

from hf_speculate.engine.model_state import model_state
from hf_speculate.models.compilation import Compilation
from tests.tiny import make_model


def doubled(model: torch.nn.Module, values: Tensor) -> Tensor:
    return 2 * values


def test_a_recompile_limit_holds_for_the_call_alone() -> None:
    model, reasons = make_model("llama", num_hidden_layers=1), []

    def compilation() -> Compilation:
        return Compilation(model, CompileConfig(backend="eager", mode=None), model_state(model).units, reasons.append)

    first = compilation()
    with torch._dynamo.config.patch(recompile_limit=2):  # of three numbers of dimensions torch compiles two
        results = [first.run("double", doubled, torch.ones((1,) * num)) for num in (1, 2, 3)]
    assert [result is None for result in results] == [False, False, True]
    (reason,) = reasons
    assert "recompile limit" in reason
    assert first.run("double", doubled, torch.ones(1)) is None  # the rest of the call runs eagerly
    assert torch.equal(compilation().run("double", doubled, torch.ones(1)), torch.tensor([2.0]))
    assert reasons == [reason]
