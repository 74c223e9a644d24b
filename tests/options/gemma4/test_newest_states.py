"""Test the state of each row's newest token, the only target state that an assistant reads."""

import torch

from hf_speculate.options.heads.hidden_states import NewestStates
from hf_speculate.types import Scored


def states_of(*rows):
    """Return states as from a forward with this many columns; row r has 10 r plus the column."""
    hidden = torch.tensor(rows, dtype=torch.float64)[..., None]  # [B, Q, 1]
    return Scored(hidden, (hidden,))


def make():
    return NewestStates([-1], None, lambda states: states)


def test_plain_rounds_keep_the_newest_state_and_a_count():
    states = make()
    states.add_prompt(states_of([0, 1, 2], [10, 11, 12]), [3, 2], 3)
    for counts in ([1, 1], [2, 1], [1, 0]):
        states.add(states_of([3, 4, 5], [13, 14, 15]), counts)
    assert states.counts == [5, 3]
    sizes = [value.shape[1] for value in vars(states).values() if isinstance(value, torch.Tensor)]
    assert sizes == [1]  # The size does not grow with the rounds.
    assert states.take(torch.device("cpu"))[..., 0].tolist() == [[3.0], [13.0]]
    assert states.counts == [0, 0]


def test_states_follow_leaving_and_joining_rows():
    states, other = make(), make()
    states.add_prompt(states_of([0, 1], [10, 11]), [2, 2], 2)
    other.add_prompt(states_of([20]), [1], 1)
    states.rows([1])
    states.join(other)
    states.add(states_of([12, 13], [21, 22]), [2, 1])
    assert states.counts == [3, 2]
    assert states.take(torch.device("cpu"), [2, 2])[..., 0].tolist() == [[13.0], [21.0]]
    assert states.counts == [1, 0]
