"""The Triton kernels behind every operation; importing this needs Triton.

A call is two launches: `stats` reads every row once, `decide` walks the chains and draws. Block verification and
entropies with an epsilon look at the rows a second time in between.
"""

from .operations import block, coupled, greedy, reject, reject_and_test, sample, typical

__all__ = ["block", "coupled", "greedy", "reject", "reject_and_test", "sample", "typical"]
