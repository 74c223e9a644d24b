"""Format results of the verifier benchmark as lines, a table and a plot."""

import importlib.util
from pathlib import Path
from typing import Any

from _harness import RESULTS

Row = dict[str, Any]
# "ours" in the table is the first of these that was measured.
BEST_FIRST = ("ours, triton, graph", "ours, triton", "ours, torch")
COLOURS = {
    "transformers": "tab:red",
    "textbook": "tab:orange",
    "flashinfer": "tab:green",
    "ours, torch": "tab:blue",
    "ours, compiled": "tab:cyan",
    "ours, triton": "tab:purple",
    "ours, triton, graph": "black",
}


def summary(row: Row) -> str:
    """Format one cell as two or more lines."""
    head = (
        f"{row['verifier']} ({row['logits']}), {row['dtype']}, B = {row['batch_size']}, "
        f"K = {row['num_draft_tokens']}, V = {row['vocab_size']}: overlap {row['overlap']:.2f}"
    )
    if "num_accepted" in row:
        head += f", accepted {row['num_accepted']:.2f}"
    lines = [f"{head}, {row['repeats']} runs each, {row['num_held_up']} of all held up"]
    for method, spread in row["seconds"].items():
        times = "/".join(f"{spread[key] * 1e3:.3f}" for key in ("min", "median", "max"))
        rate, share = row["gb_per_s"][method], row["share_of_copy_rate"][method]
        line = f"    {method:<20}{times:>28} ms  {rate:7.2f} GB/s {share:6.1%}"
        if method in row["over_transformers"]:
            ratio = row["over_transformers"][method]
            line += (
                f"  {ratio['median']:6.2f} times faster ({ratio['min']:.2f} to {ratio['max']:.2f})"
            )
        lines.append(line)
    return "\n".join(lines)


def _ours(row: Row) -> str:
    return next(method for method in BEST_FIRST if method in row["seconds"])


def _shown(content: dict[str, Any]) -> list[Row]:
    """Select the rows for one dtype, K and vocabulary, with temperature and top-k."""
    rows = content["rows"]
    if not rows:
        raise SystemExit(
            "the results hold no row; run benchmarks/verifiers.py without --table or --readme first"
        )
    dtypes = [row["dtype"] for row in rows]
    dtype = (
        "bfloat16"
        if "cuda" in content["arguments"]["device"] and "bfloat16" in dtypes
        else dtypes[0]
    )
    draft_len = min(
        (row["num_draft_tokens"] for row in rows), key=lambda draft_len: abs(draft_len - 5)
    )
    vocab_size = max(row["vocab_size"] for row in rows)
    chosen = [
        row
        for row in rows
        if (row["dtype"], row["num_draft_tokens"], row["vocab_size"])
        == (dtype, draft_len, vocab_size)
    ]
    warped = {row["verifier"] for row in chosen if row["logits"] != "plain"}
    return [row for row in chosen if row["logits"] != "plain" or row["verifier"] not in warped]


def as_table(content: dict[str, Any]) -> str:
    """Return markdown for `docs/kernels.md`."""
    rows, environment = _shown(content), content["environment"]
    first = rows[0]
    settings = next((row["logits"] for row in rows if row["logits"] != "plain"), "plain")
    names = [
        method
        for method in ("transformers", "textbook", "flashinfer")
        if any(method in row["seconds"] for row in rows)
    ]
    num_threads = content["arguments"]["threads"] or environment["threads"]
    threads = "" if "cuda" in content["arguments"]["device"] else f" (threads: {num_threads})"
    versions = "torch {torch} and transformers {transformers}".format(**environment["versions"])
    preface = (
        f"Verifying one round from raw logits: {first['dtype']}, K = {first['num_draft_tokens']}, "
        f"V = {first['vocab_size']:,}, {settings} (greedy: none), on "
        f"{environment['device']}{threads} with {versions}. "
        "Medians; methods alternate in one process, and the output of each is checked before it is "
        "timed. transformers "
        "takes one row at a time. If it lacks a verifier, its rejection sampling is compared."
    )
    columns = ["verifier", "rows", *(f"{name}, ms" for name in names), "hf_speculate, ms"]
    columns.append("times transformers' speed (min to max)")
    lines = [preface, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        ours = _ours(row)
        times = [
            f"{row['seconds'][name]['median'] * 1e3:.3g}" if name in row["seconds"] else ""
            for name in names
        ]
        ratio = row["over_transformers"][ours]
        lines.append(
            f"| {row['verifier']} | {row['batch_size']} | {' | '.join(times)} | "
            f"{row['seconds'][ours]['median'] * 1e3:.3g} | "
            f"{ratio['median']:.1f} ({ratio['min']:.1f} to {ratio['max']:.1f}) |"
        )
    lines += [
        "",
        (
            "Made by `python benchmarks/verifiers.py`; every cell is in "
            "`benchmarks/results/verifiers.json`."
        ),
    ]
    return "\n".join(lines)


def plot(content: dict[str, Any]) -> Path | None:
    """Plot the rows of the table as seconds by verifier.

    Returns None if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = _shown(content)
    batch_sizes = sorted({row["batch_size"] for row in rows})
    figure, axes = plt.subplots(
        1,
        len(batch_sizes),
        figsize=(1 + 5 * len(batch_sizes), 4.5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, batch_size in zip(axes[0], batch_sizes, strict=True):
        cells = [row for row in rows if row["batch_size"] == batch_size]
        methods = [method for method in COLOURS if any(method in row["seconds"] for row in cells)]
        for index, method in enumerate(methods):
            xs = [cell + (index + 0.5) / len(methods) * 0.7 - 0.35 for cell in range(len(cells))]
            spreads = [row["seconds"].get(method) for row in cells]
            bars = [(cell, bar) for cell, bar in zip(xs, spreads, strict=True) if bar]
            middle = [bar["median"] * 1e3 for _, bar in bars]
            below = [(bar["median"] - bar["min"]) * 1e3 for _, bar in bars]
            above = [(bar["max"] - bar["median"]) * 1e3 for _, bar in bars]
            spots = [cell for cell, _ in bars]
            axis.errorbar(
                spots,
                middle,
                (below, above),
                fmt="o",
                capsize=2,
                color=COLOURS[method],
                label=method,
            )
        axis.set_xticks(
            range(len(cells)), [row["verifier"] for row in cells], rotation=35, ha="right"
        )
        axis.set_yscale("log")
        axis.set_title(f"{batch_size} rows" if batch_size > 1 else "1 row")
        axis.grid(axis="y", alpha=0.3)
    first = rows[0]
    axes[0][0].set_ylabel("ms a round (minimum, median, maximum)")
    axes[0][-1].legend(fontsize="small")
    figure.suptitle(
        f"Verifying {first['num_draft_tokens']} drafted tokens, V = {first['vocab_size']:,}, "
        f"{first['dtype']}, "
        f"{content['environment']['device']}"
    )
    path = RESULTS / "verifiers.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
