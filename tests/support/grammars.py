"""Define grammars over token ids as logits processors: stateful, with rollback, and stateless."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

import hf_speculate


class Brackets:
    """Automaton for two kinds of matching brackets, nested at most four deep.

    A text may end outside brackets. The id modulo 8 decides: 0 and 1 open, 2 and 3 close, 4 to 6
    are letters, and 7 is allowed only outside brackets. After a forbidden token, the state is
    None and nothing is forbidden.
    """

    start: tuple[int, ...] = ()
    max_depth = 4

    def step(self, state: Any, token_id: int) -> Any:
        token_type = token_id % 8
        if state is None or not self._fits(state, token_type):
            return None
        return (*state, token_type) if token_type < 2 else state[:-1] if token_type < 4 else state

    def allowed(self, state: Any, vocab_size: int) -> list[bool]:
        by_type = [self._fits(state, token_type) for token_type in range(8)]
        return [by_type[token_id % 8] for token_id in range(vocab_size)]

    def _fits(self, state: tuple[int, ...], token_type: int) -> bool:
        if token_type < 2:
            return len(state) < self.max_depth
        if token_type < 4:
            return bool(state) and state[-1] == token_type - 2
        return token_type < 7 or not state


def masked(machine: Brackets, states: Sequence[Any], scores: Tensor) -> Tensor:
    """Set scores [B, V] to -inf where a row's state forbids an id; None forbids nothing."""
    size = scores.shape[1]
    allowed = [[True] * size if state is None else machine.allowed(state, size) for state in states]
    return scores.masked_fill(~torch.tensor(allowed, device=scores.device), -torch.inf)


class Grammar(LogitsProcessor):
    """Grammar that follows the text token by token, like those in grammar libraries.

    It is not written for blocks of tokens.
    """

    def __init__(self, machine: Brackets):
        self.machine = machine
        self.states: list[list[Any]] | None = None  # [B] states at each call, the newest call last

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.states is None:
            self.states = [[self.machine.start] for _ in input_ids]
        else:
            for states, token_id in zip(self.states, input_ids[:, -1].tolist(), strict=True):
                states.append(self.machine.step(states[-1], token_id))
        return masked(self.machine, [states[-1] for states in self.states], scores)


class RollbackGrammar(Grammar):
    """Grammar with the three methods of `RollbackProcessor`."""

    def rollback(self, num_calls: Sequence[int]) -> None:
        for states, num in zip(self.states, num_calls, strict=True):
            assert 0 <= num < len(states)
            del states[len(states) - num :]

    def rows(self, indices: Sequence[int]) -> None:
        self.states = [self.states[row] for row in indices]

    def fork(self) -> "RollbackGrammar":
        copy = RollbackGrammar(self.machine)
        copy.states = [states[-1:] for states in self.states]
        return copy


@hf_speculate.register_row_wise
class PureGrammar(LogitsProcessor):
    """Stateless grammar; every call reads all new tokens."""

    def __init__(self, machine: Brackets, prompt_len: int):
        self.machine = machine
        self.prompt_len = prompt_len

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return masked(self.machine, [self._state(ids) for ids in input_ids.tolist()], scores)

    def _state(self, token_ids: list[int]) -> Any:
        state = self.machine.start
        for token_id in token_ids[self.prompt_len :]:
            state = self.machine.step(state, token_id)
        return state


class WatchedGrammar(RollbackGrammar):
    """Grammar that records each row's followed tokens when drafts begin and after rollbacks."""

    def __init__(self, machine: Brackets, prompt_len: int):
        super().__init__(machine)
        self.prompt_len = prompt_len
        self.row_ids: list[int] = []  # [B] output position of each row
        self.followed: list[list[int]] = []  # [B]
        # output position of a row -> tokens that the row has followed
        self.log: list[tuple[int, list[int]]] = []
        self.num_forks = self.num_rollbacks = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.states is None:
            assert input_ids.shape[1] == self.prompt_len
            self.row_ids = list(range(len(input_ids)))
            self.followed = [[] for _ in self.row_ids]
        else:
            for followed, ids in zip(self.followed, input_ids.tolist(), strict=True):
                followed.append(ids[-1])
                assert ids[len(ids) - len(followed) :] == followed
        return super().__call__(input_ids, scores)

    def rollback(self, num_calls: Sequence[int]) -> None:
        super().rollback(num_calls)
        self.num_rollbacks += 1
        for followed, num in zip(self.followed, num_calls, strict=True):
            del followed[len(followed) - num :]
        self._note()

    def rows(self, indices: Sequence[int]) -> None:
        super().rows(indices)
        self.row_ids = [self.row_ids[row] for row in indices]
        self.followed = [self.followed[row] for row in indices]

    def fork(self) -> RollbackGrammar:
        self.num_forks += 1
        self._note()
        return super().fork()

    def _note(self) -> None:
        self.log += [
            (row, list(followed)) for row, followed in zip(self.row_ids, self.followed, strict=True)
        ]
