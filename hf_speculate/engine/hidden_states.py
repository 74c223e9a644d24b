"""Hidden states of the target that the drafter has yet to read."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.errors import UnsupportedModelError
from hf_speculate.transfers import send, upload
from hf_speculate.types import Scored


class _Piece(NamedTuple):
    states: Tensor  # [B, Q, D]
    starts: list[int]  # [B] first column of each row's states
    counts: list[int]  # [B] number of columns


class HiddenStates:
    """The hidden states that the drafter has not read, row by row: those from which an emitted token was chosen.

    Counts stay on the host and states on the target's device: neither adding nor taking waits for an accelerator. The
    layers are concatenated along D in their order. Their states come from `Scored.captured` if `is_captured`, otherwise
    from `Scored.hidden_states`, and are kept as `project` maps them.
    """

    def __init__(self, layers: Sequence[int], is_captured: bool, project: Callable[[Tensor], Tensor]):
        self._layers = list(layers)
        self._project = project
        # the value of `output_hidden_states` in the target's forward: a list names the first layers only
        self.wanted: bool | list[int] = not is_captured and (min(self._layers) < 0 or self._layers)
        self._pieces: list[_Piece] = []

    @property
    def counts(self) -> list[int]:
        """[B] number of states of each row; empty if there are none."""
        return [sum(counts) for counts in zip(*(piece.counts for piece in self._pieces), strict=True)]

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Append the states of a part of the left-padded prompt, from `num_ahead` columns before its end on.

        Of each row the last `num_tokens` [B] are wanted at most: those of its real tokens.
        """
        states = self._states(output)
        width = states.shape[1]
        starts = [min(max(num_ahead - num, 0), width) for num in num_tokens]
        self._pieces.append(_Piece(states, starts, [width - start for start in starts]))

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        """Append the states of a round in which each row emitted `counts` [B] tokens."""
        states = self._states(output)
        self._pieces.append(_Piece(states, [0] * len(counts), list(counts)))

    def take(self, device: torch.device) -> Tensor:
        """[B, N, D] of all states on a device, which are then forgotten; undefined past a row's count, N at most."""
        pieces, counts = self._pieces, self.counts
        # Always a copy: the drafter could not write into a tensor made in inference mode.
        states = torch.cat([piece.states for piece in pieces], dim=1)  # [B, S, D]
        if len(pieces) == 1 and not any(pieces[0].starts):
            states = states[:, : max(counts)]
        else:
            order = send(_own_first(pieces)[:, : max(counts)], states.device)  # [B, N]
            states = states.gather(1, order[..., None].expand(-1, -1, states.shape[2]))  # [B, N, D]
        self._pieces = []
        return states.to(device)

    def _states(self, output: Scored) -> Tensor:  # [B, Q, D]
        return self._project(self._returned(output) if output.captured is None else output.captured)

    def _returned(self, output: Scored) -> Tensor:
        """[B, Q, D] of the wanted layers, from the forward's output."""
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
        for at, (states, starts, counts) in enumerate(self._pieces):
            kept = [starts[row] for row in indices], [counts[row] for row in indices]
            self._pieces[at] = _Piece(states[upload(indices, states.device)], *kept)


def _own_first(pieces: Sequence[_Piece]) -> Tensor:
    """[B, S] int64 on the host: the columns of the concatenated pieces, each row's own columns first, in order."""
    widths = torch.tensor([piece.states.shape[1] for piece in pieces], device="cpu")
    piece_of = torch.arange(len(pieces), device="cpu").repeat_interleave(widths)  # [S]
    offsets = torch.arange(len(piece_of), device="cpu") - (widths.cumsum(0) - widths)[piece_of]  # [S] within the piece
    starts = torch.tensor([piece.starts for piece in pieces], device="cpu")[piece_of]  # [S, B]
    ends = starts + torch.tensor([piece.counts for piece in pieces], device="cpu")[piece_of]
    is_own = (offsets[:, None] >= starts) & (offsets[:, None] < ends)  # [S, B]
    return is_own.T.to(torch.int8).argsort(dim=1, descending=True, stable=True)
