"""Draft the given numbers of tokens and record the outcomes."""

from itertools import cycle

from hf_speculate.schedule import Choice, Schedule

LENS = (0, 3, 0, 0, 5, 1, 0, 2, 0, 0, 0, 4)


class ScriptedSchedule(Schedule):
    """Schedule with given draft lengths, repeated in a cycle."""

    is_trial = False

    def __init__(self, lens=LENS, is_free=False):
        self._lens, self._is_free = cycle(lens), is_free
        self.outcomes, self.num_unread, self.ahead = [], [], []

    def begin(self, prefill_s, num_read):
        self.prompt = prefill_s, num_read

    def choose(self, rows, num_rows, max_tokens, num_unread=0):
        num_tokens = min(next(self._lens), max_tokens)
        self.ahead.append(rows)
        self.num_unread.append(num_unread)
        return Choice(num_tokens, 0 if self._is_free else num_tokens, self.is_trial)

    def update(self, outcome):
        self.outcomes.append(outcome)
