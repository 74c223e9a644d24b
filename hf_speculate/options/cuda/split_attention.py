"""Split attention: our own kernel for a few queries, if a trial finds it correct and faster.

The trial runs once per device, dtype, group size and head width. It runs in the forward of a
prompt, since no graph is captured there. It compares the kernel with memory-efficient attention,
and times them alternately.
"""

import logging
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.kernels._inputs import Attention
from hf_speculate.kernels.attention import MAX_QUERY, MAX_WIDTH, obstacle_of
from hf_speculate.kernels.backends import is_interpreting, operations, runs_kernels

_LOGGER = logging.getLogger("hf_speculate")

# Tolerances for outputs between -3 and 3. Both implementations round weights and results, so their
# outputs differ by a few rounding steps.
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 6e-2}
# With groups of 1 to 16 heads, these lengths use all tiles of the kernel.
QUERY_LENS = (1, 2, 4, 6, 12, MAX_QUERY)
TIMED_QUERY_LEN = 6
# With this number of keys, memory-efficient attention takes 0.3 ms on an H200, longer than the host
# takes to launch two kernels.
BATCH_SIZE, NUM_KEYS = 2, 4096
NUM_TIMED, NUM_CALLS = 3, 10  # timings of each implementation, and calls in one timing
_MULTIPLIERS = 739982445, 695872825  # multipliers of a hash; products wrap around

# Smallest number of keys for eager forwards with the kernel. With fewer keys, forwards wait for the
# host, and the kernel launches twice per layer instead of once. This is an estimate, not yet
# measured: an eager forward of 8 billion parameters takes 22 ms on an H100's host, and
# memory-efficient attention takes 0.08 us per key and layer.
MIN_EAGER_KEYS = 4096


class Contender(NamedTuple):
    """An implementation of attention in a trial."""

    # converts a mask [B, 1, Q, T] with entries 0 and -inf, once for all layers
    convert: Callable[[Tensor], Tensor]
    # computes [B, Q, g*H, D] with the converted mask
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, float | None], Tensor]


class Build(NamedTuple):
    """Kernels for one kind of layer on one device."""

    device: torch.device
    dtype: torch.dtype
    groups: int  # query heads per KV head
    num_heads: int  # KV heads
    width: int  # D


reasons_against: dict[Build, str] = {}
"""Reason not to use a build; empty if it is used. A build without an entry is not used either."""


def build_of(query: Tensor, key: Tensor) -> Build:
    """Return the build for query [B, g*H, Q, D] and key [B, H, T, D]."""
    num_heads = key.shape[1]
    return Build(query.device, query.dtype, query.shape[1] // num_heads, num_heads, query.shape[3])


def serves(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, is_captured: bool
) -> bool:
    """Return whether the kernel computes this attention.

    Args:
        query: [B, g*H, Q, D].
        key: [B, H, T, D].
        value: [B, H, T, D].
        scaling: factor for the scores; None for 1 / sqrt(D).
        is_captured: whether the forward is replayed from graphs.
    """
    if not is_captured and key.shape[2] < MIN_EAGER_KEYS:
        return False
    if query.shape[2] > MAX_QUERY or reasons_against.get(build_of(query, key), "no trial"):
        return False
    if (
        key.shape != value.shape
        or not query.dtype == key.dtype == value.dtype
        or isinstance(scaling, Tensor)
    ):
        return False
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        return False
    return not obstacle_of(query, key, value)


def key_spans(mask: Tensor) -> Tensor:
    """Return the columns seen by each query, [B or 1, Q, 2] int32.

    The mask [B or 1, 1, Q, T] consists of spans of columns.
    """
    spans: Tensor = _kernels(mask.device).key_spans(mask if mask.stride(0) else mask[:1])
    return spans


def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scaling: float | None
) -> Tensor:
    """Compute attention [B, Q, g*H, D], contiguous, to the columns in `spans`."""
    output: Tensor = _kernels(query.device).attend(Attention(query, key, value, spans, scaling))
    return output


def run_trial(query: Tensor, key: Tensor, efficient: Contender) -> None:
    """Decide, by comparison with `efficient`, whether layers of this kind use the kernel.

    The decision is made once per process.
    """
    build = build_of(query, key)
    if build in reasons_against:
        return
    reasons_against[build] = "its trial is running"
    reasons_against[build] = reason = _reason(build, efficient)
    if reason:
        _LOGGER.info("attention for few queries is left to torch on %s: %s", build.device, reason)


