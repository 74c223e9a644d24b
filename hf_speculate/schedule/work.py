"""The remaining work of a call: the throughput that each draft length is expected to have until the last row ends."""

from collections.abc import Sequence

LEAST_S = 1e-9  # seconds of a round if the clock is too coarse to see any


class RemainingWork:
    """The live rows after a round, and the throughput estimate of each K for them.

    Args:
        tokens: [N][K_max + 1] expected tokens per round of each row.
        num_left: [N] tokens that each row may still emit, >= 1.
        start_s: seconds before the first draft: the draft's prefill, if it is still to come.
    """

    def __init__(self, tokens: Sequence[Sequence[float]], num_left: Sequence[int], start_s: float = 0.0):
        self.max_tokens_of_one_draft = max(of_row[1] for of_row in tokens)  # expected tokens of a round with K = 1
        self._num_left = sum(num_left)
        self._start_s = start_s
        by_row = [[left / num for num in of_row] for left, of_row in zip(num_left, tokens, strict=True)]
        # by K, of the slowest row, and the sum of all rows
        self._num_rounds = [(max(of_k), sum(of_k)) for of_k in zip(*by_row, strict=True)]
        self._num_others = max(len(tokens) - 1, 1)
        self.most_rounds = self._num_rounds[-1][0]  # rounds of the slowest row, with drafts of K_max tokens

    def rates(self, rounds_s: Sequence[float], alone_share: float = 1.0) -> list[float]:
        """[K_max + 1] tokens per second until the last row ends.

        A call is as slow as its slowest row, so the K that suits most rows may be the wrong one. Rows leave as they
        end, and a round's seconds fall from those of all rows to those of one in equal steps.

        Args:
            rounds_s: [K_max + 1] seconds of a round of all rows.
            alone_share: seconds of a round of one row over those of all rows.
        """
        rates, start_s = [], 0.0
        for round_s, (most, total) in zip(rounds_s, self._num_rounds, strict=True):
            num_rounds = alone_share * most + (1 - alone_share) * (total - most) / self._num_others
            rates.append(self._num_left / max(num_rounds * round_s + start_s, LEAST_S))
            start_s = self._start_s
        return rates
