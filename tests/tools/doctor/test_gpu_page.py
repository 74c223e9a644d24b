"""The measured table of docs/gpu.md holds figures of the committed results."""

import json
import re
from statistics import median

from tests.test_floors import ROOT


def test_every_figure_is_a_measured_one() -> None:
    measured: dict[str, set[tuple[str, ...]]] = {"H100": set(), "H200": set()}
    for path in (ROOT / "benchmarks" / "results" / "first_light").glob("*/end_to_end.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        (device,) = [name for name in measured if name in content["environment"]["device"]]
        for cell in content["cells"]:
            if cell["what"] == "end to end" and cell["is_right"]:
                figures = f"{median(cell['tokens_per_s']):.0f}", f"{cell['first_s']:.2f}"
                measured[device].add((cell["method"], str(cell["batch_size"]), *figures))
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "| method | rows | H100, tokens/s | first call, s | H200, tokens/s | first call, s |\n" in page
    cell = r" ([\d.]+|-) \|"
    lines = re.findall(rf"^\| (.+?) \| (\d+) \|{4 * cell}$", page, re.M)
    shown = {device: {(*line[:2], *line[at : at + 2]) for line in lines} for device, at in (("H100", 2), ("H200", 4))}
    assert len(lines) == 9
    for device, figures in shown.items():
        assert {line for line in figures if line[2:] != ("-", "-")} - measured[device] == set()
