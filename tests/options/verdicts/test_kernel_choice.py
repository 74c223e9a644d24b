"""Triton kernels that `hf-speculate doctor` saw fail are left out, unless they are asked for by name."""

import logging
from pathlib import Path
from typing import Any

import pytest

import hf_speculate
from hf_speculate.options.verdicts.kernel_choice import _warn_once
from hf_speculate.options.verdicts.verdict import device_key
from hf_speculate.tools.doctor.verdict_file import write_verdict
from tests.cases import new_pair
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.gpu_rounds import on_gpu
from tests.support.tiny import ragged_prompts

RUNS = "runs them, though `hf-speculate doctor` saw Triton kernels crash on this device"
FALLBACK = "torch in place of Triton kernels, because `hf-speculate doctor` saw Triton kernels give wrong results"


@pytest.mark.fallback("torch in place of Triton")
@pytest.mark.parametrize(
    ("result", "backend", "runs_triton", "fallback", "warning"),
    [
        ("right", "auto", True, "", ""),
        ("wrong", "auto", False, FALLBACK, ""),
        ("crashed", "triton", True, "", RUNS),
    ],
)
def test_failed_kernels_run_by_name_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: Any,
    result: str,
    backend: str,
    runs_triton: bool,
    fallback: str,
    warning: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _warn_once.cache_clear()
    target, draft = new_pair("llama", 0.1)
    stats = hf_speculate.SpeculationStats()
    options: dict[str, Any] = {"speculation_graphs": "off", "num_assistant_tokens_schedule": "constant"}
    with FakeCuda() as gpu, caplog.at_level(logging.WARNING, "hf_speculate"):
        write_verdict(device_key(DEVICE), {"kernels: greedy": "right", "kernels: rejection": result})
        inputs = on_gpu(ragged_prompts(1))
        target.to("cuda:0").generate(
            **inputs,
            **options,
            assistant_model=draft.to("cuda:0"),
            verifier_backend=backend,
            max_new_tokens=6,
            speculation_stats=stats,
        )
        launches = set().union(*gpu.log.launches.values())
    assert any(name.startswith("triton") for name in launches) is runs_triton
    assert [fallback in reason for reason in stats.fallbacks] == [True] * bool(fallback)
    assert (warning in caplog.text) if warning else not caplog.text
