"""`hf-speculate doctor` on simulated devices: what it says, what it writes, and that "auto" follows."""

import functools
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_speculate
from hf_speculate.options.verdicts.verdict import device_key, read_verdict, verdict_path
from hf_speculate.tools.cli import doctor
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.doctor.examination import examine, results_of
from hf_speculate.tools.doctor.isolation import Limits
from hf_speculate.tools.doctor.verdict_file import write_verdict
from hf_speculate.tools.doctor.worker import Seen
from tests.cases import assert_equal_ids, new_pair
from tests.support import simulated_doctor
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.gpu_rounds import on_gpu
from tests.support.simulated_doctor import GRAPHS, KERNELS, OTHER_KERNELS
from tests.support.tiny import ragged_prompts

# A busy machine with two cores runs kernels in Python.
LIMITS = Limits(start_s=200.0, check_s=100.0, device_s=400.0)


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def examined(what: str, **limits: float) -> Any:
    return examine(simulation=f"tests.support.simulated_doctor:{what}", limits=LIMITS._replace(**limits))


def results(report: Any) -> dict[str, str]:
    (device,) = report.devices
    return {seen.name: seen.result for seen in device.seen}


def decoded() -> Any:
    """The statistics of a call on the simulated device without settings."""
    target, draft = new_pair("llama", 0.1)
    for module in (*target.modules(), *draft.modules()):
        module._forward_pre_hooks.clear()  # those of the tests
    inputs, stats = ragged_prompts(1), hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=6)
    options = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant", "max_new_tokens": 6}
    with FakeCuda():
        target.to("cuda:0"), draft.to("cuda:0")
        ids = target.generate(**on_gpu(inputs), assistant_model=draft, **options, speculation_stats=stats)
        assert_equal_ids(plain, ids.to("cpu"))
    return stats


def test_where_all_is_right_graphs_and_kernels_run() -> None:
    report = examined("right")
    assert results(report) == dict.fromkeys(simulated_doctor.RIGHT, "right")
    assert (report.ok, report.advice) == (True, "")
    path = Path(report.devices[0].verdict_path)
    assert path.stat().st_mode & 0o777 == 0o600
    content = json.loads(path.read_text())
    assert content["results"] == results(report)
    assert content["key"]["name"] in str(report)
    assert "flash attention without a mask" in str(report)
    stats = decoded()
    assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
    assert "from graphs: target, draft" in stats.plan


@pytest.mark.fallback("torch in place of Triton")
@pytest.mark.parametrize(
    ("what", "limits", "seen", "detail", "setting", "graphs", "fallback"),
    [
        (
            "kernels_wrong",
            {},
            {KERNELS: "wrong", OTHER_KERNELS: "right"},
            "differ from the reference",
            'verifier_backend="torch" ("auto" does so from now on)',
            "off: run `hf-speculate doctor` once",
            "saw Triton kernels give wrong results",
        ),
        (
            "graphs_wrong",
            {},
            {GRAPHS: "wrong"},
            "it differs from the eager forward by",
            'speculation_graphs="off" ("auto" does so from now on)',
            "off: `hf-speculate doctor` saw graphs give wrong results",
            "",
        ),
        (
            "crashing",
            {},
            {GRAPHS: "crashed", KERNELS: "right"},
            "was ended by SIGSEGV: an illegal memory access was encountered",
            'speculation_graphs="off" ("auto" does so from now on)',
            "off: `hf-speculate doctor` saw graphs crash",
            "",
        ),
        (
            "hanging",
            {"check_s": 5.0},
            {GRAPHS: "crashed", KERNELS: "right"},
            "no answer in 5 s",
            'speculation_graphs="off" ("auto" does so from now on)',
            "off: `hf-speculate doctor` saw graphs crash",
            "",
        ),
    ],
)
def test_what_fails_is_named_and_left_out(
    what: str, limits: dict[str, float], seen: dict[str, str], detail: str, setting: str, graphs: str, fallback: str
) -> None:
    report = examined(what, **limits)
    assert results(report) == seen
    assert detail in report.devices[0].seen[0].detail
    assert (report.ok, report.advice) == (False, f"cuda:0: set {setting}")
    stats = decoded()
    assert f"from graphs: {graphs}" in stats.plan
    assert [fallback in reason for reason in stats.fallbacks] == [True] * bool(fallback)


def test_the_command_ends_with_what_to_set(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    simulation = "tests.support.simulated_doctor:graphs_wrong"
    monkeypatch.setattr(doctor, "examine", functools.partial(examine, simulation=simulation, limits=LIMITS))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == 'cuda:0: set speculation_graphs="off" ("auto" does so from now on)'
    assert lines[-2] == "0 right, 1 wrong, 0 crashed, 0 not run"


def test_on_a_cpu_the_command_checks_what_applies(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert main(["doctor", "--json", "--output", str(file)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(file.read_text())
    cpu = content["devices"][-1]
    assert (content["ok"], cpu["device"], cpu["verdict"]) == (True, "cpu", None)
    assert {check["name"].partition(":")[0] for check in cpu["checks"]} == {"attention", "texts"}


def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path("/sys") if os.geteuid() == 0 else tmp_path / "fixed"  # root may write to any ordinary folder
    if os.geteuid() != 0:
        folder.mkdir(mode=0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    report = examined("crashing")
    assert report.devices[0].verdict_path == ""
    assert report.advice == 'cuda:0: set speculation_graphs="off"'  # by hand, for "auto" knows nothing of it
    assert report._replace(devices=[report.devices[0]._replace(seen=[])]).advice.startswith(
        "cuda:0: set XDG_CACHE_HOME to a folder that can be written, and run this again: "
    )


def write_many(folder: str, key: dict[str, str], result: str) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    for _ in range(50):
        write_verdict(key, {f"graphs: {number}": result for number in range(200)})


def test_two_doctors_at_once_leave_a_whole_verdict(cache_folder: Path) -> None:
    with FakeCuda():
        key = device_key(DEVICE)
        context = multiprocessing.get_context("forkserver")
        arguments = [(str(cache_folder), key, result) for result in ("right", "wrong")]
        writers = [context.Process(target=write_many, args=process_arguments) for process_arguments in arguments]
        for writer in writers:
            writer.start()
        seen = list(_read_until_done(writers))
    assert all(writer.exitcode == 0 for writer in writers)
    assert seen and all(len(verdicts) == 200 and len(set(verdicts.values())) == 1 for verdicts in seen)
    assert [path.name for path in verdict_path(key).parent.iterdir()] == [verdict_path(key).name]


def _read_until_done(writers: list[Any]) -> Iterator[dict[str, str]]:
    is_running = True
    while is_running:
        is_running = any(writer.is_alive() for writer in writers)
        if verdict_path(device_key(DEVICE)).exists():
            verdict = read_verdict(DEVICE)
            assert verdict is not None
            yield dict(verdict.results)


def test_a_kind_that_was_not_run_to_its_end_is_not_said_to_be_right() -> None:
    seen = [Seen("graphs: a", "right"), Seen("graphs: b", "not run"), Seen("kernels: a", "right")]
    assert results_of(seen) == {"kernels: a": "right"}
    assert results_of([*seen, Seen("graphs: c", "wrong")]) == {"kernels: a": "right", "graphs: c": "wrong"}


@pytest.mark.slow
def test_every_check_runs_on_a_simulated_device() -> None:
    report = examined("everything_right")
    assert set(results(report).values()) == {"right"}
    groups = {name.partition(":")[0] for name in results(report)}
    assert groups == {"attention", "graphs", "texts", "kernels"}
