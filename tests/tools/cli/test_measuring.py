"""What users see while methods are timed, and after."""

import io
import json
import re

import pytest
from rich.console import Console

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.measuring import Run, Step
from hf_speculate.tools.bench.methods import Method
from hf_speculate.tools.cli.console import write_json
from hf_speculate.tools.cli.measuring import progress, show, shown


@pytest.mark.parametrize("num_steps", [2, 3])
def test_the_bar_shows_tokens_per_second_and_acceptance_and_what_comes_after(num_steps):
    stats = SpeculationStats()
    stats.add_row(4, 3, 4)
    screen = io.StringIO()
    log = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with progress(log, num_steps) as on_step:
        on_step(Step(Method("plain, greedy", "plain"), Run(0, 0, 2.0, [[1] * 20], None)))
        on_step(Step(Method("greedy, K = 4", "ours"), Run(0, 0, 1.0, [[1] * 30], stats)))
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    last = drawn.splitlines()[-2 if not drawn.splitlines()[-1].strip() else -1]
    assert "greedy, K = 4" in last
    assert f"2/{num_steps}" in last
    assert "30 tokens/s, 75% accepted" in last
    assert ("; comparing outputs" in last) is (num_steps == 2)


def test_without_a_terminal_each_call_is_a_line(capsys):
    method = Method("plain, greedy", "plain")
    with progress(Console(stderr=True), 2) as on_step:
        on_step(Step(method, None))
        on_step(Step(method, Run(0, 0, 2.0, [[1] * 20], None)))
    assert capsys.readouterr() == ("", "1/2 warming up: plain, greedy\n2/2 plain, greedy 10 tokens/s\n")


def test_figures_stand_on_the_right_and_words_on_the_left(capsys):
    show(
        "title",
        ["method", "speed", "checked", "empty"],
        [["a", "2.00 (1.00-3.00)", "2 of 2 rows equal", "-"], ["b", "-", "lossy", "-"]],
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if line.strip(" ─")] == [
        "title",
        "method             speed  checked",
        "a       2.00 (1.00-3.00)  2 of 2 rows equal",
        "b                      -  lossy",
    ]


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (None, ".2f", "-"),
        (0.5, ".0%", "50%"),
        ({"min": 1.0, "median": 1.5, "max": 2.0}, ".1f", "1.5 (1.0-2.0)"),
    ],
)
def test_a_figure_as_text(value, form, text):
    assert shown(value, form) == text


def test_a_result_is_written_whole(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_json(path, {"not": object()})
    assert path.read_text() == "before"
    write_json(path, {"methods": []})
    assert json.loads(path.read_text()) == {"methods": []}
    assert list(tmp_path.iterdir()) == [path]
