"""Define the cells of the laboratory (texts on a machine), and measure the schedule in them."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tests.schedule.laboratory.machines import (
    EAGER_GPU,
    GRAPH_GPU,
    LOOKUP_MACHINES,
    MODEL_MACHINES,
    NOISES,
    SMALL_HEAD,
    Clock,
    Machine,
)
from tests.schedule.laboratory.replay import NUM_CALLS, Call, Setting, run_adaptive, run_constant
from tests.schedule.laboratory.texts import (
    COPYING,
    FOLDER,
    Text,
    even_texts,
    lookup_texts,
    misleading_texts,
    model_texts,
    runs_of,
    switching_texts,
)

CONSTANTS = (1, 2, 3, 5, 8, 10)
RIVALS = (5, 10)
RATES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
GAIN = 1.03  # the best constant gains if its speed is at least this
SIZES = (2, 4, 8, 10)


class Cell(NamedTuple):
    """Calls with the same texts and setting."""

    group: str
    kind: str
    setting: Setting
    texts: Sequence[Text]
    num_calls: int = NUM_CALLS

    @property
    def name(self) -> str:
        """Return the group and everything that distinguishes cells within it."""
        setting = self.setting
        size = f"B={setting.num_rows}, N={setting.num_tokens}"
        return f"{self.group}: {self.kind}, {setting.machine.name}, {size}"


class Traces(NamedTuple):
    """Recorded texts."""

    lookup: Sequence[Text]
    pair: Sequence[Text]
    head: Sequence[Text]  # with runs of a head, and with proposals of prompt lookup


def read_traces(
    lookup: Path | None = None, pair: Path | None = None, head: Path | None = None
) -> Traces:
    """Read recorded texts, by default from this folder."""
    head = head or FOLDER / "head.json"
    return Traces(
        lookup_texts(lookup or FOLDER / "lookup.json"),
        model_texts(pair or FOLDER / "pair.json"),
        lookup_texts(head)
        if head.exists()
        else guessed_texts(lookup_texts(lookup or FOLDER / "lookup.json")),
    )


def guessed_texts(texts: Sequence[Text], rate: float = 0.45) -> list[Text]:
    """Return texts with the runs of a head that guesses at random, a synthetic stand-in."""
    generator = random.Random("head")
    return [
        text._replace(runs=runs_of([generator.random() < rate for _ in range(text.num_tokens)]))
        for text in texts
    ]


def main_cells(traces: Traces, num_tokens: int) -> Iterator[Cell]:
    """Return cells with lookups and with models on all machines."""
    lookups = {
        "texts": traces.lookup,
        "copying": [text for text in traces.lookup if text.kind.startswith(COPYING)],
        "misleading": misleading_texts(),
    }
    for kind, texts in lookups.items():
        for machine in LOOKUP_MACHINES if texts else ():
            for num_rows in machine.batches:
                setting = Setting(machine, num_rows, num_tokens, has_lookup=True)
                yield Cell("lookup", kind, setting, texts)
    models = {"pair": traces.pair, "switch": switching_texts()}
    models |= {f"a={rate}": even_texts(rate) for rate in RATES}
    for kind, texts in models.items():
        for machine in MODEL_MACHINES:
            for num_rows in machine.batches:
                yield Cell(
                    "model", kind, Setting(machine, num_rows, num_tokens, has_model=True), texts
                )


def scenes(traces: Traces) -> Iterator[Cell]:
    """Return cells for settings other than rows that start together on a steady machine."""
    yield from _heads(traces)
    yield from _long_prompts()
    yield from _refilled(traces)
    yield from _lock_step(traces)
    yield from _unsteady(traces)
    yield from _compiled(traces)
    yield from _mixed(traces)
    yield from _hybrids(traces)
    yield from _offloaded(traces)


def _machine(name: str, machines: Sequence[Machine]) -> Machine:
    return next(machine for machine in machines if machine.name == name)


def _heads(traces: Traces) -> Iterator[Cell]:
    for num_rows in (1, 8):
        yield Cell("head", "head", Setting(SMALL_HEAD, num_rows, has_model=True), traces.head)
        for machine in (EAGER_GPU, GRAPH_GPU):
            for kind, texts in {
                "pair": traces.pair,
                "a=0.8": even_texts(0.8),
                "a=0.1": even_texts(0.1),
            }.items():
                yield Cell("gpu", kind, Setting(machine, num_rows, has_model=True), texts)


def _long_prompts() -> Iterator[Cell]:
    """Return cells whose prompts cost the draft as much as many plain steps."""
    for read_s in (10.0, 30.0, 60.0):
        machine = _machine("ideal", MODEL_MACHINES)
        machine = machine._replace(
            prompt=lambda num_rows, read_s=read_s: read_s, name=f"ideal, {read_s:.0f} s"
        )
        for rate in (0.1, 0.8):
            yield Cell(
                "long prompt",
                f"a={rate}",
                Setting(machine, 1, 256, has_model=True),
                even_texts(rate),
            )


def _refilled(traces: Traces) -> Iterator[Cell]:
    pair_cpu, h200 = _machine("pair-cpu", MODEL_MACHINES), _machine("h200", MODEL_MACHINES)
    for num_tokens in (32, 96, 256):
        for num_rows in (2, 8, 32):
            models = {"pair": traces.pair, "a=0.0": even_texts(0.0)}
            if num_tokens == 256:  # the recorded texts are shorter
                models = {"a=0.8": even_texts(0.8), "a=0.0": even_texts(0.0)}
            setting = Setting(pair_cpu, num_rows, num_tokens, num_waiting=4 * num_rows)
            num_calls = 16 if num_rows == 2 else 4
            for kind, texts in models.items():
                yield Cell("refill", kind, setting._replace(has_model=True), texts, num_calls)
                if num_rows == 8:
                    on_gpu = setting._replace(machine=h200, has_model=True)
                    yield Cell("refill", kind, on_gpu, texts, num_calls)
            smollm2 = setting._replace(machine=LOOKUP_MACHINES[0], has_lookup=True)
            yield Cell("refill", "misleading", smollm2, misleading_texts(), num_calls)
            if num_tokens < 256:
                yield Cell("refill", "texts", smollm2, traces.lookup, num_calls)


def _lock_step(traces: Traces) -> Iterator[Cell]:
    for num_rows in (2, 8):
        setting = Setting(
            LOOKUP_MACHINES[1], num_rows, is_lock_step=True, keeps_rows=True, has_lookup=True
        )
        yield Cell("lock step", "lookup", setting, traces.lookup)
        for rate in (0.0, 0.9):
            model = setting._replace(machine=MODEL_MACHINES[1], has_lookup=False, has_model=True)
            yield Cell("lock step", f"a={rate}", model, even_texts(rate))


def _unsteady(traces: Traces) -> Iterator[Cell]:
    speeds = {
        "twice as fast": lambda call, position: (
            0.5 if call > 10 or (call == 10 and position >= 30) else 1.0
        ),
        "half as fast": lambda call, position: (
            2.0 if call > 10 or (call == 10 and position >= 30) else 1.0
        ),
        "to and fro": lambda call, position: 1.0 + position // 40 % 2,
        "growing context": lambda call, position: 1.0 + position / 100,
        "slow first call": lambda call, position: 3.0 if call == 0 and position < 2 else 1.0,
    }
    for kind, slowness in speeds.items():
        for num_rows in (1, 8):
            model = Setting(
                _machine("ideal", MODEL_MACHINES), num_rows, 128, has_model=True, slowness=slowness
            )
            for rate in (0.1, 0.8):
                yield Cell("unsteady", f"{kind}, a={rate}", model, even_texts(rate))
            lookup = model._replace(machine=LOOKUP_MACHINES[1], has_lookup=True, has_model=False)
            yield Cell("unsteady", f"{kind}, lookup", lookup, traces.lookup)


def _compiled(traces: Traces) -> Iterator[Cell]:
    for factor in (10.0, 100.0):
        for num_rows in (1, 8):
            setting = Setting(
                MODEL_MACHINES[1],
                num_rows,
                sizes=SIZES,
                compile_factor=factor,
                keeps_rows=True,
                has_model=True,
            )
            for rate in (0.1, 0.8):
                yield Cell("compiled", f"a={rate}, {factor:.0f} times", setting, even_texts(rate))
            lookup = setting._replace(machine=LOOKUP_MACHINES[1], has_lookup=True, has_model=False)
            yield Cell("compiled", f"lookup, {factor:.0f} times", lookup, traces.lookup)


def _mixed(traces: Traces) -> Iterator[Cell]:
    rates = [
        text for texts in zip(*map(even_texts, (0.1, 0.5, 0.9)), strict=True) for text in texts
    ]
    lookups = [*traces.lookup, *misleading_texts(4)]
    for num_rows in (3, 6):
        for machine in (MODEL_MACHINES[0], MODEL_MACHINES[3]):
            yield Cell("mixed", "rates", Setting(machine, num_rows, has_model=True), rates)
        for machine in (LOOKUP_MACHINES[0], LOOKUP_MACHINES[3]):
            yield Cell("mixed", "lookup", Setting(machine, num_rows, has_lookup=True), lookups)
    tasks = traces.lookup[:10]
    yield Cell("tasks in turn", "lookup", Setting(LOOKUP_MACHINES[0], has_lookup=True), tasks, 10)


def _hybrids(traces: Traces) -> Iterator[Cell]:
    machines = (SMALL_HEAD, MODEL_MACHINES[0], MODEL_MACHINES[2], MODEL_MACHINES[5])
    texts = {"head": traces.head, "good model": guessed_texts(traces.lookup, 0.8)}
    texts["useless model"] = guessed_texts(traces.lookup, 0.02)
    for kind, some in texts.items():
        for machine in machines:
            for num_rows in (1, 8):
                setting = Setting(machine, num_rows, has_lookup=True, has_model=True)
                yield Cell("hybrid", kind, setting, some)


def _offloaded(traces: Traces) -> Iterator[Cell]:
    for max_tokens in (10, 32):
        lookup = LOOKUP_MACHINES[4]._replace(
            max_draft_tokens=max_tokens, name=f"offload K<={max_tokens}"
        )
        yield Cell("offload", "lookup", Setting(lookup, 1, 128, has_lookup=True), traces.lookup)
        model = MODEL_MACHINES[4]._replace(
            max_draft_tokens=max_tokens, name=f"offload K<={max_tokens}"
        )
        yield Cell("offload", "pair", Setting(model, 1, 128, has_model=True), traces.pair)


def _speed(plain: Sequence[Call], calls: Sequence[Call], mean: float = 1.0) -> float:
    return mean * sum(call.seconds for call in plain) / sum(call.seconds for call in calls)


def measure(
    cell: Cell, noise: str, seeds: Sequence[int], reference: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the speeds of constants, transformers' rule and the schedule, over plain decoding.

    Args:
        cell: texts and setting.
        noise: a key of `NOISES`.
        seeds: one simulated process per seed.
        reference: an earlier result for the cell, from which the speeds of other methods are taken.
    """
    setting, texts, num_calls = cell.setting, cell.texts, cell.num_calls
    mean = Clock(NOISES[noise], 0).mean
    plain = run_constant(setting, texts, 0, num_calls=num_calls)
    row = dict(reference) if reference else _references(cell, plain)
    ours = [run_adaptive(setting, texts, noise, seed, num_calls) for seed in seeds]
    firsts = [_speed(plain[:1], calls[:1], mean) for calls in ours]
    per_call = [
        [_speed([p], [call], mean) for p, call in zip(plain, calls, strict=True)] for calls in ours
    ]
    row["noise"] = noise
    row["ours"] = [round(_speed(plain, calls, mean), 4) for calls in ours]
    row["first"] = round(fmean(firsts), 4)
    row["worst_call"] = round(min(min(speeds[1:], default=1.0) for speeds in per_call), 4)
    widths = [width for calls in ours for call in calls for width in call.widths]
    row["drafted_share"] = round(sum(width > 0 for width in widths) / len(widths), 3)
    return row


