"""Tokens per second of every method with an 8B target and a 1B draft; an oracle fixes all texts, and acceptance."""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from _gpu_calls import CONSTANT, EAGER, GRAPHS, decode
from _gpu_device import Device, Models
from _gpu_report import Report
from _subjects import Oracle
from torch import Tensor

import hf_speculate
from hf_speculate.stats import SpeculationStats

PROMPT_LEN, NUM_NEW, REPEATS = 512, 64, 3
DRY_PROMPT_LEN, DRY_NUM_NEW = 32, 6
BATCH_SIZES = (1, 8)
COMPILED = {"cache_implementation": "static"}
COMPILE_LIMIT_S = 120.0  # of a cell that compiles
COMPILE_NEEDS_S = 25.0  # none begins when less is left
PLAIN, OURS, GRAPHED, ASSISTED = "plain", "ours, eager", "ours, graphs", "transformers' assisted"
DEFAULT = "ours, default schedule"
PLAIN_COMPILED, OURS_COMPILED = "plain, compiled", "ours, compiled"
# Compilation may take minutes: it comes when everything else is written.
METHODS = (PLAIN, OURS, GRAPHED, DEFAULT, ASSISTED)
COMPILED_METHODS = (PLAIN_COMPILED, OURS_COMPILED)
LEARNING_CALLS = {DEFAULT: 3}  # by method, calls in which the schedule learns, after the first one
# What runs compiled or from a graph of its own: the draft's and the target's forwards.
NUM_MODELS = 2


class Setting(NamedTuple):
    """Models, prompts and texts of a cell."""

    models: Models
    inputs: dict[str, Tensor]
    expected: Tensor  # [B, T + N], on the CPU
    num_new: int


def end_to_end(report: Report, device: Device) -> None:
    """One cell for each method and number of rows."""
    models, oracle = device.large_pair()
    report.cell(what="models", peak_gb=device.peak_bytes() / 1e9)
    for method, batch_size in cells(METHODS):
        name = name_of(method, batch_size)
        if method == ASSISTED and batch_size > 1:
            report.leave_out(name, "transformers takes one sequence")
        else:
            report.attempt(name, lambda: _time(report, device, models, oracle, method, batch_size))  # noqa: B023
    for batch_size in BATCH_SIZES:
        name = f"kernels of {name_of(GRAPHED, batch_size)}"
        report.attempt(name, lambda: _profile(report, device, models, oracle, name, batch_size))  # noqa: B023
    for method, batch_size in cells(COMPILED_METHODS):
        name = name_of(method, batch_size)
        if device.is_dry:
            report.leave_out(name, "the simulated device does not compile")
        else:
            limits = {"limit_s": COMPILE_LIMIT_S, "needs_s": COMPILE_NEEDS_S}
            report.attempt(name, lambda: _time(report, device, models, oracle, method, batch_size), **limits)  # noqa: B023


def cells(methods: Sequence[str]) -> list[tuple[str, int]]:
    """Methods and numbers of rows, in their order."""
    return [(method, batch_size) for batch_size in BATCH_SIZES for method in methods]


def name_of(method: str, batch_size: int) -> str:
    """The name of a cell."""
    return f"{method}, B={batch_size}"


def _time(report: Report, device: Device, models: Models, oracle: Oracle, method: str, batch_size: int) -> None:
    """First a run that compiles, captures and fills pools, whose text is checked; then runs that alternate."""
    setting = _setting(device, models, oracle, batch_size)
    name, stats = name_of(method, batch_size), SpeculationStats()
    run = _run_of(method, setting, stats)
    device.peak_bytes()
    begin = time.perf_counter()
    text = run().cpu()
    first_s = time.perf_counter() - begin
    peak_gb = device.peak_bytes() / 1e9
    is_right = bool(torch.equal(text, setting.expected))
    report.check(f"{name}: the text is the oracle's", is_right, _difference(text, setting.expected))
    if method in (GRAPHED, DEFAULT):
        report.check(f"{name}: runs from graphs", len(stats.graphed) == NUM_MODELS, stats.fallbacks)
    if method == OURS_COMPILED:
        report.check(f"{name}: runs compiled", len(stats.compiled) == NUM_MODELS, stats.fallbacks)
    learning_s = [device.seconds(run, 1) for _ in range(0 if device.is_dry else LEARNING_CALLS.get(method, 0))]
    peer = _peer_of(method)
    run_peer = _run_of(peer, setting, SpeculationStats())
    pairs = [(device.seconds(run_peer, 1), device.seconds(run, 1)) for _ in range(1 if device.is_dry else REPEATS)]
    num_tokens = batch_size * setting.num_new
    seconds = [ours for _, ours in pairs]
    report.cell(
        what="end to end",
        method=method,
        batch_size=batch_size,
        is_right=is_right,
        tokens_per_s=sorted(num_tokens / spent_s for spent_s in seconds),
        peer=peer,
        peer_tokens_per_s=sorted(num_tokens / spent_s for spent_s, _ in pairs),
        ratio=median(theirs / ours for theirs, ours in pairs),
        ms_per_step=1e3 * median(seconds) / setting.num_new,
        first_s=first_s,
        learning_s=learning_s,
        peak_gb=peak_gb,
        acceptance_rate=stats.acceptance_rate if stats.num_drafted else None,
        mean_acceptance_length=stats.mean_acceptance_length if stats.num_drafted else None,
        draft_lens=stats.draft_lens,
        fallbacks=stats.fallbacks,
    )


