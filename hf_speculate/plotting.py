"""Plots of speculation statistics."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_speculate.errors import import_extra

_SIZE = (12.0, 3.5)  # inches
_COLOR = "#0072B2"  # blue of the Okabe-Ito palette


def make_figure(
    headline: str,
    acceptance_rate_per_position: Sequence[float],
    draft_lens: Sequence[int],
    num_rounds: int,
    seconds_by_stage: Mapping[str, float],
) -> Any:
    """A `matplotlib.figure.Figure` with three panels side by side: acceptance, draft lengths, seconds by stage."""
    # The class itself, not pyplot: no window system is chosen, and nothing is kept.
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=_SIZE, layout="constrained")
    figure.suptitle(headline)
    axes = figure.subplots(1, 3)
    _draw_acceptance(axes[0], acceptance_rate_per_position)
    _draw_lens(axes[1], draft_lens, num_rounds)
    _draw_seconds(axes[2], seconds_by_stage)
    return figure


def _draw_acceptance(axes: Any, shares: Sequence[float]) -> None:
    positions = range(1, len(shares) + 1)
    axes.bar(positions, shares, color=_COLOR)
    axes.set(
        title="acceptance rate per position", xlabel="position in the draft", ylabel="accepted / drafted", ylim=(0, 1)
    )
    _whole_numbers(axes.xaxis)
    _say_if_empty(axes, shares, "nothing was drafted")


def _draw_lens(axes: Any, lens: Sequence[int], num_rounds: int) -> None:
    rounds = range(1, len(lens) + 1)
    axes.step(rounds, lens, where="mid", color=_COLOR)
    if len(lens) == 1:
        axes.plot(rounds, lens, marker="o", color=_COLOR)  # a step plot of one point shows nothing
    label = "round" if num_rounds <= len(lens) else f"round, the first {len(lens)} of {num_rounds}"
    axes.set(title="draft length", xlabel=label, ylabel="drafted tokens", ylim=(0, max(lens, default=0) + 1))
    _whole_numbers(axes.xaxis)
    _whole_numbers(axes.yaxis)
    _say_if_empty(axes, lens, "there were no rounds")


def _draw_seconds(axes: Any, seconds: Mapping[str, float]) -> None:
    total_s = sum(seconds.values())
    bars = axes.barh(list(seconds), list(seconds.values()), color=_COLOR)
    axes.bar_label(bars, [f"{part / total_s if total_s else 0.0:.0%}" for part in seconds.values()], padding=3)
    axes.invert_yaxis()  # the first stage on top
    axes.margins(x=0.2)  # room for the labels
    axes.set(title="time by stage", xlabel="seconds")


def _whole_numbers(axis: Any) -> None:
    axis.get_major_locator().set_params(integer=True)


def _say_if_empty(axes: Any, values: Sequence[float], text: str) -> None:
    if not values:
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
