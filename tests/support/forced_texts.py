"""Define a tokenizer with letters and pairs, and grammars that often force the text."""

from collections.abc import Sequence
from functools import cache
from string import ascii_lowercase
from typing import Any

from torch import Tensor

import hf_speculate
from tests.support.grammars import PureGrammar, RollbackGrammar

# Allowed characters at each position of a text; the pattern repeats.
PATTERN = ("a", "b", "c", "d", "abcd", "c", "d", "b", "abd", "bc")


class Pieces:
    """Tokenizer with single letters and pairs such as "ab".

    From the left, it takes the longest piece that matches.
    """

    def __init__(self, size: int):
        letters = ascii_lowercase[: size // 2]
        pairs = [
            a + letters[(at + 1 + at // 26) % len(letters)] for at, a in enumerate(2 * letters)
        ]
        self.pieces = ["\n", *letters, *pairs][:size]
        self.ids = {piece: token_id for token_id, piece in enumerate(self.pieces)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        token_ids = []
        while text:
            piece = text[:2] if text[:2] in self.ids else text[:1]
            token_ids.append(self.ids[piece])
            text = text[len(piece) :]
        return token_ids

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return "".join(
            self.pieces[token_id] for token_id in token_ids if token_id < len(self.pieces)
        )


@cache
def pieces(size: int) -> Pieces:
    return Pieces(size)


class TextMachine:
    """Automaton for a pattern. A state is a position in the text, or None after a forbidden token.

    If the text does not repeat its pattern, it ends with the token `end_id`.
    """

    start = 0

    def __init__(self, size: int, pattern: Sequence[str] = PATTERN, end_id: int | None = None):
        self.pieces, self.pattern, self.end_id = pieces(size).pieces, pattern, end_id
        self._allowed: dict[int, list[bool]] = {}

    def step(self, state: int | None, token_id: int) -> int | None:
        if state is None or token_id >= len(self.pieces):
            return None
        for character in self.pieces[token_id]:
            if character not in self._at(state):
                return None
            state += 1
        return state

    def allowed(self, state: int, vocab_size: int) -> list[bool]:
        place = state % len(self.pattern) if self.end_id is None else state
        if place not in self._allowed:
            flags = [self.step(place, token_id) is not None for token_id in range(len(self.pieces))]
            if not self._at(place) and self.end_id is not None:
                flags[self.end_id] = True
            self._allowed[place] = flags
        flags = self._allowed[place]
        return [*flags, *[False] * (vocab_size - len(flags))][:vocab_size]

    def forced(self, state: int | None, most: int = 1000) -> str:
        """Return the characters that follow without a choice."""
        text = ""
        while state is not None and len(text) < most and len(self._at(state)) == 1:
            text, state = text + self._at(state), state + 1
        return text

    def _at(self, state: int) -> str:
        if self.end_id is not None and state >= len(self.pattern):
            return ""
        return self.pattern[state % len(self.pattern)]


class ForcedGrammar(RollbackGrammar):
    """Stateful grammar with rollback that counts its calls."""

    num_asked = 0

    def forced_text(self, row: int, input_ids: Tensor) -> str:
        self.num_asked += 1
        return self.machine.forced(self.machine.step(self.states[row][-1], int(input_ids[-1])))


@hf_speculate.register_row_wise
class PureForcedGrammar(PureGrammar):
    """Stateless grammar."""

    def forced_text(self, row: int, input_ids: Tensor) -> str:
        return self.machine.forced(self._state(input_ids.tolist()))
