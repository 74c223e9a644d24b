"""The demo keeps to its time and prints what it measured, also after Ctrl-C."""

import argparse
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

ImportExample = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def demo(import_example: ImportExample) -> ModuleType:
    return import_example("demo")


class Keyboard:
    """Presses Ctrl-C after some forwards of the target."""

    def __init__(self, num_forwards: int) -> None:
        self.num_forwards = num_forwards

    def __call__(self, *_: Any) -> None:
        self.num_forwards -= 1
        if self.num_forwards == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("token_s", "num_rows"), [(0.001, 8), (0.034, 4), (10.0, 2)])
def test_a_slow_machine_decodes_fewer_rows_with_all_methods(demo: ModuleType, token_s: float, num_rows: int) -> None:
    timing = demo.Timing(prompt_s=9 * token_s, token_s=token_s)
    lines = demo.choose_methods(timing, 8, 32, budget_s=96, has_head=False)
    assert [line.batch_size for line in lines[-5:]] == [num_rows] * 5
    assert len(lines) == len(demo.choose_methods(demo.Timing(0, 0), 8, 32, budget_s=96, has_head=False))


@pytest.mark.parametrize("num_forwards", [1, 110])
def test_ctrl_c_prints_the_measured_methods(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], num_forwards: int
) -> None:
    args = argparse.Namespace(tiny=True, pair=None, prompts=2, prompts_file=None, num_assistant_tokens=5)
    loaded = demo.load(args)
    for one in loaded.pairs.values():
        one.target.register_forward_hook(Keyboard(num_forwards))
    status = demo.main(["--dtype", "float32", "--max-new-tokens", "4"], load=lambda args: loaded)
    printed = capsys.readouterr()
    assert status == 130
    assert printed.err.splitlines()[-1] == "demo: interrupted"
    assert "Traceback" not in printed.err
    assert ("transformers, assisted greedy" in printed.out) == (num_forwards > 1)


def test_methods_that_were_not_measured_are_left_out(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lines = demo.methods(2, has_head=False)
    tallies = {line: demo.Tally() for line in lines}
    for line, speeds in zip(lines, [[10.0, 10.0], [12.0], [15.0]], strict=False):
        tallies[line].tokens_per_s += speeds
    demo.print_table(tallies)
    demo.print_summary(tallies)
    printed = capsys.readouterr().out
    assert "1.50x (1.50, 1.50)" in printed
    assert "NOT RELIABLE: fewer than 3 passes" in printed
    assert "1 prompt: 1.50x plain decoding; transformers' assisted generation, 1.20x." in printed
    assert "row by row" not in printed
