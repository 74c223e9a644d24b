"""The acceptance model: how many tokens a round of K drafts is expected to emit."""

from collections.abc import Sequence

from hf_speculate.draft.acceptance_rates import AcceptanceCounts

# Tuned on the simulated traces of tests/schedule, and on those of the bundled pair with its rounds' seconds.
# The weight of a round of one row is halved after about eight rounds, that of one of eight rows after four.
_DECAY = 0.92
_BATCH_POWER = 0.4  # power of the number of rows: with more observations a round, older ones may weigh less
_SLOW_DECAY = 0.98  # factor of the long-run rate of the first position, per observation
_PRIOR_ACCEPTANCE = 0.8  # rate of the first position before any observation; optimistic, so that drafting is tried
_PRIOR_WEIGHT = 1.0  # weight of the prior, in observations
_LONG_RUN_WEIGHT = 6.0  # weight of the long-run rate, in observations, while recent ones are accepted about as often
_NO_WEIGHT = 1e-9  # weight of a prior that counts only without observations
_NEIGHBOUR_WEIGHT = 6.0  # weight of the previous position's rate, as the prior of a position
_OTHER_CALL = 0.5  # observations that an earlier call counts as
_ALIKE_CALL = 14.0  # the same, if the call before it was accepted about as often: few rejections then end no drafting
_ALIKE_RATE = 0.25  # largest difference of rates that are about the same
_ROW_WEIGHT = 4.0  # rejections that a row must show before it counts for more than the batch


class AcceptanceModel:
    """Acceptance by position with exponential decay, pooled over rows, and each row's own rate of rejections.

    A position also counts as rejected if the drafter stopped before it, so that early ends of a draft lower the
    estimate of longer ones. A position that was never reached is taken to be as good as the previous one. A row that is
    rejected f times as often as its batch has f times the batch's odds of a rejection at every position.
    """

    def __init__(self, max_draft_tokens: int):
        self._positions = AcceptanceCounts(max_draft_tokens)
        self._long_run = AcceptanceCounts(1)  # counts of the first position
        self._rate_before: float | None = None  # rate of the first position in the call before
        self._row_counts: dict[int, tuple[float, float]] = {}  # by row id: rejections and verified tokens

    def observe(self, row_ids: Sequence[int], num_accepted: Sequence[int], num_draft_tokens: int) -> None:
        """Learn from a round in which `num_draft_tokens` >= 1 were asked for; other arguments as in `RoundOutcome`."""
        num_positions = min(num_draft_tokens, len(self._positions.verified))
        self._positions.decay(_DECAY ** len(row_ids) ** _BATCH_POWER)
        self._long_run.decay(_SLOW_DECAY)
        earlier, self._row_counts = self._row_counts, {}  # rows that have left do not come back
        for row_id, accepted in zip(row_ids, num_accepted, strict=True):
            self._long_run.add(0, accepted > 0)
            num_verified = min(accepted + 1, num_positions)
            for position in range(num_verified):
                self._positions.add(position, position < accepted)
            rejected, verified = earlier.get(row_id, (0.0, 0.0))
            rejected = _DECAY * rejected + (accepted < num_positions)
            self._row_counts[row_id] = rejected, _DECAY * verified + num_verified

    def recent(self) -> "AcceptanceModel":
        """A copy for the next call, in which this one counts as few observations: more after a call like it."""
        copy, before = AcceptanceModel(len(self._positions.verified)), self._rate_before
        copy._rate_before = rate = self._long_run.rate(0, _PRIOR_ACCEPTANCE, _NO_WEIGHT)
        is_alike = before is not None and abs(rate - before) < _ALIKE_RATE
        weight = _ALIKE_CALL if is_alike else _OTHER_CALL
        pairs = ((self._positions, copy._positions), (self._long_run, copy._long_run))
        for source, target in pairs:
            target.accepted, target.verified = source.accepted, source.verified
            target.decay(weight / max(source.verified[0], weight))
        return copy

    def soften(self, share: float) -> None:
        """Keep only `share`, in [0, 1], of the weight of past observations."""
        self._positions.decay(share)
        self._row_counts.clear()

    def expected_tokens(self, row_ids: Sequence[int]) -> list[list[float]]:
        """[N][K_max + 1] tokens that a round of K = 0, 1, ... drafts emits in each row."""
        rejections = [1 - rate for rate in self._by_position(len(self._positions.verified))]
        factors = self._row_factors(row_ids) if len(row_ids) > 1 else [1.0]
        tokens = []
        for factor in factors:
            total = share = 1.0
            tokens.append(of_row := [total])
            for rejection in rejections:
                share *= max(1 - factor * rejection, 0.0)
                total += share
                of_row.append(total)
        return tokens

    def _by_position(self, num: int) -> list[float]:
        """[num] acceptance rate of each position, given that all earlier positions were accepted."""
        rate = self._long_run.rate(0, _PRIOR_ACCEPTANCE, _PRIOR_WEIGHT)
        weight = _PRIOR_WEIGHT
        if abs(self._positions.rate(0, rate, _PRIOR_WEIGHT) - rate) < _ALIKE_RATE:
            weight = max(min(self._long_run.verified[0], _LONG_RUN_WEIGHT), _PRIOR_WEIGHT)
        rates: list[float] = []
        for position in range(num):
            rate = self._positions.rate(position, rate, _NEIGHBOUR_WEIGHT if rates else weight)
            rates.append(rate)
        return rates

    def _row_factors(self, row_ids: Sequence[int]) -> list[float]:
        """[N] rejections of each row over those of the batch, in as many verified tokens."""
        num_verified = sum(self._positions.verified) + _PRIOR_WEIGHT
        rejection = 1 - (sum(self._positions.accepted) + _PRIOR_WEIGHT * _PRIOR_ACCEPTANCE) / num_verified
        counts = [self._row_counts.get(row_id, (0.0, 0.0)) for row_id in row_ids]
        return [(seen + _ROW_WEIGHT) / (rejection * verified + _ROW_WEIGHT) for seen, verified in counts]
