"""Compare tables and plots on the pages with the committed results.

python benchmarks/check_results.py

The script renders each of them from the JSON and prints the outdated ones, each with the command to
update it. The exit status is 1 if any is outdated. The script then lists results measured with
library code that differs from the working tree; comments and docstrings do not count as code.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from statistics import median

import readme_tables
import results_page
import speed_plot
from _harness import RESULTS, ROOT, read_results, source_hash

from training.pair import report  # on the path since real_models.py was imported

PAIR = ROOT / "examples" / "pair"


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def results_page_problems() -> Iterator[str]:
    for path, content in results_page.pages(RESULTS).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            yield f"{path.relative_to(ROOT)}: run python benchmarks/results_page.py"


def picture_problems() -> Iterator[str]:
    results = read_results("ten_tasks")
    layouts, themes = speed_plot.LAYOUTS.items(), speed_plot.THEMES.items()
    for (prefix, layout), (name, theme) in itertools.product(layouts, themes):
        path = f"docs/pictures/speed-{prefix}{name}.svg"
        if read(path) != speed_plot.picture(results, theme, layout):
            yield f"{path}: run python benchmarks/speed_plot.py"


def table_problems() -> Iterator[str]:
    parts = readme_tables.parts()
    for page, names in readme_tables.PAGES.items():
        for name in names:
            shown = re.findall(
                rf"<!-- {name}: begin -->\n(.*?)\n<!-- {name}: end -->", read(page), re.S
            )
            if shown != [parts[name]]:
                yield f"{page}, {name}: run python benchmarks/readme_tables.py"


def gpu_page_problems() -> Iterator[str]:
    """Find lines in the table for two GPUs that no result of first light contains."""
    measured: dict[str, set[tuple[str, ...]]] = {"H100": set(), "H200": set()}
    for path in (RESULTS / "first_light").glob("*/end_to_end.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        (device,) = [name for name in measured if name in content["environment"]["device"]]
        for cell in content["cells"]:
            if cell["what"] == "end to end" and cell["is_right"]:
                figures = f"{median(cell['tokens_per_s']):.0f}", f"{cell['first_s']:.2f}"
                measured[device].add((cell["method"], str(cell["batch_size"]), *figures))
    cell = r" ([\d.]+|-) \|"
    lines = re.findall(rf"^\| (.+?) \| (\d+) \|{4 * cell}$", read("docs/gpu.md"), re.M)
    if not lines:
        yield "docs/gpu.md: there is no table of tokens per second"
    for line in lines:
        for device, figures in (("H100", line[2:4]), ("H200", line[4:6])):
            if figures != ("-", "-") and (*line[:2], *figures) not in measured[device]:
                place = f"docs/gpu.md, {line[0]}, {line[1]} rows, {device}"
                yield f"{place}: no result has {' and '.join(figures)}"


def pair_problems() -> Iterator[str]:
    """Compare the page about the bundled pair with its measurements."""
    measurements = json.loads((PAIR / "measurements.json").read_text(encoding="utf-8"))
    pair = measurements["pair"]
    command = "run cd examples && python -m training.train_pair --stage measure"
    if (PAIR / "README.md").read_text(encoding="utf-8") != report.render(measurements):
        yield f"examples/pair/README.md: {command}"
    if (
        json.loads(json.dumps(report.pair_bounds(pair["acceptance"], pair["timings"])))
        != pair["bounds"]
    ):
        yield f"examples/pair/measurements.json, bounds: {command}"


def changed_results() -> list[str]:
    """Return results measured with other code of the library, or without a record of the code."""
    changed = []
    for path in sorted(RESULTS.glob("*.json")):
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        parts = environment.get("parts")
        if parts is None or environment["sources"] != source_hash(parts):
            changed.append(path.stem)
    return changed


def main() -> int:
    checks = (
        results_page_problems,
        picture_problems,
        table_problems,
        gpu_page_problems,
        pair_problems,
    )
    problems = [problem for check in checks for problem in check()]
    print("\n".join(problems) if problems else "Tables and pictures show the committed results.")
    if changed := changed_results():
        print(f"Measured with other code: {', '.join(changed)}.")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