def _peer_of(method: str) -> str:
    """What a method's timed runs alternate with."""
    return GRAPHED if method in COMPILED_METHODS else PLAIN


def _setting(device: Device, models: Models, oracle: Oracle, batch_size: int) -> Setting:
    prompt_len, num_new = (DRY_PROMPT_LEN, DRY_NUM_NEW) if device.is_dry else (PROMPT_LEN, NUM_NEW)
    ids = torch.randint(64, (batch_size, prompt_len), generator=torch.Generator().manual_seed(batch_size))
    inputs = {"input_ids": ids.to("cuda:0"), "attention_mask": torch.ones_like(ids).to("cuda:0")}
    return Setting(models, inputs, oracle.text(ids, num_new), num_new)


def _profile(report: Report, device: Device, models: Models, oracle: Oracle, name: str, batch_size: int) -> None:
    """What bounds a call whose rounds run from graphs: the time of each kernel, and the time without any."""
    stats = SpeculationStats()
    run = _run_of(GRAPHED, _setting(device, models, oracle, batch_size), stats)
    run()
    report.cell(what="kernels", name=name, num_rounds=stats.num_batch_rounds, **device.kernels_of(run))


def _difference(text: Tensor, expected: Tensor) -> str:
    """Where two texts [B, T] differ."""
    if text.shape != expected.shape:
        return f"shape {list(text.shape)}, expected {list(expected.shape)}"
    wrong = (text != expected).nonzero()
    return f"{len(wrong)} of {text.numel()} tokens differ" + (f", first at {wrong[0].tolist()}" if len(wrong) else "")


def _run_of(method: str, setting: Setting, stats: SpeculationStats) -> Callable[[], Tensor]:
    """Decodes [B, T + N]; statistics of ours go to `stats`."""
    models, inputs, _, num_new = setting
    if method == ASSISTED:
        return partial(_assisted, setting)
    theirs: dict[str, dict[str, Any]] = {PLAIN: {}, PLAIN_COMPILED: COMPILED}
    if method in theirs:
        return lambda: models.target.generate(**inputs, **theirs[method], max_new_tokens=num_new)
    ours: dict[str, dict[str, Any]] = {OURS: EAGER, GRAPHED: GRAPHS, OURS_COMPILED: COMPILED}
    options = {"max_new_tokens": num_new, "speculation_stats": stats}
    # By itself a call runs no model with hooks from graphs, and the oracle is one.
    options |= GRAPHS if method == DEFAULT else {**CONSTANT, **ours[method]}
    return lambda: decode(models, inputs, "model", **options)


def _assisted(setting: Setting) -> Tensor:
    """The assisted generation of transformers, which reads K from the draft's own settings."""
    (target, draft), inputs, _, num_new = setting
    own = draft.generation_config
    draft.generation_config = copy.deepcopy(own)
    draft.generation_config.update(**CONSTANT, assistant_confidence_threshold=0.0)
    try:
        return target.generate(**inputs, assistant_model=draft, max_new_tokens=num_new)
    finally:
        draft.generation_config = own


def compilation(report: Report, device: Device) -> None:
    """Seconds of a first compiled call of a small pair, of one with another prompt length, and of a third."""
    models = device.small_pair(torch.bfloat16)
    for number, length in enumerate((32, 96, 32)):
        name = f"compiled call {number + 1}, {length} tokens"
        report.attempt(name, lambda: _compiled_call(report, device, models, name, length), limit_s=400.0)  # noqa: B023


def _compiled_call(report: Report, device: Device, models: Models, name: str, length: int) -> None:
    ids = torch.randint(3, 60, (1, length), device="cuda:0")
    inputs, stats = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, hf_speculate.SpeculationStats()
    options = {} if device.is_dry else COMPILED
    begin = time.perf_counter()
    decode(models, inputs, "model", **CONSTANT, **options, max_new_tokens=8, speculation_stats=stats)
    report.cell(what=name, prompt_len=length, seconds=time.perf_counter() - begin, compiled=stats.compiled)
    is_right = device.is_dry or len(stats.compiled) == NUM_MODELS
    report.check(f"{name}: runs compiled", is_right, stats.compiled)
