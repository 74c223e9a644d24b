"""Plot speculation statistics."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_speculate.errors import import_extra

_SIZE = (12.0, 3.5)  # inches
_COLOR = "#0072B2"  # blue from the Okabe-Ito palette


def make_figure(
    headline: str,
    acceptance_rate_per_position: Sequence[float],
    draft_lens: Sequence[int],
    num_rounds: int,
    seconds_by_stage: Mapping[str, float],
) -> Any:
    """Make a `matplotlib.figure.Figure` of acceptance, draft lengths, and time by stage."""
    # Unlike pyplot, the class does not start a window system or keep a reference to the figure.
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=_SIZE, layout="constrained")
    figure.suptitle(headline)
    acceptance, lens, stages = figure.subplots(1, 3)

    positions = range(1, len(acceptance_rate_per_position) + 1)
    acceptance.bar(positions, acceptance_rate_per_position, color=_COLOR)
    acceptance.set(
        title="acceptance rate per position",
        xlabel="position in the draft",
        ylabel="accepted / drafted",
    )
    acceptance.set_ylim(0, 1)
    acceptance.locator_params(axis="x", integer=True)
    if not positions:
        _write(acceptance, "nothing was drafted")

    rounds = range(1, len(draft_lens) + 1)
    lens.step(rounds, draft_lens, where="mid", color=_COLOR)
    if len(draft_lens) == 1:
        lens.plot(rounds, draft_lens, marker="o", color=_COLOR)  # steps of one point are empty
    label = (
        "round"
        if num_rounds <= len(draft_lens)
        else f"round, the first {len(draft_lens)} of {num_rounds}"
    )
    lens.set(
        title="draft length",
        xlabel=label,
        ylabel="drafted tokens",
        ylim=(0, max(draft_lens, default=0) + 1),
    )
    lens.locator_params(integer=True)
    if not rounds:
        _write(lens, "there were no rounds")

    total_s = sum(seconds_by_stage.values())
    bars = stages.barh(list(seconds_by_stage), list(seconds_by_stage.values()), color=_COLOR)
    shares = [seconds / total_s if total_s else 0.0 for seconds in seconds_by_stage.values()]
    stages.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3)
    stages.invert_yaxis()  # the first stage on top
    stages.margins(x=0.2)  # room for the labels
    stages.set(title="time by stage", xlabel="seconds")
    return figure


def _write(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
