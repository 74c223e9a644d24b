"""Test `speculation_graphs="auto"`: a trial on the current model decides whether graphs run."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.options.compiled import graph_plan
from hf_speculate.options.compiled.graph_trial import GraphTrial, Run
from hf_speculate.options.compiled.graphs import MIN_FREE_SHARE, CudaGraphs
from tests.cases import assert_equal_ids, new_pair
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.flash import NAMES, flash_attention, set_flash
from tests.support.gpu_rounds import on_gpu
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.tiny import make_model, ragged_prompts

# otherwise, measured times would decide on lengths
CONSTANT = {"num_assistant_tokens_schedule": "constant"}
FAULT = "CUDA error: an illegal memory access was encountered"


def decode(
    target: PreTrainedModel, inputs: dict[str, Tensor], **options: Any
) -> tuple[Tensor, Any]:
    stats = hf_speculate.SpeculationStats()
    options = {
        "max_new_tokens": 24,
        "num_assistant_tokens": 3,
        "speculation_graphs": "auto",
        **options,
    }
    return target.generate(**inputs, **options, speculation_stats=stats), stats


def hookless_pair(family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    target, draft = new_pair(family, 0.1)
    for module in (*target.modules(), *draft.modules()):
        module._forward_pre_hooks.clear()  # the hooks installed by tests
    return target, draft


def test_a_trial_ends_and_later_calls_replay_alone(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = hookless_pair()
    inputs, num_forwards = ragged_prompts(2), []
    layer = target.model.layers[0].mlp
    forward, counted = layer.forward, []
    # a hook would be noticed
    monkeypatch.setattr(layer, "forward", lambda *args: counted.append(1) or forward(*args))
    decode(target, inputs, assistant_model=draft, max_new_tokens=1)  # inspects the model first
    for _ in range(2):
        counted.clear()
        stats = decode(target, inputs, assistant_model=draft, **CONSTANT, eos_token_id=None)[1]
        assert stats.graphed == ["target", "draft"]
        num_forwards.append(len(counted))
    # first prompt, capture, comparison and timing; then only the prompt
    assert num_forwards == [1 + 1 + 1 + 3, 1]


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_flash_attention_is_called_for_the_prompt_alone(backend: Any, family: str) -> None:
    target, draft = (set_flash(model, NAMES[0]) for model in hookless_pair(family))
    inputs, options = ragged_prompts(2), {"assistant_model": draft, **CONSTANT}
    with flash_attention() as calls:
        plain = target.generate(**inputs, max_new_tokens=24)
        calls.clear()
        for _ in range(2):
            ids, stats = decode(target, inputs, **options)
            assert_equal_ids(plain, ids)
            assert stats.graphed == ["target", "draft"]
    assert calls and all(call.num_query == call.num_keys for call in calls)


def test_replays_and_rival_are_timed_with_equal_steps() -> None:
    timed = list[Any]()

    class Clock:
        def timed(self, run: Run) -> tuple[list[Any], float]:
            timed.extend(run())
            return timed[-1:], 1.0

    trial = GraphTrial(Clock())
    for size in (3, 1) * 4:  # a draft in two parts; the first run of each graph is compared
        runs = [partial(list, [(kind, size)]) for kind in ("replay", "eager")]
        trial.run(size, *runs, num_steps=size, buffers=())
    assert timed == [(kind, size) for kind in ("replay", "eager", "replay") for size in (3, 1)]


@pytest.mark.fallback("eager forwards")
@pytest.mark.parametrize(
    ("state", "reason", "num_captures"),
    [
        # the verdict is remembered
        ({"is_wrong": True}, "cannot be captured: a replay differs from the eager forward", 2),
        # the graphs are kept
        ({"replay_s": 2.0}, "whose graphs are not faster: ", 2),
        ({"has_memory": False}, "for whose graphs too little of the device's memory is free", 0),
    ],
)
def test_graphs_that_are_wrong_or_slow_on_this_model_are_left(
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    state: dict[str, Any],
    reason: str,
    num_captures: int,
) -> None:
    for name, value in state.items():
        monkeypatch.setattr(RecordedGraphs, name, value)
    target, draft = hookless_pair()
    inputs = ragged_prompts(2)
    with caplog.at_level(logging.WARNING, logger="hf_speculate"):
        for _ in range(2):
            ids, stats = decode(target, inputs, assistant_model=draft, max_new_tokens=40)
            assert_equal_ids(target.generate(**inputs, max_new_tokens=40), ids)
            assert stats.graphed == []
            assert [reason in fallback for fallback in stats.fallbacks] == [True, True]
            assert backend.num_captures == num_captures
    messages = [record.message for record in caplog.records]
    # one message per model, or one in total if they are the same
    assert 1 <= len(messages) == len(set(messages)) <= 2
    RecordedGraphs.is_wrong = False
    # compares and times nothing
    stats = decode(target, inputs, assistant_model=draft, speculation_graphs="on")[1]
    assert bool(stats.graphed) != ("is_wrong" in state)


@pytest.mark.fallback("no graphs")
def test_graphs_run_by_default_where_they_equal_eager_forwards(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = hookless_pair()
    options: dict[str, Any] = {"assistant_model": draft}
    inputs, seen = ragged_prompts(2), []
    stats = decode(target, inputs, **options)[1]
    assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
    draft.register_forward_hook(lambda *_: seen.append(1))
    stats = decode(target, inputs, **options)[1]
    assert stats.graphed == ["target"] and len(seen) > stats.num_batch_rounds
    assert stats.fallbacks == [
        'no graphs of the draft: its hooks would run in a capture only; "on" allows that'
    ]
    assert decode(target, inputs, **{**options, "speculation_graphs": "on"})[1].graphed == [
        "target",
        "draft",
    ]
    monkeypatch.setattr(graph_plan, "memory_bytes", lambda device: 1 << 16)
    stats = decode(target, inputs, **options)[1]
    assert stats.graphed == []
    assert "of full length they may take" in stats.fallbacks[0]


@pytest.mark.fallback("no graphs")
# a config without heads, and one whose layers have several sizes
@pytest.mark.parametrize("family", ["mamba", "gemma4"])
def test_without_a_setting_every_config_decodes(backend: Any, family: str) -> None:
    target = hf_speculate.enable(make_model(family))
    inputs, options = (
        ragged_prompts(2, max_len=12),
        {"prompt_lookup_num_tokens": 3, "num_assistant_tokens": None},
    )
    ids, stats = decode(target, inputs, **options, **CONSTANT)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert stats.num_drafted > 0


@pytest.mark.fallback("eager forwards")
@pytest.mark.parametrize(
    ("error", "reason", "is_remembered"),
    [
        (RuntimeError(FAULT), f"cannot be replayed: {FAULT}", True),
        (torch.OutOfMemoryError(), "whose graphs cannot be compared in the device's memory", False),
    ],
)
def test_a_failed_replay_is_followed_by_eager_forwards(
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
    is_remembered: bool,
) -> None:
    target, draft = hookless_pair()
    inputs = ragged_prompts(2)
    decode(target, inputs, assistant_model=draft)  # the graphs were correct before they fail
    with monkeypatch.context() as patch:
        patch.setattr("tests.support.recorded_graphs.replay", raising(error))
        ids, stats = decode(target, inputs, assistant_model=draft)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert stats.graphed == []
    assert [reason in fallback for fallback in stats.fallbacks] == [True, True]
    assert bool(decode(target, inputs, assistant_model=draft)[1].graphed) is not is_remembered


def raising(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_an_error_of_the_device_names_the_setting_and_the_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_model("llama")
    hf_speculate.enable(target)
    monkeypatch.setattr(target.lm_head, "forward", raising(RuntimeError(FAULT)))
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        decode(target, ragged_prompts(1), prompt_lookup_num_tokens=2)
    assert 'speculation_graphs="off"' in caught.value.__notes__[-1]
    assert "hf-speculate doctor" in caught.value.__notes__[-1]


def test_graphs_run_on_a_cuda_device_without_a_setting() -> None:
    target, draft = hookless_pair()
    inputs = ragged_prompts(1)
    plain = target.generate(**inputs, max_new_tokens=6)
    with FakeCuda():
        target.to("cuda:0"), draft.to("cuda:0")
        options = {"num_assistant_tokens": 2, **CONSTANT, "max_new_tokens": 6}
        ids, stats = decode(target, on_gpu(inputs), assistant_model=draft, **options)
        assert_equal_ids(plain, ids.to("cpu"))
    assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
    assert "from graphs: target, draft" in stats.plan


def test_memory_that_torch_holds_unused_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda():
        graphs = CudaGraphs(DEVICE)
        assert graphs.timed(lambda: [1])[0] == [1]
        needed = int(MIN_FREE_SHARE * 1024)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 8, 1024))
        assert not graphs.has_room()
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8)
        assert graphs.has_room()
