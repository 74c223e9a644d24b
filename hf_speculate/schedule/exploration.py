"""Exploration: trials of draft lengths that were not measured, or too rarely to rely on their seconds."""

from hf_speculate.schedule.costs import CostModel
from hf_speculate.schedule.work import RemainingWork

# Tuned on the simulated and recorded traces of tests/schedule.
_EXPLORE_GAIN = 1.15  # optimistic gain from which an unsettled K is tried
_EXPLORE_EVERY = 0.3  # rounds between two unsettled Ks, divided by the optimistic gain: 3 for a gain of 0.1
_LOOK_EVERY = 4  # rounds after which unsettled Ks are looked at again, if no other K was measured since


class Exploration:
    """Chooses unsettled draft lengths that may be much faster than the best one known."""

    def __init__(self) -> None:
        self._num_rounds = 0  # since the last trial
        self._num_sizes = 0  # sizes that had been measured when unsettled Ks were last looked at

    def next(
        self, costs: CostModel, work: RemainingWork, num_rows: int, max_draft_tokens: int, best_rate: float
    ) -> int:
        """The unsettled K with the highest optimistic rate; 0 if none may gain, or a trial must wait.

        Args:
            costs: measured seconds.
            work: what is left of the call.
            num_rows: B.
            max_draft_tokens: K_max.
            best_rate: tokens per second of the best K known.
        """
        self._num_rounds += 1
        if work.most_rounds < _LOOK_EVERY:  # too few rounds are left to profit from a trial
            return 0
        if costs.num_sizes == self._num_sizes and self._num_rounds % _LOOK_EVERY:
            return 0
        self._num_sizes = costs.num_sizes
        unsettled = [num for num in range(1, max_draft_tokens + 1) if not costs.is_settled(num_rows, num)]
        if not unsettled:
            return 0
        least_s = costs.best_case_s(num_rows, max_draft_tokens)
        rates = work.rates(least_s)
        promising = [num for num in unsettled if rates[num] > _EXPLORE_GAIN * best_rate]
        if not promising:
            return 0
        rounds_s = costs.rounds_s(num_rows, max_draft_tokens)
        likely_rates = work.rates([(least + likely) / 2 for least, likely in zip(least_s, rounds_s, strict=True)])
        choice = max(promising, key=lambda num: likely_rates[num])
        if self._num_rounds * (rates[choice] / best_rate - 1) < _EXPLORE_EVERY:
            return 0
        self._num_rounds = 0
        return choice
