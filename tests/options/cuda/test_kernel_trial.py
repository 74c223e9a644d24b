"""Test that `verifier_backend="auto"` compares the Triton kernels with their references."""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_speculate
from hf_speculate.options.cuda import kernel_trial
from tests.cases import assert_equal_ids, new_pair
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu_rounds import on_gpu
from tests.support.tiny import ragged_prompts

pytest.importorskip("triton", reason="the simulated device needs Triton")
SAMPLED = {"do_sample": True, "top_k": 1, "seed": 1}


@pytest.fixture(autouse=True)
def first_use() -> Iterator[None]:
    """Forget all comparisons before and after the test."""
    caches = kernel_trial._problem, kernel_trial._warn_once
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def decoded(num_calls: int, **options: Any) -> tuple[set[str], Any]:
    """Return the launches of calls on the simulated device, and the statistics of the last call.

    The texts must equal plain decoding.
    """
    target, draft = new_pair("llama", 0.1)
    inputs, launches = ragged_prompts(1), set[str]()
    plain = target.generate(**inputs, max_new_tokens=6)
    with FakeCuda() as gpu:
        target.to("cuda:0"), draft.to("cuda:0")
        for _ in range(num_calls):
            gpu.log.clear()
            stats = hf_speculate.SpeculationStats()
            settings: dict[str, Any] = {
                "speculation_graphs": "off",
                "num_assistant_tokens": 2,
                "max_new_tokens": 6,
            }
            arguments = {**on_gpu(inputs), **settings, **options, "speculation_stats": stats}
            ids = target.generate(**arguments, assistant_model=draft)
            assert_equal_ids(plain, ids.to("cpu"))
        launches.update(*gpu.log.launches.values())
    return launches, stats


def wrong(*args: Any) -> Any:
    verdict = importlib.import_module("hf_speculate.kernels.kernels.operations").greedy(*args)
    return verdict._replace(num_accepted=verdict.num_accepted + 1)


def broken(*_: Any) -> Any:
    raise ValueError("the compiler fails\nin line 7")


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError


@pytest.mark.fallback("torch in place of Triton")
@pytest.mark.parametrize(
    ("kernel", "backend", "reason", "runs_triton"),
    [
        (None, "auto", "", True),
        (wrong, "auto", "because greedy differs from its reference in 2 numbers on cuda:0", False),
        (broken, "auto", "because greedy raises ValueError: the compiler fails", False),
        (
            out_of_memory,
            "auto",
            "which cannot be compared with their reference in the device's memory",
            False,
        ),
    ],
)
def test_failing_kernels_are_left_out_and_reported_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    kernel: Any,
    backend: str,
    reason: str,
    runs_triton: bool,
) -> None:
    if kernel is not None:
        monkeypatch.setattr("hf_speculate.kernels.kernels.greedy", kernel)
    with caplog.at_level(logging.WARNING, "hf_speculate"):
        launches, stats = decoded(2, verifier_backend=backend)
    expected = [f"torch in place of Triton kernels, {reason}"] if reason else []
    assert stats.fallbacks == [record.message for record in caplog.records] == expected
    assert any(name.startswith("triton") for name in launches) is runs_triton


def test_operation_is_compared_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    num_different = kernel_trial.num_different
    monkeypatch.setattr(
        kernel_trial,
        "num_different",
        lambda name, *rest: compared.append(name) or num_different(name, *rest),
    )
    decoded(2, **SAMPLED)
    assert compared == [
        "point mass",
        "rejection with draft sums",
        "sample",
        "warp_logits",
        "warped draw",
    ]
    decoded(1, verifier_backend="torch")
    decoded(1)
    assert compared[5:] == ["greedy"]
