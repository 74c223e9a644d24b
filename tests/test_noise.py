"""Test that the README's example and the commands print no lines from other packages."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET, DRAFT = "examples/pair/target", "examples/pair/draft"
# torchao logs when transformers imports it. Only contributors install torchao, so it is hidden
# here.
AS_INSTALLED = "import sys; sys.modules['torchao'] = None\n"
# transformers prints these lines while it loads a model, which takes minutes for large models.
BAR = re.compile(r"^Loading weights: +\d+%.*it/s\]$")


def lines_of_errors(code: str) -> tuple[str, list[str]]:
    """Return the standard output and the lines of standard error of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout, [
        line for line in done.stderr.split("\n") if line and not BAR.match(line.split("\r")[-1])
    ]


def test_readme_example_prints_texts_and_statistics_only():
    code = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
    )[1]
    code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", TARGET).replace(
        "tokens=64", "tokens=16"
    )
    out, errors = lines_of_errors(AS_INSTALLED + code)
    assert errors == []
    assert out.startswith("def area_of_square(")
    assert "\nmean acceptance length: " in out.split("\n\n")[-1]


def test_commands_print_nothing_of_other_packages():
    pair = [TARGET, "--draft", DRAFT]
    commands = (
        ["--help"],
        ["generate", "--help"],
        ["generate", *pair, "def f():", "-n", "8"],
        ["check", *pair],
    )
    out, errors = lines_of_errors(
        "from hf_speculate.tools.cli.main import main\nassert [main(words) for words in "
        f"{commands!r}] == [0] * 4"
    )
    assert len(errors) == 1, errors
    assert re.fullmatch(r"8 tokens in .* accepted", errors[0])
    assert "Usage: hf-speculate generate" in out
