"""Machine speed: whether forwards have become faster or slower since they were measured."""

from statistics import median_low

_NUM_ROUNDS = 5  # newest drafted rounds, whose median counts: a pause of the process is a single one
_CHANGE = 1.4  # factor that is no noise: rounds vary by a fifth, their median by a tenth


class MachineSpeed:
    """Compares the seconds of drafted rounds with what rounds of their size usually take.

    Other work on the machine, its clock rate and a growing context change the seconds of all forwards together.
    """

    def __init__(self) -> None:
        self._ratios: tuple[float, ...] = ()  # ratios of the newest rounds

    def add(self, ratio: float) -> float:
        """Add a round's seconds over what is usual; the factor by which all have changed, 1 if they have not."""
        self._ratios = (*self._ratios, ratio)[-_NUM_ROUNDS:]
        factor = median_low(self._ratios)
        if len(self._ratios) < _NUM_ROUNDS or 1 / _CHANGE < factor < _CHANGE:
            return 1.0
        self._ratios = ()
        return factor
