"""`speculation_graphs="auto"`: what `hf-speculate doctor` saw, then what a trial on the model itself shows."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.options.compiled import graph_plan
from hf_speculate.options.compiled.graphs import MIN_FREE_SHARE, CudaGraphs
from hf_speculate.options.verdicts.verdict import CODE, device_key, verdict_path
from hf_speculate.tools.doctor.verdict_file import write_verdict
from tests.cases import assert_equal_ids, new_pair
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.tiny import make_model, ragged_prompts
from tests.test_floors import ROOT

CPU = torch.device("cpu")
CONSTANT = {"num_assistant_tokens_schedule": "constant"}  # or times decide on lengths
UNKNOWN = "off: run `hf-speculate doctor` once on this device"


def decode(target: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Any]:
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 24, "num_assistant_tokens": 3, "speculation_graphs": "auto", **options}
    return target.generate(**inputs, **options, speculation_stats=stats), stats


def hookless_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target, draft = new_pair("llama", 0.1)
    for module in (*target.modules(), *draft.modules()):
        module._forward_pre_hooks.clear()  # those of the tests
    return target, draft


def of_another_owner(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a CUDA GPU")
    os.chown(path, 12345, 12345)


OTHER_VERSIONS = {"torch": "1.0"}
CHANGES: dict[str, Callable[[Path], object]] = {
    "another owner": of_another_owner,
    "others can write it": lambda path: path.chmod(0o620),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".moved"))),
    "no JSON": lambda path: path.write_text("{"),
    "another content": lambda path: path.write_text("[]"),
}


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ({"graphs: one row": "right", "kernels: greedy": "wrong"}, "target, draft"),
        ({"graphs: one row": "right", "graphs: rows": "wrong"}, "off: `hf-speculate doctor` saw graphs give wrong"),
        ({"graphs: one row": "crashed", "graphs: rows": "wrong"}, "off: `hf-speculate doctor` saw graphs crash"),
        ({"kernels: greedy": "right"}, UNKNOWN),
    ],
)
def test_graphs_run_where_all_of_them_were_right(backend: Any, results: dict[str, str], found: str) -> None:
    write_verdict(device_key(CPU), results)
    target, draft = hookless_pair()
    inputs = ragged_prompts(2)
    ids, stats = decode(target, inputs, assistant_model=draft)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert f"from graphs: {found}" in stats.plan
    assert bool(backend.num_captures) == (found == "target, draft") == bool(stats.graphed)
    assert stats.fallbacks == []


@pytest.mark.parametrize("change", [*CHANGES, "other versions"])
def test_a_verdict_that_cannot_be_trusted_or_is_of_other_versions_is_ignored(backend: Any, change: str) -> None:
    key = device_key(CPU)
    path = verdict_path(key)
    if change in CHANGES:
        CHANGES[change](path)
    else:
        path.unlink()
        write_verdict(key | OTHER_VERSIONS, {"graphs: one row": "right"})
    target, draft = hookless_pair()
    stats = decode(target, ragged_prompts(1), assistant_model=draft, max_new_tokens=4)[1]
    assert f"from graphs: {UNKNOWN}" in stats.plan
    assert (stats.graphed, backend.num_captures) == ([], 0)


def test_a_trial_ends_and_later_calls_replay_alone(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = hookless_pair()
    inputs, num_forwards = ragged_prompts(2), []
    layer = target.model.layers[0].mlp
    forward, counted = layer.forward, []
    monkeypatch.setattr(layer, "forward", lambda *args: counted.append(1) or forward(*args))  # a hook would show
    decode(target, inputs, assistant_model=draft, max_new_tokens=1)  # looks at the model first
    for _ in range(2):
        counted.clear()
        stats = decode(target, inputs, assistant_model=draft, **CONSTANT, eos_token_id=None)[1]
        assert stats.graphed == ["target", "draft"]
        num_forwards.append(len(counted))
    assert num_forwards == [1 + 1 + 1 + 3, 1]  # prompt, capture, comparison and what is timed; then the prompt alone


@pytest.mark.fallback("eager forwards")
@pytest.mark.parametrize(
    ("state", "reason", "num_captures"),
    [
        ({"is_wrong": True}, "cannot be captured: a replay differs from the eager forward", 2),  # remembered
        ({"replay_s": 2.0}, "whose graphs are not faster: 2e+03 ms against 2e+03 ms", 2),  # the graphs stay
        ({"has_memory": False}, "for whose graphs too little of the device's memory is free", 0),
    ],
)
def test_graphs_that_are_wrong_or_slow_on_this_model_are_left(
    backend: Any, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], reason: str, num_captures: int
) -> None:
    for name, value in state.items():
        monkeypatch.setattr(RecordedGraphs, name, value)
    target, draft = hookless_pair()
    inputs = ragged_prompts(2)
    for _ in range(2):
        ids, stats = decode(target, inputs, assistant_model=draft, max_new_tokens=40)
        assert_equal_ids(target.generate(**inputs, max_new_tokens=40), ids)
        assert stats.graphed == []
        assert [reason in fallback for fallback in stats.fallbacks] == [True, True]
        assert backend.num_captures == num_captures
    RecordedGraphs.is_wrong = False
    stats = decode(target, inputs, assistant_model=draft, speculation_graphs="on")[1]  # compares and times nothing
    assert bool(stats.graphed) != ("is_wrong" in state)


@pytest.mark.fallback("no graphs")
def test_without_a_setting_graphs_run_where_they_do_what_eager_forwards_do(
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
    assert stats.fallbacks == ['no graphs of the draft: its hooks would run in a capture only; "on" allows that']
    assert decode(target, inputs, **{**options, "speculation_graphs": "on"})[1].graphed == ["target", "draft"]
    monkeypatch.setattr(graph_plan, "memory_bytes", lambda device: 1 << 16)
    stats = decode(target, inputs, **options)[1]
    assert stats.graphed == []
    assert "of full length they may take" in stats.fallbacks[0]


@pytest.mark.fallback("no graphs")
@pytest.mark.parametrize("family", ["mamba", "gemma4"])  # a config without heads, one whose layers have several sizes
def test_without_a_setting_every_config_decodes(backend: Any, family: str) -> None:
    target = hf_speculate.enable(make_model(family))
    inputs, options = ragged_prompts(2, max_len=12), {"prompt_lookup_num_tokens": 3, "num_assistant_tokens": None}
    ids, stats = decode(target, inputs, **options, **CONSTANT)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert stats.num_drafted > 0


def test_the_devices_that_need_no_doctor_are_those_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA H200": (9, 0)}
    seen = set()
    for path in (ROOT / "benchmarks" / "results" / "first_light").glob("*/*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        versions = content["environment"]["versions"]
        families = (".".join(versions[name].split(".")[:2]) for name in ("torch", "triton"))
        if any("graphs" in check["name"] and check["is_right"] for check in content["checks"]):
            seen.add((capabilities[content["environment"]["device"]], *families))
    assert set(graph_plan.RUN_ON) == seen
    with FakeCuda():
        for torch_version, is_known in (("2.11.1+cu130", True), ("2.12.0", False)):
            versions = {"torch": torch_version, "triton": "3.6.0"}
            monkeypatch.setattr(graph_plan, "package_version", versions.__getitem__)
            assert graph_plan._was_run(DEVICE) is is_known


def test_a_verdict_is_about_code_that_is_there_and_about_a_device() -> None:
    assert [name for name in CODE if not (ROOT / "hf_speculate" / name).exists()] == []
    with FakeCuda():
        key = device_key(torch.device("cuda"))
    assert (key["name"], key["capability"], key["torch"]) == ("fake H200", "9.0", str(torch.__version__))
    assert len(key["code"]) == 24 and key != device_key(CPU)


def test_memory_that_torch_holds_unused_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda():
        graphs = CudaGraphs(DEVICE)
        assert graphs.timed(lambda: [1])[0] == [1]
        needed = int(MIN_FREE_SHARE * 1024)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 8, 1024))
        assert not graphs.has_room()
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8)
        assert graphs.has_room()
