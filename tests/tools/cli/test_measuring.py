"""What users see while methods are timed, and after."""

import io
import re

import pytest
from rich.console import Console

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.measuring import Run, Step
from hf_speculate.tools.bench.methods import Method
from hf_speculate.tools.cli.measuring import progress


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
