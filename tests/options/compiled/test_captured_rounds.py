"""Test that rounds scored and verified in a graph equal eager rounds with only a few launches."""

import gc
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.models.runner import CompiledUnits
from hf_speculate.options.compiled.fixed_tensors import Owner, fix
from hf_speculate.options.compiled.graphs import Graph, Graphing
from hf_speculate.types import DraftOut
from tests.cases import assert_equal_ids, new_pair, pair
from tests.options.compiled.test_graphs import CONSTANT, ENDS, decode
from tests.options.compiled.test_graphs_auto import hookless_pair
from tests.support.gpu_rounds import counted, on_gpu
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.tiny import make_model, ragged_prompts

SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 5}
WARPED = {**SAMPLED, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


def without_graphs(target: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    return decode(target, inputs, **options, speculation_graphs="off")[0]


@pytest.mark.parametrize(
    "options",
    [
        {**WARPED, "verifier": "block"},
        {**WARPED, "verifier": "typical", "typical_correction": "sample"},
        # rows end at different times, and the last drafts are cut
        {"max_new_tokens": 7, "eos_token_id": ENDS},
        {"assistant_model": None, "prompt_lookup_num_tokens": 4, **CONSTANT},
    ],
)
def test_verdicts_of_graphs_are_those_of_eager_rounds(
    backend: Any, options: dict[str, Any]
) -> None:
    target, draft = pair("llama")
    inputs, options = ragged_prompts(3, max_len=20), {"assistant_model": draft, **options}
    ids, stats = decode(target, inputs, **options)
    assert_equal_ids(without_graphs(target, inputs, **options), ids)
    assert "target" in stats.graphed and stats.fallbacks == []


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": ENDS},
        {**WARPED, "eos_token_id": ENDS},
        {**SAMPLED, "top_k": 0, "verifier": "coupled"},
        {"prompt_lookup_num_tokens": 4, "assistant_model": None, **CONSTANT},
    ],
)
def test_rows_advance_on_the_device_as_on_the_host(options: dict[str, Any]) -> None:
    target, draft = new_pair("llama", 0.1, dtype=torch.float32)
    inputs = ragged_prompts(4, seed=3, max_len=20)
    # Triton is slow here
    options = {"assistant_model": draft, "verifier_backend": "torch", **options}
    with counted(target, draft):
        eager = without_graphs(target, on_gpu(inputs), **options).to("cpu")
        ids, stats = decode(target, on_gpu(inputs), **options)
        assert_equal_ids(eager, ids.to("cpu"))
    assert "target" in stats.graphed and stats.fallbacks == []


class Refilled:
    """Drafter that samples from random logits, which it writes to the same memory every round."""

    def __init__(self, setup: Any):
        self.random, self.logits = torch.Generator().manual_seed(0), torch.empty(1, 3, 64)

    def draft(self, request: Any) -> DraftOut:
        self.logits.normal_(0, 2, generator=self.random)
        ids = self.logits.softmax(-1).view(3, -1).multinomial(1, generator=self.random).view(1, 3)
        num = request.num_draft_tokens
        logits = self.logits if num == 3 else self.logits[:, :num]
        return DraftOut(ids[:, :num], torch.full((1,), num, dtype=torch.int32), logits, None)

    def rows(self, indices: list[int]) -> None:
        pass


def test_logits_in_reused_memory_are_read_in_every_round(backend: Any) -> None:
    target, inputs = hookless_pair()[0], ragged_prompts(1, max_len=12)
    options: dict[str, Any] = {**SAMPLED, **CONSTANT, "top_k": 0, "drafter": Refilled}
    options |= {"num_assistant_tokens": 3, "eos_token_id": None}
    ids, stats = decode(target, inputs, **options)
    assert stats.graphed == ["target"]
    assert_equal_ids(without_graphs(target, inputs, **options), ids)


def test_graphs_read_fixed_tensors_in_place(backend: Any) -> None:
    model = make_model("llama")
    graphs = Graphing(model, CompiledUnits.of(model), pytest.fail, is_tried=False)
    graphs.bind(SimpleNamespace(graphs={}))  # type: ignore[arg-type]
    numbers, others = torch.zeros(3), torch.ones(3)
    owners = Owner(), Owner()
    fix(numbers, owners[0]), fix(others, owners[1])

    def doubled(values: Tensor) -> Tensor:
        result = graphs.run("double", lambda model, values: 2 * values, values)
        assert isinstance(result, Tensor)
        return result

    assert doubled(numbers).tolist() == [0.0] * 3
    numbers.fill_(4.0)
    assert doubled(numbers).tolist() == [8.0] * 3
    assert (backend.num_captures, backend.num_replays) == (1, 2)
    assert doubled(others).tolist() == [2.0] * 3  # another address needs another graph
    assert numbers.tolist() == [4.0] * 3


def test_graphs_that_read_a_dead_draft_model_are_dropped(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, graphs = backend.capture, list[ref[Any]]()

    def watched(graph_backend: Any, function: Any) -> Graph:
        graph: Graph = capture(graph_backend, function)
        graphs.append(ref(graph.replay))
        return graph

    monkeypatch.setattr(backend, "capture", watched)
    target, inputs = hookless_pair()[0], ragged_prompts(2, max_len=12)
    for _ in range(3):
        draft = hookless_pair()[1]
        decode(target, inputs, assistant_model=draft, eos_token_id=None, max_new_tokens=8)
        gc.collect()
    is_alive = [graph() is not None for graph in graphs]
    assert is_alive == [False] * (len(graphs) - 2) + [True] * 2


@pytest.mark.fallback("eager forwards")
def test_a_trial_compares_verdicts(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil_ids(outputs: Any) -> None:
        outputs[0].verdict.token_ids.add_(1)

    monkeypatch.setattr(RecordedGraphs, "is_wrong", True)
    monkeypatch.setattr("tests.support.recorded_graphs.spoil", spoil_ids)
    target, inputs = hookless_pair()[0], ragged_prompts(2)
    options = {"prompt_lookup_num_tokens": 3, "speculation_graphs": "auto", **CONSTANT}
    ids, stats = decode(target, inputs, **options)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    (reason,) = stats.fallbacks
    assert "a replay differs from the eager forward in" in reason and "tokens" in reason
