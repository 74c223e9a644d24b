"""Test that `hf-speculate doctor` names faults of simulated devices and settings to change."""

import functools
import json
from typing import Any

import pytest
import torch

from hf_speculate.tools.cli import doctor
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.doctor.checks import Sizes
from hf_speculate.tools.doctor.report import Device, examine
from tests.support import simulated_doctor
from tests.support.fake_cuda import FakeCuda

# The interpreter of Triton 3.6 lacks the bfloat16 constants that rows at any address need.
SMALL = Sizes(97, 2, torch.float16, 32, 4, (2,))
# Allow for a busy machine that interprets kernels in Python on two cores.
examined = functools.partial(examine, sizes=SMALL, limit_s=200.0)


def fake(*checks: str) -> list[Device]:
    return [Device("cuda:0", "fake H200", {"capability": "9.0"}, checks)]


@pytest.mark.parametrize(
    ("check", "detail"),
    [
        ("graphs", "8 of 8 texts equal plain decoding"),
        pytest.param("kernels", "17 rounds agree with their references", marks=pytest.mark.slow),
    ],
)
def test_report_on_a_working_device_has_no_advice(check: str, detail: str) -> None:
    report = examined(fake(check), enter=FakeCuda)
    ((seen,),) = (device.seen for device in report.devices)
    assert (seen.result, report.ok, report.advice) == ("right", True, "")
    assert detail in str(report)
    assert "cuda:0: fake H200, capability 9.0" in str(report)


@pytest.mark.parametrize(
    ("enter", "check", "detail", "setting"),
    [
        (
            simulated_doctor.kernels_wrong,
            "kernels",
            "greedy differs from its reference in 2 numbers on ordinary rows",
            'verifier_backend="torch"',
        ),
        (
            simulated_doctor.graphs_wrong,
            "graphs",
            "a replay differs from the eager forward",
            'speculation_graphs="off"',
        ),
        (
            simulated_doctor.crashing,
            "graphs",
            "was ended by SIGSEGV: an illegal memory access was encountered",
            'speculation_graphs="off"',
        ),
    ],
)
def test_failing_check_is_named_with_its_setting(
    enter: Any, check: str, detail: str, setting: str
) -> None:
    report = examined(fake(check), enter=enter)
    (device,) = report.devices
    assert [seen.result for seen in device.seen] == ["wrong"]
    assert detail in device.seen[0].detail
    assert (report.ok, report.advice) == (False, f"cuda:0: set {setting}")


def test_command_ends_with_the_settings_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    never_ends = functools.partial(
        examined, fake("texts"), limit_s=3.0, enter=simulated_doctor.hanging
    )
    monkeypatch.setattr(doctor, "examine", never_ends)
    assert main(["doctor"]) == 1
    *_, check, _, advice = capsys.readouterr().out.strip().splitlines()
    assert "no answer in 3 s" in check
    assert advice == "cuda:0: set no assistant_model, and report it"


def test_command_on_a_cpu_checks_texts(capsys: Any) -> None:
    assert main(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    cpu = content["devices"][-1]
    assert (content["ok"], cpu["name"], content["versions"]["torch"]) == (
        True,
        "cpu",
        torch.__version__,
    )
    assert [(check["name"], check["result"]) for check in cpu["checks"]] == [("texts", "right")]
