"""Triton kernels for every operation; importing this package requires Triton.

An operation takes two launches. `stats` reads every row once. `decide` tests the drafted tokens and
samples the final token. Block verification, and typical acceptance with an epsilon, read the rows a
second time in between. `cut` and `cut_and_draw` take three launches each.
"""

from .attention_launch import attend, key_spans
from .launch import has_atomics
from .operations import (
    block,
    coupled,
    cut,
    cut_and_draw,
    greedy,
    reject,
    reject_and_test,
    sample,
    typical,
)

__all__ = [
    "attend",
    "block",
    "coupled",
    "cut",
    "cut_and_draw",
    "greedy",
    "has_atomics",
    "key_spans",
    "reject",
    "reject_and_test",
    "sample",
    "typical",
]
