"""Plot results as panels of points with error bars."""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

Value = dict[str, float] | float  # min, median, max; or one number


class Panel(NamedTuple):
    """One set of axes."""

    title: str
    ylabel: str
    series: dict[str, list[tuple[Any, Value]]]  # name -> (x name or number, value)
    reference: float | None = None  # a horizontal line
    xlabel: str = ""
    is_log: bool = False  # both axes; only for numbers


def draw(path: Path, panels: list[Panel]) -> None:
    """Write a plot, or print why there is none."""
    if importlib.util.find_spec("matplotlib") is None or not panels:
        print(
            "no picture: matplotlib is not installed"
            if panels
            else "no picture: nothing was measured"
        )
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    num_columns = min(len(panels), 2)
    num_lines = -(-len(panels) // num_columns)
    size = (7 * num_columns, 4.6 * num_lines)
    figure, axes = plt.subplots(
        num_lines, num_columns, figsize=size, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    print(f"drawn in {path}")


def _draw_panel(axis: Any, panel: Panel) -> None:
    are_names = False
    for name, points in panel.series.items():
        if not points:
            continue
        are_names = are_names or isinstance(points[0][0], str)
        xs = [x for x, _ in points]
        spreads = [
            value if isinstance(value, dict) else dict.fromkeys(("min", "median", "max"), value)
            for _, value in points
        ]
        middle = [entry["median"] for entry in spreads]
        error = (
            [entry["median"] - entry["min"] for entry in spreads],
            [entry["max"] - entry["median"] for entry in spreads],
        )
        axis.errorbar(
            xs, middle, error, fmt="o" if isinstance(xs[0], str) else "o-", capsize=2, label=name
        )
    if panel.reference is not None:
        axis.axhline(panel.reference, color="grey", linewidth=0.8)
    if are_names:
        axis.tick_params(axis="x", labelrotation=60, labelsize="small")
    elif panel.is_log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_title(panel.title, fontsize="medium")
    axis.set_ylabel(panel.ylabel)
    axis.set_xlabel(panel.xlabel)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize="small")
