"""HiddenStates hands over each row's own states in their order, without padding and without what was refused."""

import pytest
import torch

from hf_speculate.engine.hidden_states import HiddenStates
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.types import Scored

CPU = torch.device("cpu")


def scored(values: list[list[int]]) -> Scored:
    """A forward whose last states [B, Q, 1] are these numbers; those of the layer below are others."""
    states = torch.tensor(values, dtype=torch.float32)[..., None]
    return Scored(torch.zeros(*states.shape[:2], 5), (states + 1000, states))


def own(states: HiddenStates) -> list[list[int]]:
    counts = states.counts
    return [row[:count].tolist() for row, count in zip(states.take(CPU)[..., 0].int(), counts, strict=True)]


def test_one_round_is_handed_over_as_it_came():
    states = HiddenStates()
    states.add(scored([[1, 2, 3], [4, 5, 6]]), [1, 2])
    assert states.counts == [1, 2]
    taken = states.take(CPU)
    assert taken.shape == (2, 2, 1)
    assert taken[..., 0].tolist() == [[1, 2], [4, 5]]
    assert states.counts == []


@pytest.mark.parametrize("chunks", [[4], [1, 3], [2, 2], [3, 1], [1, 1, 1, 1]])
def test_a_prompt_is_without_its_padding_however_it_is_cut(chunks):
    prompt, states, num_ahead = torch.tensor([[0, 0, 0, 1], [2, 3, 4, 5], [0, 6, 7, 8]]), HiddenStates(), 4
    for chunk in prompt.split(chunks, dim=1):
        states.add_prompt(scored(chunk.tolist()), [1, 4, 3], num_ahead)
        num_ahead -= chunk.shape[1]
    assert states.counts == [1, 4, 3]
    assert own(states) == [[1], [2, 3, 4, 5], [6, 7, 8]]


def test_more_real_tokens_than_were_fed_are_those_of_a_passed_cache():
    states = HiddenStates()
    states.add_prompt(scored([[1, 2], [0, 3]]), [9, 1], 2)
    assert own(states) == [[1, 2], [3]]


def test_rounds_join_row_by_row_and_rows_leave():
    states = HiddenStates()
    states.add_prompt(scored([[0, 1], [2, 3], [4, 5]]), [1, 2, 2], 2)
    states.add(scored([[6], [7], [8]]), [1, 1, 1])
    states.add(scored([[9, 10, 11], [12, 13, 14], [15, 16, 17]]), [3, 1, 0])
    states.rows([2, 0])
    states.add(scored([[18, 19], [20, 21]]), [2, 1])
    assert states.counts == [5, 6]
    assert own(states) == [[4, 5, 8, 18, 19], [1, 6, 9, 10, 11, 20]]


@pytest.mark.parametrize("layers", [None, (), (torch.zeros(1, 1, 4),)])
def test_a_model_without_states_for_every_token_is_refused(layers):
    with pytest.raises(UnsupportedModelError, match="must return a hidden state for every token"):
        HiddenStates().add(Scored(torch.zeros(1, 2, 5), layers), [1])
