"""What first light found, in ten lines, and what each of them decides."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from _gpu_report import Content

Contents = dict[str, Content]  # by part
GRAPHED, OURS, PLAIN, ASSISTED = "ours, graphs", "ours, eager", "plain", "transformers' assisted"
DEFAULT = "ours, default schedule"
PLAIN_COMPILED, OURS_COMPILED = "plain, compiled", "ours, compiled"
UNKNOWN = "no answer"
_NUM_NAMED = 3  # faults that a line names


class Finding(NamedTuple):
    """One line of the table."""

    question: str
    measured: str
    decides: str


def findings(contents: Contents) -> list[Finding]:
    """The ten lines."""
    texts, speed = contents.get("kernels_and_texts", {}), contents.get("end_to_end", {})
    return [
        _checked("kernels agree with their references", texts, lambda name: ", V=" in name, _KERNELS),
        _checked("attention in half precision", texts, lambda name: name.startswith("attention, "), _ATTENTION),
        _checked("texts in half precision, eager", texts, _is_text(graphs=False), _EAGER_TEXTS),
        _checked("texts in half precision, graphs", texts, _is_text(graphs=True), _GRAPH_TEXTS),
        _tests(contents),
        *(_graphs(texts, speed, batch_size) for batch_size in (1, 8)),
        _rivals(speed),
        _rounds(contents.get("rounds", {})),
        _times(contents.get("kernel_times", {})),
    ]


_KERNELS = "kernels stay the default", "mend them, or the torch reference becomes the default"
_ATTENTION = "the choice of backends stays", "mend attention_backends"
_EAGER_TEXTS = "eager decoding is right", "mend before anything is timed"
_GRAPH_TEXTS = "graphs may become the default", "graphs stay off; mend, or say what fails"
Choice = Callable[[str], bool]  # of checks, by their names


def _is_text(*, graphs: bool) -> Choice:
    return lambda name: ("greedy" in name or "top_k=1" in name) and ", B=" in name and ("graphs" in name) == graphs


def _checked(question: str, content: Content, chooses: Choice, decides: tuple[str, str]) -> Finding:
    """How many of the chosen checks were right, and which were not."""
    checks = [check for check in content.get("checks", ()) if chooses(check["name"])]
    if not checks:
        return Finding(question, _why_unknown(content), UNKNOWN)
    wrong = [check["name"] for check in checks if not check["is_right"]]
    outcome = f"{len(checks) - len(wrong)} of {len(checks)} right" + (f"; wrong: {_named(wrong)}" if wrong else "")
    return Finding(question, outcome + _end_of(content), decides[bool(wrong)])


def _tests(contents: Contents) -> Finding:
    cells = [cell for content in contents.values() for cell in content.get("cells", ()) if cell.get("what") == "tests"]
    if not cells:
        return Finding("tests on the device", _why_unknown(contents.get("kernels_and_texts", {})), UNKNOWN)
    summary = "; ".join(
        "{name}: {passed} passed, {failed} failed, {skipped} skipped, {percent} % run".format(**cell) for cell in cells
    )
    is_right = all(check["is_right"] for check in _checks(*contents.values()) if check["name"].endswith(": none fails"))
    return Finding("tests on the device", summary, "nothing to mend" if is_right else "mend what fails")


def _graphs(texts: Content, speed: Content, batch_size: int) -> Finding:
    """Graphs against eager forwards and plain decoding."""
    question = f"8B + 1B, B={batch_size}, tokens/s"
    rates = {method: _rate(speed, method, batch_size) for method in (PLAIN, OURS, GRAPHED)}
    if any(rate is None for rate in rates.values()):
        known = ", ".join(f"{method} {rate:.0f}" for method, rate in rates.items() if rate)
        return Finding(question, f"{known or 'nothing'}; {_why_unknown(speed)}", "speculation_graphs: " + UNKNOWN)
    plain, eager, graphed = (rates[method] or 0.0 for method in (PLAIN, OURS, GRAPHED))
    summary = (
        f"plain {plain:.0f}, eager {eager:.0f} ({eager / plain:.2f}x), graphs {graphed:.0f} ({graphed / plain:.2f}x)"
    )
    default = _rate(speed, DEFAULT, batch_size)
    summary += f", default schedule {default:.0f} ({default / plain:.2f}x)" if default else ""
    is_right = not any("graphs" in check["name"] and not check["is_right"] for check in _checks(texts, speed))
    is_faster = graphed > eager
    verdict = "auto stays on" if is_right and is_faster else "auto -> off"
    reason = "" if is_right and is_faster else " (not right)" if not is_right else " (not faster)"
    return Finding(question, summary, f"speculation_graphs: {verdict}{reason}")


def _rivals(speed: Content) -> Finding:
    """The best of ours at one row, against transformers' assisted generation and compiled plain decoding."""
    question = "8B + 1B, B=1, against others"
    ours = {method: rate for method in (OURS, GRAPHED, OURS_COMPILED) if (rate := _rate(speed, method, 1))}
    others = {method: rate for method in (ASSISTED, PLAIN_COMPILED) if (rate := _rate(speed, method, 1))}
    if not ours or not others:
        return Finding(question, _why_unknown(speed), UNKNOWN)
    best = max(ours, key=ours.__getitem__)
    summary = f"{best} {ours[best]:.0f}; " + ", ".join(f"{method} {rate:.0f}" for method, rate in others.items())
    if PLAIN_COMPILED not in others:
        return Finding(question, summary, "the front page: " + UNKNOWN)
    is_better = ours[best] > others[PLAIN_COMPILED]
    return Finding(question, summary, "figures go to the front page" if is_better else "figures go to the results only")


