"""Test that graphs of compiled code run if compiling pays and the code is correct and faster.

A simulated compiler is used.
"""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, PreTrainedModel

import hf_speculate
from hf_speculate.models.runner import GRAPH_BACKENDS
from hf_speculate.options.compiled import code_graphs, graph_trial, language_model
from hf_speculate.options.compiled.code_graphs import (
    CodeGraphing,
    CodeTimes,
    Pace,
    is_worth_compiling,
)
from hf_speculate.options.compiled.compilation import compiled
from hf_speculate.options.compiled.graphs import Graph
from hf_speculate.options.compiled.language_model import States
from tests.cases import assert_equal_ids
from tests.options.compiled.test_graphs_auto import hookless_pair, raising
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.tiny import ragged_prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
BOTH = ["target", "draft"]


@pytest.fixture
def quick_compiler(backend: type[RecordedGraphs], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make compiling free and trials short; return a list that gets an entry per compilation."""
    monkeypatch.setattr(code_graphs, "START_S", 0.0)
    monkeypatch.setattr(code_graphs, "LAYER_S", 0.0)
    monkeypatch.setattr(graph_trial, "NUM_TIMED", 1)
    compilations, compile_it = list[int](), backend.compile
    monkeypatch.setattr(
        backend,
        "compile",
        lambda *args: (
            compilations.append(1)  # type: ignore[func-returns-value]
            or compile_it(*args)
        ),
    )
    return compilations


def decode(
    target: PreTrainedModel, draft: PreTrainedModel, batch_size: int = 2, **options: Any
) -> Any:
    """Return the statistics of a call; assert that its text equals plain decoding."""
    inputs, stats = ragged_prompts(batch_size), hf_speculate.SpeculationStats()
    options = {**OPTIONS, "num_assistant_tokens": 3, **options}
    ids = target.generate(
        **inputs,
        **options,
        assistant_model=draft,
        num_assistant_tokens_schedule="constant",
        speculation_stats=stats,
    )
    options.pop("num_assistant_tokens")
    assert_equal_ids(target.generate(**inputs, **options), ids)
    return stats


def test_faster_code_is_compiled_once_and_serves_later_calls(
    backend: Any, quick_compiler: list[int]
) -> None:
    target, draft = hookless_pair()
    first = decode(target, draft)
    assert (first.graphed, first.compiled, first.fallbacks) == (BOTH, BOTH, [])
    assert "from graphs: target, draft;" in first.plan
    backend.num_captures = backend.num_replays = backend.num_code_replays = 0
    second = decode(target, draft)
    assert (second.graphed, second.compiled, backend.num_captures) == (BOTH, BOTH, 0)
    assert "from graphs: target (compiled), draft (compiled);" in second.plan
    assert backend.num_code_replays == backend.num_replays > 0
    # Other buffers need a separate trial. The target has one more graph, because it reads the
    # outputs of both draft graphs in place.
    third = decode(target, draft, batch_size=3)
    assert (third.compiled, backend.num_captures, len(quick_compiler)) == (BOTH, 5, 2)


def test_a_check_of_the_code_leaves_the_states(
    quick_compiler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft may be split, so its first steps may have written states before the check."""
    prepare, checks = CodeGraphing.prepare, []

    def watched(graphs: CodeGraphing, kv_cache: Any, args: tuple[Any, ...], rest_s: float) -> bool:
        states = next(argument for argument in args if isinstance(argument, States))
        before = [buffer.clone() for buffer in tree_leaves(states)]
        is_ready = prepare(graphs, kv_cache, args, rest_s)
        checks.append(is_ready)
        assert all(map(torch.equal, before, tree_leaves(states)))
        return is_ready

    monkeypatch.setattr(CodeGraphing, "prepare", watched)
    decode(*hookless_pair())
    assert any(checks)


def test_sampled_text_of_code_equals_that_of_eager_rounds(
    backend: Any, quick_compiler: list[int]
) -> None:
    target, draft = hookless_pair()
    options: dict[str, Any] = {**OPTIONS, "do_sample": True, "top_p": 0.9, "seed": 3}
    options |= {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    inputs, stats = ragged_prompts(2), hf_speculate.SpeculationStats()
    eager = target.generate(**inputs, **options, assistant_model=draft, speculation_graphs="off")
    for _ in range(2):
        ids = target.generate(**inputs, **options, assistant_model=draft, speculation_stats=stats)
        assert_equal_ids(eager, ids)
    assert stats.compiled == BOTH


def test_wider_graphs_of_code_in_use_are_captured_alone(
    backend: Any, quick_compiler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "MIN_WIDTH", 64)
    (target, _), stats, captures = hookless_pair(), hf_speculate.SpeculationStats(), []
    own = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    own |= {"speculation_callback": lambda _: captures.append(backend.num_captures)}
    target.generate(
        **ragged_prompts(2), **own, max_new_tokens=60, eos_token_id=None, speculation_stats=stats
    )
    assert (stats.compiled, stats.fallbacks) == (["target"], [])
    # after the trial, no graph of the model as loaded is captured beside that of the code
    assert {after - before for before, after in pairwise(captures[10:])} == {0, 1}


@pytest.mark.fallback("in place of its compiled code", "eager forwards")
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"code_s": 1.5}, "whose graphs are not faster: "),
        ({"is_code_wrong": True}, "cannot be used: it differs from the eager forward by"),
        ({"compile": raising(torch.OutOfMemoryError())}, "compiled in the device's memory"),
        ({"compile": lambda *_: raising(RuntimeError("graph break"))}, "compiled: graph break"),
    ],
)
def test_slow_wrong_or_failing_code_leaves_graphs_as_loaded(
    backend: Any,
    quick_compiler: list[int],
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, Any],
    reason: str,
) -> None:
    for name, value in state.items():
        monkeypatch.setattr(RecordedGraphs, name, value)
    target, draft = hookless_pair()
    for _ in range(2):
        stats = decode(target, draft)
        assert (stats.graphed, stats.compiled) == (BOTH, [])
        assert [reason in fallback for fallback in stats.fallbacks] == [True, True]
    assert ("(compiled)" in stats.plan) == ("code_s" in state)
    if "code_s" in state:
        assert 0 < backend.num_code_replays < 20  # the later call reused the measured times


