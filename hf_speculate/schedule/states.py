"""The states of the adaptive schedule: drafting, plain steps, and a trial of the draft."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hf_speculate.schedule.history import CallRecord
from hf_speculate.schedule.options import Options

# Tuned on the simulated and recorded traces of tests/schedule.
_FIRST_WAIT = 2  # plain steps before the first trial
_RARER = 4  # times that wait in a call after a useless one
_LONGEST_WAIT = 256  # plain steps between two trials at most, once the budget pays for them
_RESTING_WAIT = 512  # plain steps without a trial in a call that rests
_SETTLED = 6  # drafted rounds in a row after which waits are reset


class Choice(NamedTuple):
    """The state after a round, and the draft length of the next one."""

    state: "State"
    num_draft_tokens: int


class State(Protocol):
    """Chooses the next round."""

    is_trial: bool = False
    """Whether the next round is a single drafted one among plain steps."""
    expects_gain: bool = True
    """Whether drafting was estimated to pay when that was last looked at, or is not known."""

    def next(self, options: Options) -> Choice:
        """Choose after a round, or before the first one."""
        ...


@dataclass(frozen=True)
class Waits:
    """Plain steps between trials: twice as many after each one that did not pay."""

    num_steps: int = _FIRST_WAIT

    @classmethod
    def after(cls, record: CallRecord) -> "Waits":
        """The first waits of a call, by what drafting gained in those before it."""
        return cls(_RARER * _FIRST_WAIT if record.num_useless else _FIRST_WAIT)

    @property
    def is_first(self) -> bool:
        """Whether no trial came before."""
        return self.num_steps == _FIRST_WAIT

    def longer(self) -> "Waits":
        return Waits(min(2 * self.num_steps, _LONGEST_WAIT))


@dataclass
class Drafting(State):
    """Drafts the K with the highest throughput, as long as the budget pays for it."""

    waits: Waits = Waits()
    num_rounds: int = 0

    def next(self, options: Options) -> Choice:
        untried = options.untried()
        if options.best == 0 and not untried:
            return Plain(self.waits).next(options)
        if options.wants_plain():
            return Choice(self, 0)
        num = options.affordable(untried or options.best)
        if num == 0:
            return Plain(self.waits).next(options)
        self.num_rounds += 1
        if self.num_rounds > _SETTLED:
            self.waits = Waits()
        return Choice(self, num)


@dataclass
class Plain(State):
    """Decodes plainly until drafting pays, or a trial is due; and the budget pays for it."""

    waits: Waits = Waits()
    num_steps: int = 0
    due: int = 0  # steps before the estimates are read again, as long as no row leaves
    num_rows: int = 0
    expects_gain = True

    def next(self, options: Options) -> Choice:
        choice = Choice(self, 0)  # without the estimates: they take 2 % of a small model's plain step
        if self.num_steps >= self.due or options.num_rows != self.num_rows:
            choice = self._look(options)
        self.num_steps, self.num_rows = self.num_steps + 1, options.num_rows
        return choice

    def _look(self, options: Options) -> Choice:
        if options.lacks_plain():
            return Choice(self, 0)
        self.expects_gain = options.best > 0
        num = options.affordable(options.best)
        if num:
            return Choice(Drafting(self.waits, num_rounds=1), num)
        if options.best:
            self.due = self.num_steps + options.steps_until(options.shortest)
        elif self.num_steps < self.waits.num_steps:
            self.due = 0 if self.waits.is_first else self.waits.num_steps  # one more step may change what is best
        else:
            return self._try(options)
        return Choice(self, 0)

    def _try(self, options: Options) -> Choice:
        num = options.trial
        self.due = self.num_steps + options.steps_until(num)
        if num == 0 or self.due > self.num_steps:
            return Choice(self, 0)
        options.begin_trial()
        return Choice(Trying(num, self.waits.longer()), num)


@dataclass
class Trying(State):
    """Drafts one round among plain steps, to see whether drafting pays by now."""

    num_draft_tokens: int
    waits: Waits
    is_trial = True

    def next(self, options: Options) -> Choice:
        if options.is_vain and not options.steps_until(self.num_draft_tokens):
            return Choice(self, self.num_draft_tokens)
        state = Drafting(self.waits) if options.best else Plain(self.waits)
        return state.next(options)


@dataclass
class Resting(State):
    """Decodes plainly without looking at any estimate, in a call that is not to try whether drafting pays."""

    num_steps: int = 0

    def next(self, options: Options) -> Choice:
        self.num_steps += 1
        if self.num_steps < _RESTING_WAIT:
            return Choice(self, 0)
        return Plain().next(options)
