"""How many tokens a round of K drafts is expected to emit."""

from collections.abc import Sequence

# Tuned on the simulated traces of tests/schedule: a round's weight is halved after about seven rounds.
_DECAY = 0.92
_SLOW_DECAY = 0.98  # of what the first position falls back on
_PRIOR_ACCEPTANCE = 0.8  # of the first position, before anything was seen; optimistic, so that drafting is tried
_PRIOR_WEIGHT = 1.0  # of the prior, in observations
_NEIGHBOUR_WEIGHT = 4.0  # of the position before, for what is known of a position
_OTHER_TEXT = 0.5  # observations that an earlier call's text stands for
_ROW_WEIGHT = 2.0  # refusals that a row must show before it counts for more than the batch


class AcceptanceModel:
    """Acceptance by position with exponential decay, pooled over rows, and each row's own rate of refusals.

    A position counts as refused also where the drafter stopped before it, so that early ends of a draft lower what
    longer ones promise. A position that was never reached is taken to be as good as the one before it. A row that is
    refused f times as often as its batch has f times the batch's odds of a refusal at every position.
    """

    def __init__(self, max_draft_tokens: int):
        self._accepted = [0.0] * max_draft_tokens
        self._judged = [0.0] * max_draft_tokens
        self._long_run = (0.0, 0.0)  # accepted and judged first positions, of a longer past
        self._row_refusals: dict[int, tuple[float, float]] = {}  # by row id: seen, and expected at the batch's rate

    def observe(self, row_ids: Sequence[int], num_accepted: Sequence[int], num_draft_tokens: int) -> None:
        """Learn from a round in which `num_draft_tokens` >= 1 were asked for; other arguments as in `RoundOutcome`."""
        num_positions = min(num_draft_tokens, len(self._judged))
        refusals = [1 - share for share in self._by_position(num_positions)]
        self._fade(_DECAY)
        accepted, judged = self._long_run
        accepted = _SLOW_DECAY * accepted + sum(num > 0 for num in num_accepted)
        self._long_run = accepted, _SLOW_DECAY * judged + len(num_accepted)
        for row_id, accepted in zip(row_ids, num_accepted, strict=True):
            num_judged = min(accepted + 1, num_positions)
            for position in range(num_judged):
                self._judged[position] += 1
                self._accepted[position] += position < accepted
            seen, expected = self._row_refusals.get(row_id, (0.0, 0.0))
            seen = _DECAY * seen + (accepted < num_positions)
            self._row_refusals[row_id] = seen, _DECAY * expected + sum(refusals[:num_judged])

    def recent(self) -> "AcceptanceModel":
        """A copy for another text, to which this one counts as half an observation."""
        copy = AcceptanceModel(len(self._judged))
        share = _OTHER_TEXT / max(self._judged[0], _OTHER_TEXT)
        copy._accepted = [share * value for value in self._accepted]
        copy._judged = [share * value for value in self._judged]
        accepted, judged = self._long_run
        share = _OTHER_TEXT / max(judged, _OTHER_TEXT)
        copy._long_run = share * accepted, share * judged
        return copy

    def soften(self, share: float) -> None:
        """Keep only `share`, in [0, 1], of the weight of what was seen: it was seen some time ago."""
        self._fade(share)
        self._row_refusals.clear()

    def expected_tokens(self, row_ids: Sequence[int]) -> list[list[float]]:
        """[N, K_max + 1] tokens that a round of K = 0, 1, ... drafts emits in each row."""
        refusals = [1 - share for share in self._by_position(len(self._judged))]
        expected = []
        for row_id in row_ids:
            factor = self._row_factor(row_id) if len(row_ids) > 1 else 1.0
            tokens, prefix = [1.0], 1.0
            for refusal in refusals:
                prefix *= max(1 - factor * refusal, 0.0)
                tokens.append(tokens[-1] + prefix)
            expected.append(tokens)
        return expected

    def _by_position(self, num: int) -> list[float]:
        """[num] acceptance of a position whose predecessors were accepted."""
        accepted, judged = self._long_run
        share = (accepted + _PRIOR_WEIGHT * _PRIOR_ACCEPTANCE) / (judged + _PRIOR_WEIGHT)
        shares: list[float] = []
        for accepted, judged in zip(self._accepted[:num], self._judged[:num], strict=True):
            weight = _NEIGHBOUR_WEIGHT if shares else _PRIOR_WEIGHT
            share = (accepted + weight * share) / (judged + weight)
            shares.append(share)
        return shares

    def _row_factor(self, row_id: int) -> float:
        seen, expected = self._row_refusals.get(row_id, (0.0, 0.0))
        return (seen + _ROW_WEIGHT) / (expected + _ROW_WEIGHT)

    def _fade(self, share: float) -> None:
        self._accepted = [share * value for value in self._accepted]
        self._judged = [share * value for value in self._judged]