def _rounds(content: Content) -> Finding:
    question = "launches, waits, cuDNN plans of a round"
    cells = [cell for cell in content.get("cells", ()) if cell.get("what") == "rounds" and cell["rounds"]]
    if not cells:
        return Finding(question, _why_unknown(content), UNKNOWN)
    greedy = next((cell for cell in cells if cell["name"].startswith("greedy, model, B=1")), cells[0])
    launches, *rest = (median(values) for values in zip(*greedy["rounds"], strict=True))
    summary = f"{greedy['name']}: {launches:g}, {rest[0]:g}, {rest[1]:g}"
    wrong = [check["name"] for check in content["checks"] if not check["is_right"]]
    summary += (f"; wrong: {_named(wrong)}" if wrong else "") + _end_of(content)
    return Finding(question, summary, "mend" if wrong else "as designed")


def _times(content: Content) -> Finding:
    question = "kernels, us in a graph / from the host (reference)"
    cells = [cell for cell in content.get("cells", ()) if cell.get("what") == "kernel"]
    if not cells:
        return Finding(question, _why_unknown(content), UNKNOWN)
    summary = "; ".join(
        f"{cell['operation']}, B={cell['batch_size']}: {_us(cell, '')} ({_us(cell, 'reference_')})"
        for cell in cells
        if cell["operation"] in ("greedy", "rejection, saved sums")
    )
    slower = [
        f"{cell['operation']}, B={cell['batch_size']}"
        for cell in cells
        if cell["eager_us"] > cell["reference_eager_us"]  # decoding launches them from the host
    ]
    failed = [check["name"] for check in content["checks"] if not check["is_right"]]
    summary += (f"; failed: {_named(failed)}" if failed else "") + _end_of(content)
    decides = f"reference becomes the default of: {_named(slower)}" if slower else "kernels stay the default"
    return Finding(question, summary, decides)


def _us(cell: dict[str, Any], prefix: str) -> str:
    graphed, eager = cell[f"{prefix}us"], cell[f"{prefix}eager_us"]
    return f"{'?' if graphed is None else format(graphed, '.1f')} / {eager:.0f}"


def _rate(content: Content, method: str, batch_size: int) -> float | None:
    """Median of tokens per second; None if it was not measured, or of a wrong text."""
    for cell in content.get("cells", ()):
        if (cell.get("method"), cell.get("batch_size")) == (method, batch_size) and cell["is_right"]:
            return float(median(cell["tokens_per_s"]))
    return None


def _checks(*contents: Content) -> Iterator[dict[str, Any]]:
    for content in contents:
        yield from content.get("checks", ())


def _why_unknown(content: Content) -> str:
    """Where a part ended that lacks an answer."""
    if not content:
        return "the part wrote nothing, see the log"
    failed = [check["name"] for check in content["checks"] if not check["is_right"]]
    if failed:
        return f"failed: {_named(failed)}"
    left_out = [entry["cell"] for entry in content["left_out"]]
    if not content["is_finished"] and content["attempted"]:
        return f"ended in {content['attempted'][-1]}"
    return f"left out: {_named(left_out)}" if left_out else "not measured"


def _end_of(content: Content) -> str:
    """That a part did not come to its end, where it did not."""
    return "" if content["is_finished"] else f"; the part ended in {content['attempted'][-1]}"


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return "; ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def summary(contents: Contents) -> str:
    """The table, under a line that says what it was measured on."""
    environment = next((content["environment"] for content in contents.values() if "environment" in content), {})
    versions = environment.get("versions", {})
    where = [environment.get("device", "no part has begun"), *(f"{name} {value}" for name, value in versions.items())]
    if any(content.get("is_dry_run") for content in contents.values()):
        where.append("dry run: no figure means anything")
    lines = [f"{number + 1:2} {line.question} | {line.measured} | {line.decides}"
             for number, line in enumerate(findings(contents))]  # fmt: skip
    return "\n".join([", ".join(map(str, [*where, f"commit {environment.get('commit', 'unknown')}"])), *lines])
