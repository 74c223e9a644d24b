"""Test that the tutorial's cells run and print the saved outputs."""

import re

from tests.notebook import TUTORIAL, execute, read


def shown(outputs):
    """Return the output of a cell without the numbers that may differ between machines."""
    texts = [
        "".join(output.get("text", output.get("data", {}).get("text/plain", [])))
        for output in outputs
    ]
    return [re.sub(r"\d+", "0", text) for text in texts], [
        sorted(output.get("data", {})) for output in outputs
    ]


def test_tutorial_runs_and_prints_the_saved_outputs(registry):
    notebook = read()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    executed = execute(notebook, TUTORIAL.parent)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell, outputs in zip(cells, executed, strict=True):
        (texts, types), (saved_texts, saved_types) = shown(outputs), shown(cell["outputs"])
        assert types == saved_types
        if "times" not in cell["metadata"].get("tags", []):
            assert texts == saved_texts, "out of date: run python -m tests.notebook"
    printed = "".join(
        text for outputs in executed for output in outputs for text in output.get("text", [])
    )
    assert printed.count("equal to plain decoding: True") == 3
    assert "image/png" in executed[-1][0]["data"]
    assert "traceback" not in TUTORIAL.read_text(encoding="utf-8").lower()
