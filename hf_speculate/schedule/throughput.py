"""What is still to be decoded, and how fast that is at every K."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_LEAST_S = 1e-9  # a round that a coarse clock saw no time pass in


class Outlook(NamedTuple):
    """The live rows after a round."""

    tokens: Sequence[Sequence[float]]  # [N, K_max + 1] that a round of K drafts is expected to emit in a row
    num_left: Sequence[int]  # [N] tokens that each may still emit, >= 1
    start_s: float = 0.0  # before the first draft: its prompt, where it has not read it yet

    def rates(self, rounds_s: Sequence[float], alone_s: Sequence[float]) -> list[float]:
        """[K_max + 1] tokens per second until the last row ends.

        A call is as slow as its slowest row, so a K that serves most rows well may be the wrong one. Rows leave as they
        end, and a round's seconds fall with them from those of all rows to those of one, in equal steps.

        Args:
            rounds_s: [K_max + 1] seconds of a round of all rows.
            alone_s: [K_max + 1] seconds of a round of one row.
        """
        steps = max(len(self.num_left) - 1, 1)
        rates = []
        for num, (most_s, least_s) in enumerate(zip(rounds_s, alone_s, strict=True)):
            ends = sorted(left / tokens[num] for left, tokens in zip(self.num_left, self.tokens, strict=True))
            spent_s = ends[0] * most_s + (self.start_s if num else 0.0)
            for gone, (before, end) in enumerate(pairwise(ends), 1):
                spent_s += (end - before) * (most_s + gone / steps * (least_s - most_s))
            rates.append(sum(self.num_left) / max(spent_s, _LEAST_S))
        return rates