@pytest.mark.fallback("eager forwards")
def test_fast_code_runs_although_graphs_as_loaded_are_slow(
    backend: Any, quick_compiler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "replay_s", 2.0)
    stats = decode(*hookless_pair())
    assert (stats.graphed, stats.compiled) == (BOTH, BOTH)
    assert all("whose graphs are not faster" in fallback for fallback in stats.fallbacks)


def test_a_call_shorter_than_compiling_compiles_nothing(
    backend: Any, quick_compiler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_graphs, "LAYER_S", 30.0)
    pair = hookless_pair()
    CodeTimes.of(pair[0]).decoded_s = 1e6  # as if spent in earlier, long calls
    stats = decode(*pair)
    assert (stats.graphed, stats.compiled, quick_compiler) == (BOTH, [], [])


def test_a_call_waits_for_no_compilation_of_another_thread(
    backend: Any, quick_compiler: list[int]
) -> None:
    pair = hookless_pair()
    with CodeTimes.of(pair[0]).is_compiling:
        assert (decode(*pair).compiled, len(quick_compiler)) == (["draft"], 1)
    assert (decode(*pair).compiled, len(quick_compiler)) == (BOTH, 2)


class CalledGraphs(RecordedGraphs):
    """Graphs that call functions again instead of replaying operators, and compile with dynamo."""

    def capture(self, function: Callable[[], Any]) -> Graph:
        outputs = function()

        def again() -> None:
            pairs = zip(tree_leaves(outputs), tree_leaves(function()), strict=True)
            for output, value in pairs:
                if isinstance(output, Tensor):
                    output.copy_(value)

        return Graph(outputs, again)

    def timed(self, run: Callable[[], list[Any]]) -> tuple[list[Any], float]:
        CalledGraphs.spent_s += 1.0  # the rival runs second
        return run(), CalledGraphs.spent_s

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return compiled(function, CompileConfig(backend="eager", mode="default"))


@pytest.mark.slow
def test_model_is_compiled_once_for_all_batches_and_lengths(
    quick_compiler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{CalledGraphs.__module__}:{CalledGraphs.__qualname__}"
    monkeypatch.setitem(GRAPH_BACKENDS, "cpu", name)
    monkeypatch.setattr(CodeTimes, "estimate_s", lambda *_: 0.0)
    target, draft = hookless_pair()
    torch._dynamo.reset()
    counters.clear()
    num_graphs = []
    for batch_size, options in (
        (2, {}),
        (3, {"num_assistant_tokens": 5, "max_new_tokens": 300}),
        (1, {}),
        (1, {"num_assistant_tokens": 5, "max_new_tokens": 300}),
    ):
        assert decode(target, draft, batch_size, **options).compiled == BOTH
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs == [2, 2, 4, 4]


def test_rest_of_a_call_is_estimated_from_typical_rounds() -> None:
    layout, times = SimpleNamespace(num_columns=100, max_columns=400), CodeTimes()
    pace: Any = Pace(SimpleNamespace(layout=layout), times)  # type: ignore[arg-type]
    assert pace.rest_s == 0.0
    for now_s in (0.0, 1.0, 2.0, 3.0, 43.0, 44.0):  # the other model was compiled meanwhile
        assert (pace.rest_s > 0.0) == (now_s > 43.0)
        pace.tick(now_s)
        pace.tick(now_s + 0.25)  # the second part of a split draft
        layout.num_columns += 4
    assert (layout.num_columns, pace.rest_s) == (124, 5 * 276 / 24)
    assert times.decoded_s == 4 * 1.0 + 2.0


def test_compiling_pays_after_long_calls_with_a_long_rest() -> None:
    assert is_worth_compiling(compile_s=50.0, decoded_s=51.0, rest_s=60.0)
    assert not is_worth_compiling(compile_s=50.0, decoded_s=1e6, rest_s=49.0)
    assert not is_worth_compiling(compile_s=50.0, decoded_s=49.0, rest_s=1e6)
