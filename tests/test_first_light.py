"""First light: parts come in order and in their time, whatever one of them does, and a table says what to do."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The modules beside `on_gpu.py`, which import one another by name."""
    sys.path.insert(0, str(BENCHMARKS))
    names = ("first_light", "findings", "gpu_report", "gpu_parts", "gpu_speed", "gpu_tests", "instant_failures")
    yield SimpleNamespace(**{name: importlib.import_module(f"_{name}") for name in names})
    sys.path.remove(str(BENCHMARKS))


class Clock:
    """Time passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self) -> None:
        self.now += 1.0


class Script(NamedTuple):
    """What a process of a part does: cells that it attempts, and the seconds after which it ends."""

    seconds: float
    cells: tuple[str, ...] = ()
    is_finished: bool = True


HANGS = 1e9


class Stage:
    """Starts scripted processes, which write what they are told to write, and notes when they began and ended."""

    def __init__(self, folder: Path, scripts: dict[str, list[Script]]):
        self.folder, self.scripts, self.clock = folder, scripts, Clock()
        self.begun: list[tuple[str, float, float, bool]] = []  # part, its limit, when, whether resumed
        self.stopped: list[float] = []

    def start(self, part: Any, limit_s: float, is_resumed: bool) -> Any:
        script = self.scripts[part.name].pop(0)
        self.begun.append((part.name, limit_s, self.clock.now, is_resumed))
        path = self.folder / f"{part.name}.json"
        if script.cells:
            earlier = json.loads(path.read_text())["attempted"] if is_resumed else []
            content = {"is_finished": script.is_finished, "attempted": [*earlier, *script.cells]}
            path.write_text(json.dumps(content | {"checks": [], "left_out": []}))
        end = self.clock.now + script.seconds
        return SimpleNamespace(
            is_running=lambda: self.clock.now < end, stop=lambda: self.stopped.append(self.clock.now)
        )


@pytest.fixture
def staged(scripts: SimpleNamespace, tmp_path: Path) -> Callable[[dict[str, list[Script]]], tuple[Stage, list[str]]]:
    """Runs parts of 100 s each from their scripts; the stage, and the lines that were said."""

    def run(played: dict[str, list[Script]]) -> tuple[Stage, list[str]]:
        stage, said = Stage(tmp_path, played), []
        parts = [scripts.first_light.Part(name, 100.0) for name in played]
        scripts.first_light.run_parts(parts, tmp_path, stage.start, said.append, stage.clock, stage.clock.pause)
        return stage, said

    return run


def test_time_that_a_part_leaves_goes_to_the_next(staged: Any) -> None:
    stage, said = staged({"a": [Script(30, ("x",))], "b": [Script(50, ("x",))], "c": [Script(10, ("x",))]})
    assert stage.begun == [("a", 100, 0, False), ("b", 170, 30, False), ("c", 220, 80, False)]
    assert stage.stopped == [30, 80, 90]
    assert said == [
        "a: at most 100 s",
        "a: finished",
        "b: at most 170 s",
        "b: finished",
        "c: at most 220 s",
        "c: finished",
    ]


def test_a_part_that_hangs_is_stopped_and_takes_nothing_from_the_others(staged: Any, scripts: Any) -> None:
    stage, said = staged({"a": [Script(HANGS, ("x",), is_finished=False)], "b": [Script(20, ("x",))]})
    grace_s = scripts.first_light.GRACE_S
    assert stage.begun == [("a", 100, 0, False), ("b", 100 - grace_s, 100 + grace_s, False)]
    assert "a: stopped when its time was up" in said
    assert "b: finished" in said


def test_a_part_that_crashes_goes_on_behind_the_cell_that_it_crashed_in(staged: Any) -> None:
    first, second = Script(20, ("x", "y"), is_finished=False), Script(30, ("z",))
    stage, said = staged({"a": [first, second], "b": [Script(10, ("x",))]})
    assert stage.begun == [("a", 100, 0, False), ("a", 80, 20, True), ("b", 150, 50, False)]
    assert "a: its process ended in 'y'; the other cells follow" in said


@pytest.mark.parametrize(
    ("played", "outcome"),
    [
        ([Script(5)], "ended early, and would again"),  # nothing was written: an import fails
        ([Script(20, ("x",), False), Script(10, (), False)], "ended early, and would again"),
        ([Script(90, ("x",), False)], "ended early"),  # no time is left to begin again
    ],
)
def test_a_part_that_cannot_go_on_leaves_its_time_to_the_next(staged: Any, played: list[Script], outcome: str) -> None:
    end = sum(script.seconds for script in played)
    stage, said = staged({"a": list(played), "b": [Script(10, ("x",))]})
    assert stage.begun[-1] == ("b", 200 - end, end, False)
    assert f"a: {outcome}" in said


def test_the_summary_is_written_after_every_part(staged: Any, scripts: Any, tmp_path: Path) -> None:
    with pytest.raises(IndexError):  # no script for b
        staged({"a": [Script(10, ("x",))], "b": []})
    assert len((tmp_path / scripts.first_light.SUMMARY).read_text().splitlines()) == 1 + 10


def test_all_parts_take_six_minutes_at_most_and_few_files(scripts: Any) -> None:
    parts = scripts.first_light.PARTS
    longest_s = sum(part.limit_s for part in parts) + scripts.first_light.GRACE_S + 2 * scripts.first_light.STOP_S
    assert longest_s <= 360
    assert [part.name for part in parts] == list(scripts.gpu_parts.FIRST_LIGHT)
    files = [f"{part.name}.json" for part in parts] + [scripts.first_light.LOG, scripts.first_light.SUMMARY]
    assert len(files) < 8  # one is left for what is being written
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in files)


def test_chosen_parts_get_the_time_of_all_and_keep_their_order(scripts: Any) -> None:
    first_light = scripts.first_light
    assert first_light.chosen([], 1.0) == list(first_light.PARTS)
    parts = first_light.chosen(["rounds", "end_to_end"], 2.0)
    assert [part.name for part in parts] == ["end_to_end", "rounds"]
    assert sum(part.limit_s for part in parts) == pytest.approx(2.0 * sum(part.limit_s for part in first_light.PARTS))


def test_a_stopped_process_takes_along_what_it_started(scripts: Any, tmp_path: Path) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    log = tmp_path / "log"
    process = scripts.first_light.Child([sys.executable, "-c", code], {}, log)
    try:
        wait_for(lambda: log.read_text().endswith("\n"))
        state = Path("/proc", log.read_text().strip(), "stat")
        assert state.exists() and process.is_running()
    finally:
        process.stop()
    assert not process.is_running()
    wait_for(lambda: not state.exists() or state.read_text().split()[2] == "Z")


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def report(scripts: Any, tmp_path: Path) -> Callable[..., Any]:
    """Makes the report of a part with ten minutes; `watched` collects when a cell would end the process."""

    def make(**options: Any) -> Any:
        options = {"limit_s": 600.0, "clock": Clock(), "say": lambda line: None, **options}
        return scripts.gpu_report.Report(tmp_path / "part.json", {"part": "part"}, **options)

    return make


def test_a_cell_that_fails_is_a_failed_check_and_the_next_one_runs(report: Any, scripts: Any, tmp_path: Path) -> None:
    first, watched = report(watch=(watched := []).append), watched
    first.attempt("a", lambda: 1 / 0, limit_s=30.0)
    first.attempt("b", lambda: first.cell(what="b", value=2.0))
    written = scripts.gpu_report.read_part(tmp_path, "part")
    assert [check["name"] for check in written["checks"]] == ["a: runs"] and first.num_failed == 1
    assert "ZeroDivisionError" in written["checks"][0]["seen"]
    assert written["cells"] == [{"what": "b", "value": 2.0}] and not written["is_finished"]
    assert watched == [30.0, None, scripts.gpu_report.CELL_LIMIT_S, None]


def test_cells_begin_only_while_there_is_time_and_may_not_outlast_it(report: Any, scripts: Any) -> None:
    clock, watched, ran = Clock(), [], []
    light = report(clock=clock, watch=watched.append)
    for now in (0.0, 580.0, 600.0):
        clock.now = now
        light.attempt(f"at {now}", lambda: ran.append(clock.now))
    clock.now = 590.0
    light.attempt("needs more", lambda: ran.append(clock.now), needs_s=10.0)
    assert ran == [0.0, 580.0]
    assert watched == [scripts.gpu_report.CELL_LIMIT_S, None, 20.0, None]


def test_the_process_ends_when_the_device_cannot_go_on_and_the_next_one_does(report: Any, scripts: Any) -> None:
    light = report(recover=lambda: False)
    light.attempt("a", lambda: light.check("right", True, 1))
    with pytest.raises(SystemExit, match="after b"):
        light.attempt("b", lambda: 1 / 0)
    after, ran = report(is_resumed=True), []
    for cell in "abc":
        after.attempt(cell, lambda: ran.append(cell))  # noqa: B023
    assert ran == ["c"]
    assert after.num_failed == 1


def test_a_cell_in_which_a_process_died_is_a_failed_check(report: Any, scripts: Any, tmp_path: Path) -> None:
    class Died(BaseException): ...

    def die() -> None:
        raise Died

    light = report()
    with pytest.raises(Died):
        light.attempt("a", die)
    after = report(is_resumed=True)
    after.attempt("a", die)
    after.finish()
    written = scripts.gpu_report.read_part(tmp_path, "part")
    assert [(check["name"], check["is_right"]) for check in written["checks"]] == [("a: runs", False)]
    assert written["is_finished"]
    assert report().num_failed == 0  # a new run begins anew


HANGING = """
from pathlib import Path
import threading
from _gpu_report import Report, end_process_after
Report(Path("part.json"), {}, 600.0, watch=end_process_after).attempt("hangs", threading.Event().wait, limit_s=0.1)
"""


def test_a_cell_that_hangs_ends_its_process_and_says_where(scripts: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", HANGING]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "begins: hangs" in done.stdout and "in wait" in done.stderr
    assert scripts.gpu_report.read_part(tmp_path, "part")["attempted"] == ["hangs"]


def test_compiled_methods_come_when_all_else_is_measured(scripts: Any) -> None:
    speed, begun = scripts.gpu_speed, []
    device = SimpleNamespace(is_dry=False, large_pair=lambda: (None, None), peak_bytes=lambda: 0)
    attempt = lambda name, run, **limits: begun.append((name, "limit_s" in limits))  # noqa: E731
    speed.end_to_end(SimpleNamespace(attempt=attempt, cell=lambda **values: None, leave_out=print), device)
    names, are_limited = zip(*begun, strict=True)
    assert list(are_limited) == sorted(are_limited) and len(set(names)) == len(names)
    assert names[:3] == ("plain, B=1", "ours, eager, B=1", "ours, graphs, B=1")
    assert names[-4:] == tuple(
        f"{who}, compiled, B={num}" for num, who in [(1, "plain"), (1, "ours"), (8, "plain"), (8, "ours")]
    )


def contents(**changes: Any) -> dict[str, Any]:
    """What five parts wrote on a device where all is well; `changes` are rates, or names of checks that fail."""
    rates = {"plain": 40.0, "ours, eager": 50.0, "ours, graphs": 90.0, "transformers' assisted": 45.0}
    rates |= {"plain, compiled": 80.0, "ours, compiled": 85.0} | changes.get("rates", {})
    wrong = changes.get("wrong", ())
    names = ["greedy, V=97: the kernels agree", "attention, B=1, Q=6: close", "greedy, model, B=8: largest gap"]
    names += ["greedy, graphs, model, B=8: largest gap", "tests marked gpu: none fails", "greedy, model, B=1: launches"]
    checks = [{"name": name, "is_right": name not in wrong, "seen": 0} for name in names]
    speed = [
        {"method": method, "batch_size": size, "is_right": True, "tokens_per_s": [rate - 1, rate, rate + 9]}
        for method, rate in rates.items()
        for size in (1, 8)
    ]
    times = {"us": 8.0, "reference_us": None, "eager_us": 30.0, "reference_eager_us": 400.0} | changes.get("us", {})
    kernel = {"what": "kernel", "operation": "greedy", "batch_size": 8, **times}
    tests = {"what": "tests", "name": "tests marked gpu", "passed": 9, "failed": 0, "skipped": 0, "percent": 100}
    rounds = {"what": "rounds", "name": "greedy, model, B=1", "rounds": [[20, 0, 0], [22, 0, 0], [20, 0, 0]]}
    cells = {"kernels_and_texts": [tests], "end_to_end": speed, "rounds": [rounds], "kernel_times": [kernel]}
    return {
        part: {
            "environment": {"device": "some GPU", "versions": {"torch": "2.11.0"}, "commit": "abc"},
            "is_finished": True,
            "attempted": ["last"],
            "cells": measured,
            "checks": {"kernels_and_texts": checks[:-1], "rounds": checks[-1:]}.get(part, []),
            "left_out": [],
        }
        for part, measured in cells.items()
    }


FINE = (
    "kernels stay", "backends stays", "eager decoding is right", "may become the default", "nothing to mend",
    "auto stays on", "auto stays on", "go to the front page", "as designed", "kernels stay",
)  # fmt: skip


def test_ten_lines_say_what_was_found_and_what_it_decides(scripts: Any) -> None:
    lines = scripts.findings.findings(contents())
    assert len(lines) == 10
    for line, decides in zip(lines, FINE, strict=True):
        assert decides in line.decides
    assert "plain 40, eager 50 (1.25x), graphs 90 (2.25x)" in lines[5].measured
    assert "8.0 / 30 (? / 400)" in lines[9].measured
    assert "some GPU, torch 2.11.0, commit abc" in scripts.findings.summary(contents())


@pytest.mark.parametrize(
    ("number", "changes", "decides"),
    [
        (0, {"wrong": ["greedy, V=97: the kernels agree"]}, "the torch reference becomes the default"),
        (3, {"wrong": ["greedy, graphs, model, B=8: largest gap"]}, "graphs stay off"),
        (5, {"wrong": ["greedy, graphs, model, B=8: largest gap"]}, "auto -> off (not right)"),
        (4, {"wrong": ["tests marked gpu: none fails"]}, "mend what fails"),
        (6, {"rates": {"ours, graphs": 49.0}}, "auto -> off (not faster)"),
        (7, {"rates": {"plain, compiled": 95.0}}, "results only"),
        (8, {"wrong": ["greedy, model, B=1: launches"]}, "mend"),
        (9, {"us": {"eager_us": 500.0}}, "reference becomes the default of: greedy, B=8"),
    ],
)
def test_another_finding_decides_otherwise(scripts: Any, number: int, changes: Any, decides: str) -> None:
    lines, fine = scripts.findings.findings(contents(**changes)), scripts.findings.findings(contents())
    assert decides in lines[number].decides and decides not in fine[number].decides
    assert sum(line.decides != fine_line.decides for line, fine_line in zip(lines, fine, strict=True)) <= 3


@pytest.mark.parametrize("part", ["kernels_and_texts", "end_to_end", "rounds", "kernel_times"])
def test_what_a_part_has_not_answered_is_said_with_the_reason(scripts: Any, part: str) -> None:
    complete = contents()
    complete[part] |= {"cells": [], "checks": [], "is_finished": False}
    lines = scripts.findings.findings(complete)
    assert any("ended in last" in line.measured and "no answer" in line.decides for line in lines)
    del complete[part]
    lines = scripts.findings.findings(complete)
    assert any("wrote nothing" in line.measured and "no answer" in line.decides for line in lines)


def test_answers_of_a_part_that_was_ended_say_so(scripts: Any) -> None:
    complete = contents()
    for part in complete.values():
        part["is_finished"] = False
    ended = ["the part ended in last" in line.measured for line in scripts.findings.findings(complete)]
    assert ended == [True] * 4 + [False] * 4 + [True] * 2


def test_outcomes_of_tests_are_read_from_what_pytest_prints(scripts: Any) -> None:
    output = (
        "[gw0] [  1%] PASSED tests/a.py::test_a \n[gw1] [ 34%] FAILED tests/a.py::test_b[PASSED]\n"
        "[gw0] [ 67%] PASSED tests/b.py::test_c\nFAILED tests/a.py::test_b - assert PASSED\n"
    )
    assert scripts.gpu_tests.outcomes_in(output) == ({"PASSED": 2, "FAILED": 1}, 67)


def test_a_failed_test_is_printed_before_the_run_ends(scripts: Any) -> None:
    lines = []
    terminal = SimpleNamespace(write_line=lines.append)
    plugins = SimpleNamespace(get_plugin=lambda name: {"terminalreporter": terminal}[name])
    printer = scripts.instant_failures.InstantFailures(SimpleNamespace(pluginmanager=plugins))
    for is_failed in (False, True):
        report = SimpleNamespace(failed=is_failed, nodeid="test_a", longreprtext="E assert 1 == 2")
        printer.pytest_runtest_logreport(report)
    assert len(lines) == 1 and "test_a" in lines[0] and "assert 1 == 2" in lines[0]


def test_the_tests_marked_gpu_are_found_in_few_files(scripts: Any) -> None:
    files = scripts.gpu_tests.marked_gpu()[2:]
    assert "tests/generation/test_half_precision_on_gpu.py" in files
    assert "tests/generation/test_matrix.py" not in files
