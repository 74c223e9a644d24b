"""Render speculation statistics as one line, as the lines of `print(stats)`, or as a rich table."""

from rich.markup import escape
from rich.table import Table

from hf_speculate.errors import counted
from hf_speculate.stats import SpeculationStats

_NOTHING_DRAFTED = "nothing was drafted"
_REFUSED = "plain decoding: "  # beginning of the reason why the draft source is not used
_FEW_STEPS = 8  # with fewer plain steps, the estimate may be off by half


def headline(stats: SpeculationStats) -> str:
    """Return the estimated speed-up over plain decoding, or the reason why there is none."""
    if not stats.has_draft_source:
        refusals = (reason for reason in stats.fallbacks if reason.startswith(_REFUSED))
        return next(refusals, "plain decoding: no draft source")
    if not stats.num_rounds:
        return "no token was decoded after the prompt"
    if (speedup := stats.speedup) is None:
        return (
            "speed-up over plain decoding not measured (no call of this type has taken a plain "
            "step yet)"
        )
    num_steps = sum(map(len, stats.measured_steps().values()))
    num_earlier = num_steps - sum(map(len, stats.plain_step_s_by_rows.values()))
    steps = counted(num_steps, "plain step") + (
        f", {num_earlier} of earlier calls" if num_earlier > 0 else ""
    )
    if num_steps < _FEW_STEPS:
        return f"about {speedup:.1f}x the speed of plain decoding (estimated from only {steps})"
    return f"about {speedup:.2f}x the speed of plain decoding (estimated from {steps})"


def summary(stats: SpeculationStats) -> str:
    """Return one line with speed-up, forwards, mean acceptance length, acceptance rate, seconds."""
    if not stats.num_rounds and stats.has_draft_source:
        return f"{stats.verifier or 'no'} verification: no rounds in {stats.total_s:.2f} s"
    if not stats.has_draft_source:
        return headline(stats)
    rate = f"acceptance rate {stats.acceptance_rate:.3f}" if stats.num_drafted else _NOTHING_DRAFTED
    forwards = counted(stats.num_target_forwards, "target forward")
    return (
        f"{headline(stats)}; {stats.verifier} verification: {counted(stats.num_emitted, 'token')} "
        f"in {counted(stats.num_rounds, 'round')}, {forwards} (plain {stats.num_plain_forwards}), "
        f"mean acceptance length {stats.mean_acceptance_length:.2f}, {rate}, "
        f"{stats.total_s:.2f} s, {stats.tokens_per_s:.1f} tokens/s"
    )


def text(stats: SpeculationStats) -> str:
    """Return the headline, and one line per value."""
    return "\n".join([headline(stats), *(f"{name}: {value}" for name, value in _lines(stats))])


def as_table(stats: SpeculationStats) -> Table:
    """Return the rich table that `rich.print(stats)` shows."""
    table = Table(title=headline(stats), show_header=False)
    for name, value in _lines(stats):
        table.add_row(name, escape(value))
    return table


def _lines(stats: SpeculationStats) -> list[tuple[str, str]]:
    """Return names and values, the most important first."""
    if not stats.num_rounds and not stats.has_draft_source:
        return []
    total_s = stats.total_s
    positions = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
    lens = " ".join(
        f"{draft_len}:{count}" for draft_len, count in sorted(stats.rounds_by_draft_len.items())
    )
    stages = ", ".join(
        f"{stage} {seconds:.3f} s ({seconds / total_s if total_s else 0.0:.0%})"
        for stage, seconds in stats.seconds_by_stage.items()
    )
    drafts = {
        "target forwards": f"{stats.num_target_forwards} after the prompt, plain decoding "
        f"{stats.num_plain_forwards}",
        "mean acceptance length": f"{stats.mean_acceptance_length:.2f} "
        f"({counted(stats.num_emitted, 'token')} in {counted(stats.num_rounds, 'round')})",
    }
    rates = {
        "acceptance rate": f"{stats.acceptance_rate:.3f} "
        f"({stats.num_accepted} of {stats.num_drafted} drafted tokens)",
        "verified acceptance rate": f"{stats.verified_acceptance_rate:.3f} "
        f"({stats.num_accepted} of {stats.num_verified} verified tokens)",
        "acceptance rate per position": positions,
    }
    drafts |= rates if stats.num_drafted else {"acceptance rate": f"- ({_NOTHING_DRAFTED})"}
    lines = {
        **(drafts if stats.has_draft_source and stats.num_rounds else {}),
        "tokens per second": f"{stats.tokens_per_s:.1f}" if stats.num_rounds else "",
        "time to first token": f"{stats.time_to_first_token_s:.3f} s"
        if stats.time_to_first_token_s
        else "",
        "rounds by draft length": lens,
        "rounds scored again": f"{stats.num_rescored}, after NaN or infinite logits"
        if stats.num_rescored
        else "",
        "time by stage": stages,
        "verifier": stats.verifier or "none",
        "host synchronisations": f"{stats.num_host_syncs} ours, {stats.num_user_host_syncs} in "
        "user code",
        "plan": stats.plan,
        "compiled": ", ".join(stats.compiled),
        "from graphs": ", ".join(stats.graphed),
        "rows": "moved in lock step" if stats.lock_step else "",
    }
    known = [(name, value) for name, value in lines.items() if value]
    return known + [("fallback", reason) for reason in stats.fallbacks]
