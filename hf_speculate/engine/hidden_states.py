"""Keeps the target's hidden states until the drafter reads them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.errors import UnsupportedModelError
from hf_speculate.types import Scored


class _Piece(NamedTuple):
    """What one forward gave."""

    states: Tensor  # [B, Q, D]
    starts: list[int]  # [B] where each row's own begin
    counts: list[int]  # [B] how many they are


class HiddenStates:
    """The hidden states that the drafter has not been told, row by row: the last ones, unless layers are named.

    Of a forward's states a row has those of real tokens, as many as tokens were chosen from them and kept. Numbers stay
    on the host, states where the target left them: neither adding nor taking waits for an accelerator.

    Args:
        layers: the layers whose states are wanted, joined along D in this order, as `output_hidden_states` of the
            target's forward numbers them; None: the last, as its head reads it.
    """

    def __init__(self, layers: Sequence[int] | None = None):
        self._layers = [-1] if layers is None else list(layers)
        self.wanted: bool | list[int] = True if layers is None else self._layers  # what the target's forward is asked
        self._pieces: list[_Piece] = []

    @property
    def counts(self) -> list[int]:
        """[B] states of each row; empty where there are none."""
        return [sum(counts) for counts in zip(*(piece.counts for piece in self._pieces), strict=True)]

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Append what a part of the left-padded prompt gave.

        Args:
            output: of the forward over that part.
            num_tokens: [B] states wanted of each prompt at most, the last ones: those of its real tokens.
            num_ahead: columns of the prompt from the part's first one on.

        Raises:
            UnsupportedModelError: the model does not give a hidden state for every token.
        """
        states = self._states(output)
        width = states.shape[1]
        starts = [min(max(num_ahead - num, 0), width) for num in num_tokens]
        self._pieces.append(_Piece(states, starts, [width - start for start in starts]))

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        """Append what a round gave.

        Args:
            output: of the forward over the newest token and the drafts.
            counts: [B] tokens that each row emitted.

        Raises:
            UnsupportedModelError: see `add_prompt`.
        """
        states = self._states(output)
        self._pieces.append(_Piece(states, [0] * len(counts), list(counts)))

    def take(self, device: torch.device) -> Tensor:
        """Hand the states over and forget them.

        Args:
            device: where they are wanted.

        Returns:
            [B, N, D], N the most that a row has; past a row's own they may be anything. D is that of all layers wanted.
        """
        pieces, counts = self._pieces, self.counts
        # Copied, also where there is one: into what a forward in inference mode gave the drafter could not write.
        states = torch.cat([piece.states for piece in pieces], dim=1)  # [B, S, D]
        if len(pieces) == 1 and not any(pieces[0].starts):
            states = states[:, : max(counts)]
        else:
            order = _own_first(pieces)[:, : max(counts)].to(states.device)  # [B, N]
            states = states.gather(1, order[..., None].expand(-1, -1, states.shape[2]))  # [B, N, D]
        self._pieces = []
        return states.to(device)

    def _states(self, output: Scored) -> Tensor:
        """[B, Q, D], or D of each layer that is wanted."""
        given = output.hidden_states or ()
        few = [layer for layer in self._layers if not -len(given) <= layer < len(given) or given[layer] is None]
        if few or any(given[layer].shape[1] < output.logits.shape[1] for layer in self._layers):
            raise UnsupportedModelError(
                f"the target must return a hidden state for every token, got none with output_hidden_states="
                f"{self.wanted}; use a drafter that does not read them"
            )
        states = [given[layer] for layer in self._layers]
        return states[0] if len(states) == 1 else torch.cat([one.to(states[0].device) for one in states], dim=-1)

    def rows(self, indices: Sequence[int]) -> None:
        """Keep the rows `indices`, in that order."""
        kept = list(indices)
        self._pieces = [
            _Piece(
                piece.states[torch.tensor(kept, device=piece.states.device)],
                [piece.starts[row] for row in kept],
                [piece.counts[row] for row in kept],
            )
            for piece in self._pieces
        ]


def _own_first(pieces: Sequence[_Piece]) -> Tensor:
    """[B, S] int64 on the host: the columns of the joined pieces, each row's own first and in their order."""
    widths = torch.tensor([piece.states.shape[1] for piece in pieces])
    piece_of = torch.arange(len(pieces)).repeat_interleave(widths)  # [S]
    offsets = torch.arange(len(piece_of)) - (widths.cumsum(0) - widths)[piece_of]  # [S] within the piece
    starts = torch.tensor([piece.starts for piece in pieces])[piece_of]  # [S, B]
    ends = starts + torch.tensor([piece.counts for piece in pieces])[piece_of]
    is_own = (offsets[:, None] >= starts) & (offsets[:, None] < ends)  # [S, B]
    return is_own.T.to(torch.int8).argsort(dim=1, descending=True, stable=True)
