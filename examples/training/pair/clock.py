"""Keep a training budget over interruptions."""

import time


class Budget:
    """Elapsed share of a wall-clock budget."""

    def __init__(self, minutes: float, spent_s: float = 0.0) -> None:
        self.total_s = minutes * 60
        self.spent_s = spent_s
        self.last_s = time.monotonic()

    def tick(self) -> float:
        """Add the time since the last call; return the elapsed share in 0..1."""
        now_s = time.monotonic()
        self.spent_s += now_s - self.last_s
        self.last_s = now_s
        return min(1.0, self.spent_s / self.total_s)


def warm_then_linear(share: float, warmup: float) -> float:
    """Return the learning rate's scale at `share` of the budget.

    It rises over `warmup`, then falls linearly to zero.
    """
    return share / warmup if share < warmup else (1 - share) / (1 - warmup)
