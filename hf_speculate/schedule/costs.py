"""Cost model: estimate the time of verifications, draft steps and prompt reads from past rounds."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from hf_speculate.schedule.base import DraftPrior


@dataclass(frozen=True)
class Tuning:
    """Weights of the cost model.

    Chosen from the table of means in tests/schedule/laboratory.
    """

    num_samples: int = 30  # number of latest rounds of a size in the median
    slope: float = 0.03  # plain steps per draft token of a verification, before any measurement
    unknown_slope: float = 0.3  # the same if the target's weights are quantised
    line_weight: float = 3.0  # weight of the fitted line, in samples
    untried: float = 0.99  # factor for the estimated seconds of an unmeasured size
    stale: int = 150  # number of drafted rounds before plain steps are measured again
    max_factor: float = 2.0  # upper bound on a round's seconds, relative to the expected seconds
    changed: float = 0.02  # relative change of a median that updates the estimates


TUNING = Tuning()
_FEW_SAMPLES = 3  # with fewer plain steps, a faster verification means that they were slow
_LONG_READ = 16  # minimum number of tokens that take noticeable time to read


class Costs:
    """Estimated seconds of rounds by B and K.

    B is the number of rows, and K is the draft length. The estimates are medians that are shrunk
    towards a line.

    Args:
        prior: Prior costs before any drafted round.
        max_draft_tokens: K_max, >= 1.
        sizes: Ascending draft lengths of compiled or captured forwards. Other lengths run with the
            next larger size. None if all lengths run as they are.
    """

    def __init__(
        self, prior: DraftPrior, max_draft_tokens: int, sizes: Sequence[int] | None = None
    ) -> None:
        self.prior, self.max_draft_tokens = prior, max_draft_tokens
        self.sizes = sizes
        self.num_since_plain = 0  # number of drafted rounds since the last plain step
        self.start_s = 0.0  # extra time for the first forward of a new size
        # durations of the latest verifications, by B and K
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._medians: dict[tuple[int, int], float] = {}  # medians in use, by B and K
        self._plain: dict[int, float | None] = {}  # results of `plain_s`, by B
        # first measured duration for each size, not clipped
        self._first_s: dict[tuple[int, int], float] = {}
        self._steps: dict[int, deque[float]] = {}  # durations of draft steps, by B
        self._step_medians: dict[int, float] = {}  # medians in use, by B
        self._reads: deque[float] = deque(maxlen=3)  # seconds per token that the draft reads
        self._prefill_token_s = 0.0  # seconds per token and row in the target's prefill
        self._verifications: dict[int, list[float]] = {}  # results of `verifications_s`, by B

    def begin(self, prefill_s: float, num_tokens: int) -> None:
        """Record the duration of the target's prefill with `num_tokens` tokens per row."""
        if num_tokens < _LONG_READ:  # a cache was passed, or an encoder reads the text
            return
        token_s = prefill_s / num_tokens
        known_s = self._prefill_token_s
        self._prefill_token_s = min(token_s, known_s) if known_s else token_s

    def size_of(self, num_draft_tokens: int) -> int:
        """Return the compiled or captured draft length for K drafted tokens."""
        if self.sizes is None or not num_draft_tokens:
            return num_draft_tokens
        return self.sizes[min(bisect_left(self.sizes, num_draft_tokens), len(self.sizes) - 1)]

    def is_measured(self, num_rows: int, num_draft_tokens: int) -> bool:
        """Return whether a verification of this size has been measured."""
        return (num_rows, self.size_of(num_draft_tokens)) in self._samples

    @property
    def is_plain_due(self) -> bool:
        """Whether plain steps need a measurement.

        They do if they were never measured, were measured only during compilation, or were last
        measured long ago.
        """
        num_known = sum(
            len(samples) for (_, draft_len), samples in self._samples.items() if draft_len == 0
        )
        min_known = 1 if self.sizes is None else 2
        return num_known < min_known or self.num_since_plain >= TUNING.stale

    def add_verification(self, num_rows: int, num_draft_tokens: int, seconds: float) -> None:
        """Add the duration of a verification or plain step; clip pauses to a plausible value."""
        key = num_rows, self.size_of(num_draft_tokens)
        samples = self._samples.get(key)
        if self.plain_s(num_rows) is None:
            max_s = math.inf
        else:
            is_compiling = self.sizes is not None and samples is None
            max_factor = 1.0 if is_compiling else TUNING.max_factor
            max_s = max_factor * self.verifications_s(num_rows)[num_draft_tokens]
        if samples is None:
            samples = self._samples[key] = deque(maxlen=TUNING.num_samples)
            self._first_s[key] = seconds
        if not num_draft_tokens and self.num_since_plain >= TUNING.stale:
            for _ in range(len(samples) - 2):  # the machine's speed may have changed since then
                samples.popleft()
        samples.append(min(seconds, max_s))
        self.num_since_plain = self.num_since_plain + 1 if num_draft_tokens else 0
        if len(samples) == 2:
            self.start_s = max(self._first_s[key] - min(samples), 0.0)
        median_s, known_s = median_low(samples), self._medians.get(key)
        if known_s is None or abs(median_s - known_s) > TUNING.changed * known_s:
            self._medians[key] = median_s
            self._plain.clear()
            self._verifications.clear()
        elif len(samples) <= _FEW_SAMPLES:
            self._plain.clear()

    def add_draft(self, num_rows: int, num_draft_tokens: int, num_fed: int, seconds: float) -> None:
        """Add the duration of a draft that began by reading `num_fed` tokens per row."""
        num_steps = 1 if self.prior.is_parallel else num_draft_tokens
        if num_fed < _LONG_READ:
            # A source reads a few missing tokens as part of its first step.
            steps = self._steps.setdefault(num_rows, deque(maxlen=TUNING.num_samples))
            known_s = self._step_medians.get(num_rows)
            # `step_s` uses the nearest number of rows if this number is new.
            expected_s = self.step_s(num_rows) or math.inf
            steps.append(min(seconds / num_steps, TUNING.max_factor * expected_s))
            median_s = median_low(steps)
            if known_s is None or abs(median_s - known_s) > TUNING.changed * known_s:
                self._step_medians[num_rows] = median_s
                self._verifications.clear()
            return
        read_s = max(seconds - num_steps * self.step_s(num_rows), 0.0)
        expected_s = self.read_s(num_rows, num_fed)
        if self._reads or self._prefill_token_s:  # the first read may also compile
            read_s = min(read_s, TUNING.max_factor * expected_s)
        self._reads.append(read_s / (num_rows * num_fed))

    def plain_s(self, num_rows: int) -> float | None:
        """Return the duration of a plain step with B rows; None before any measurement."""
        if num_rows not in self._plain:
            self._plain[num_rows] = self._between(num_rows)
        return self._plain[num_rows]

    def _between(self, num_rows: int) -> float | None:
        """Interpolate the duration of a plain step with B rows between the nearest measured B."""
        known = sorted(rows for rows, draft_len in self._medians if draft_len == 0)
        if not known:
            return None
        if num_rows <= known[0] or num_rows >= known[-1]:
            nearest = known[0] if num_rows <= known[0] else known[-1]
            return self._plain_s(nearest)
        right = bisect_left(known, num_rows)
        if known[right] == num_rows:
            return self._plain_s(num_rows)
        low, high = known[right - 1], known[right]
        low_s, high_s = self._plain_s(low), self._plain_s(high)
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)

    def _plain_s(self, num_rows: int) -> float:
        """Return the median for a measured number of rows, at most that of any longer forward."""
        plain_s = self._medians[num_rows, 0]
        if len(self._samples[num_rows, 0]) >= _FEW_SAMPLES:
            return plain_s
        longer = [
            seconds
            for (rows, draft_len), seconds in self._medians.items()
            if draft_len and rows >= num_rows and len(self._samples[rows, draft_len]) > 1
        ]
        return min([plain_s, *longer])

    def step_s(self, num_rows: int) -> float:
        """Return the duration of a draft step with B rows."""
        if not self._step_medians:
            return self.prior.draft_steps(1) * (self.plain_s(num_rows) or 1.0)
        nearest = min(self._step_medians, key=lambda rows: abs(rows - num_rows))
        return self._step_medians[nearest]

    def drafts_s(self, num_rows: int) -> list[float]:
        """Return the duration [K_max + 1] of a draft by K, without reading the prompt."""
        step_s, lens = self.step_s(num_rows), range(self.max_draft_tokens + 1)
        return [
            step_s * (min(draft_len, 1) if self.prior.is_parallel else draft_len)
            for draft_len in lens
        ]

    def read_s(self, num_rows: int, num_tokens: int) -> float:
        """Return how long the draft takes to read `num_tokens` tokens per row."""
        if num_tokens < _LONG_READ:
            return 0.0
        if self._reads:  # one line would be too long
            token_s = num_rows * median_low(self._reads)
        else:
            token_s = self.prior.draft_steps(1) * self._prefill_token_s
        return max(num_tokens * token_s, self.step_s(num_rows))

    def verifications_s(self, num_rows: int) -> list[float]:
        """Return a verification's duration [K_max + 1] by K, in plain steps before any round."""
        known = self._verifications.get(num_rows)
        if known is None:
            known = self._verifications[num_rows] = self._fit(num_rows)
        return known

    def _fit(self, num_rows: int) -> list[float]:
        """Fit the duration [K_max + 1] of a verification with least squares over the medians by K.

        The plain step and the prior slope count as two samples each. If there are few samples for
        this number of rows, the fit uses the nearest measured number of rows, scaled by the ratio
        of the plain steps.
        """
        plain_s = self.plain_s(num_rows) or 1.0
        counts: dict[int, int] = {}
        for (rows, draft_len), samples in self._samples.items():
            counts[rows] = counts.get(rows, 0) + (len(samples) if draft_len else 0)
        min_count = min(4, max(counts.values(), default=0))
        enough = [rows for rows, count in counts.items() if count >= min_count]
        near = min(enough, key=lambda rows: abs(math.log(rows / num_rows)), default=num_rows)
        scale = plain_s / (self.plain_s(near) or plain_s)
        points = {
            size: scale * s for (rows, size), s in self._medians.items() if rows == near and size
        }
        weights = {size: float(len(self._samples[near, size])) for size in points} | {0: 2.0}
        points[0] = plain_s
        total = sum(weights.values())
        mean_size = sum(weight * size for size, weight in weights.items()) / total
        mean_s = sum(weight * points[size] for size, weight in weights.items()) / total
        slope = TUNING.slope if self.prior.is_verification_known else TUNING.unknown_slope
        square = sum(weight * (size - mean_size) ** 2 for size, weight in weights.items()) + 2.0
        product = 2.0 * slope * plain_s + sum(
            weight * (size - mean_size) * (points[size] - mean_s)
            for size, weight in weights.items()
        )
        slope_s = max(product / square, 0.0)
        seconds = [plain_s]
        for draft_len in range(1, self.max_draft_tokens + 1):
            size = self.size_of(draft_len)
            line_s = mean_s + slope_s * (size - mean_size)
            if size in points:
                weight, line_weight = weights[size], TUNING.line_weight
                line_s = (weight * points[size] + line_weight * line_s) / (weight + line_weight)
            else:
                line_s *= TUNING.untried
            seconds.append(max(line_s, 0.5 * plain_s))
        return seconds
