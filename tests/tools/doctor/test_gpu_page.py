"""The measured table of docs/gpu.md holds figures of the committed results."""

import json
import re
from statistics import median

from tests.test_floors import ROOT


def test_every_figure_is_a_measured_one() -> None:
    measured = set()
    for path in (ROOT / "benchmarks" / "results" / "first_light").glob("*/end_to_end.json"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["what"] == "end to end" and cell["is_right"]:
                figures = f"{median(cell['tokens_per_s']):.0f}", f"{cell['first_s']:.2f}", f"{cell['peak_gb']:.2f}"
                measured.add((cell["method"], str(cell["batch_size"]), *figures))
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M))
    assert len(shown) == 9
    assert shown - measured == set()