def _references(cell: Cell, plain: Sequence[Call]) -> dict[str, Any]:
    setting, texts, num_calls = cell.setting, cell.texts, cell.num_calls
    constants = (*CONSTANTS, 16, 24, 32) if setting.machine.max_draft_tokens > 10 else CONSTANTS
    row: dict[str, Any] = {"cell": cell.name, "group": cell.group, "num_rows": setting.num_rows}
    row["has_lookup"], row["num_tokens"] = setting.has_lookup, setting.num_tokens
    if setting.has_lookup and setting.has_model:
        parts = [setting._replace(has_model=False), setting._replace(has_lookup=False)]
        speeds = [_speed(plain, run_adaptive(part, texts, "none", 0, num_calls)) for part in parts]
        row["constants"] = dict(zip(("lookup alone", "model alone"), speeds, strict=True))
    else:
        row["constants"] = {
            f"K={num}": _speed(plain, run_constant(setting, texts, num, num_calls=num_calls))
            for num in constants
        }
    row["best"] = max(1.0, *row["constants"].values())
    if setting.has_lookup and not setting.has_model:
        rivals = [run_constant(setting, texts, num, True, num_calls) for num in RIVALS]
        row["rival"] = max(_speed(plain, calls) for calls in rivals)
    elif setting.has_model and not setting.has_lookup:
        row["rival"] = max(row["constants"]["K=5"], row["constants"]["K=8"])
    return row
