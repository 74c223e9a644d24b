"""Triton kernels of every operation; importing this package requires Triton.

A call has two launches: `stats` reads every row once, `decide` tests the drafted tokens and samples the final token.
Block verification and entropies with an epsilon read the rows a second time in between. `cut` has three launches.
"""

from .attention_launch import attend, key_spans
from .operations import block, coupled, cut, greedy, reject, reject_and_test, sample, typical

__all__ = [
    "attend",
    "block",
    "coupled",
    "cut",
    "greedy",
    "key_spans",
    "reject",
    "reject_and_test",
    "sample",
    "typical",
]
