"""Track a training budget across interruptions."""

import time


class Budget:
    """Wall-clock budget and its elapsed share."""

    def __init__(self, minutes: float, spent_s: float = 0.0) -> None:
        self.total_s = minutes * 60
        self.spent_s = spent_s
        self.last_s = time.monotonic()

    def tick(self) -> float:
        """Add the time since the last call and return the elapsed share in 0..1."""
        now_s = time.monotonic()
        self.spent_s += now_s - self.last_s
        self.last_s = now_s
        return min(1.0, self.spent_s / self.total_s)


def warm_then_linear(share: float, warmup: float) -> float:
    """Return the scale of the learning rate at `share` of the budget.

    The scale rises over `warmup`, then falls linearly to zero.
    """
    return share / warmup if share < warmup else (1 - share) / (1 - warmup)