def _reason(build: Build, efficient: Contender) -> str:
    if not runs_kernels("auto", build.device) or is_interpreting():
        return "Triton does not compile kernels here"
    if build.width > MAX_WIDTH:
        return f"heads are wider than {MAX_WIDTH}"
    try:
        with torch.no_grad():
            return examine(build, Contender(key_spans, attend), efficient, time.perf_counter)
    except Exception as error:  # noqa: BLE001, a trial must not fail a call
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def examine(build: Build, ours: Contender, efficient: Contender, clock: Callable[[], float]) -> str:
    """Return why `ours` is wrong or not faster than `efficient`; empty if it passes.

    `clock` returns seconds.
    """
    for num_query in QUERY_LENS:
        gap = _gap(build, num_query, ours, efficient)
        if not gap <= TOLERANCES[build.dtype]:  # also True for NaN
            words = f"results differ by {gap:.3g} with {num_query} query tokens"
            _LOGGER.warning(
                "the kernel of attention for few queries is wrong on %s: %s", build.device, words
            )
            return words
    ours_s, efficient_s = _seconds(build, ours, efficient, clock)
    return (
        "" if ours_s < efficient_s else f"{1e6 * ours_s:.3g} us against {1e6 * efficient_s:.3g} us"
    )


def _gap(build: Build, num_query: int, ours: Contender, efficient: Contender) -> float:
    """Return the largest difference between the two results.

    `ours` reads NaN in the columns outside every query's span.
    """
    query, key, value, mask = _inputs(build, num_query)
    expected = efficient.attend(query, key, value, efficient.convert(mask), None)
    is_unseen = mask.amax(2).isneginf()[..., None]  # [B, 1, T, 1]
    key, value = (states.masked_fill(is_unseen, torch.nan) for states in (key, value))
    output = ours.attend(query, key, value, ours.convert(mask), None)
    return float((output.float() - expected.float()).abs().amax())


def _seconds(
    build: Build, ours: Contender, efficient: Contender, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the median seconds per call of each implementation, timed alternately."""
    query, key, value, mask = _inputs(build, TIMED_QUERY_LEN)
    contenders = [(contender, contender.convert(mask)) for contender in (ours, efficient)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(NUM_TIMED + 1):
        for (contender, converted), times in zip(contenders, seconds, strict=True):
            _synchronize(build.device)
            begin = clock()
            for _ in range(NUM_CALLS):
                contender.attend(query, key, value, converted, None)
            _synchronize(build.device)
            if number:  # the first calls warm up
                times.append((clock() - begin) / NUM_CALLS)
    return median(seconds[0]), median(seconds[1])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _inputs(build: Build, num_query: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the query, key, value and mask of a trial.

    Rows differ in length and padding, and use the first columns of buffers. No generator is used,
    since the state of the user's generator must not change.
    """

    def states(num_heads: int, num_tokens: int, seed: int) -> Tensor:
        shape = BATCH_SIZE, num_heads, num_tokens, build.width
        num_entries = BATCH_SIZE * num_heads * num_tokens * build.width
        mixed = torch.arange(num_entries, dtype=torch.int32, device=build.device) + (seed << 28)
        for multiplier in _MULTIPLIERS:
            mixed = (mixed ^ (mixed >> 15)) * multiplier
        return (mixed.view(shape) * (3 / 2**31)).to(build.dtype)  # between -3 and 3

    query = states(build.groups * build.num_heads, num_query, 1)
    key, value = (states(build.num_heads, NUM_KEYS + 8, seed)[:, :, :NUM_KEYS] for seed in (2, 3))
    columns, rows = (
        torch.arange(NUM_KEYS, device=build.device),
        torch.arange(BATCH_SIZE, device=build.device),
    )
    # [B, Q]
    last = NUM_KEYS - num_query - 300 * rows[:, None] + torch.arange(num_query, device=build.device)
    is_hidden = (columns > last[..., None]) | (columns < 5 * rows[:, None, None])  # [B, Q, T]
    mask = torch.zeros(is_hidden.shape, dtype=build.dtype, device=build.device).masked_fill_(
        is_hidden, -torch.inf
    )
    return query, key, value, mask[:, None]


@cache
def _kernels(device: torch.device) -> Any:
    return operations("auto", device)  # looks for Triton again in every call
