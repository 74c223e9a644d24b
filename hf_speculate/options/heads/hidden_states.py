"""Hidden states of the target that the drafter has not read yet."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.draft.base import Drafter
from hf_speculate.engine.plan import Plan
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.options.heads.layer_capture import (
    FINAL_STATE,
    STATE_NDIM,
    LayerCapture,
    concatenated,
)
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import upload
from hf_speculate.types import Scored


def make_states(plan: Plan, drafter: Drafter) -> "HiddenStates":
    """Make the hidden-state buffer for a plan's drafter.

    Layers are captured by hooks if the target's forward does not return their states.
    """
    # candidate generators number layers like `output_hidden_states`
    layers = plan.hidden_layers or ()
    project = drafter.project_states
    if not drafter.reads_prompt:
        # States of several layers are concatenated for each token.
        capture = LayerCapture(plan.target.model, layers, needs_all_tokens=len(layers) > 1)
        return NewestStates(layers, capture, project)
    is_eager = "target" not in plan.runners.parts
    is_returned = bool(plan.source.reads_outputs) or (layers == (FINAL_STATE,) and is_eager)
    return HiddenStates(
        layers, None if is_returned else LayerCapture(plan.target.model, layers), project
    )


class HiddenStates(PerRow):
    """Hidden states to be read by the drafter.

    For each emitted token, a row holds the state of the previous token, from which its logits were
    computed.
    """

    BY_ROW = ("_columns",)
    TENSORS = ("_pieces",)

    def __init__(
        self,
        layers: Sequence[int],
        capture: LayerCapture | None,
        project: Callable[[Tensor], Tensor],
    ):
        self._layers = list(layers)  # concatenated along D in this order
        self._project = project  # applied to states before they are stored
        self.capture = capture  # None if the target's forward returns the states
        # Value of `output_hidden_states` in the target's forward. A list cannot hold negative ids.
        self.wanted: bool | list[int] = capture is None and (min(self._layers) < 0 or self._layers)
        self._pieces: list[Tensor] = []  # each [B, Q, D]
        # [B] columns of each row in the joined pieces, in ascending order
        self._columns: list[list[int]] = []

    @property
    def counts(self) -> list[int]:
        """Number of states of each row [B]; empty if there are none."""
        return [len(columns) for columns in self._columns]

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Append the states of the prompt's last `num_tokens` [B] tokens.

        The first state in `output` is `num_ahead` columns before the prompt's end.
        """
        states = self._states(output)
        width = states.shape[1]
        self._add(
            states, [range(min(max(num_ahead - count, 0), width), width) for count in num_tokens]
        )

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        """Append the states of a round with `counts` [B] emitted tokens per row."""
        self._add(self._states(output), [range(count) for count in counts])

    def _add(self, states: Tensor, spans: Sequence[range]) -> None:
        offset = sum(piece.shape[1] for piece in self._pieces)
        before = self._columns or [[]] * len(spans)
        self._columns = [
            columns + [offset + column for column in span]
            for columns, span in zip(before, spans, strict=True)
        ]
        self._pieces.append(states)

    def take(self, device: torch.device, counts: Sequence[int] | None = None) -> Tensor:
        """Remove the first `counts` [B] states of each row; return a copy [B, N, D] on a device.

        Columns after a row's states are undefined. Without `counts`, all states are taken.
        """
        # Always copy: the drafter cannot write to a tensor created in inference mode.
        states, columns = torch.cat(self._pieces, dim=1), self._columns  # [B, S, D]
        if counts is None:
            self._pieces, self._columns = [], []
            return _aligned(states, columns).to(device)
        remaining = [row[count:] for row, count in zip(columns, counts, strict=True)]
        self._pieces, self._columns = (
            [_aligned(states, remaining)],
            [list(range(len(row))) for row in remaining],
        )
        return _aligned(
            states, [row[:count] for row, count in zip(columns, counts, strict=True)]
        ).to(device)

    def join(self, other: "HiddenStates") -> None:
        """Append the rows of `other`; every row has an unread state."""
        counts, width = [*self.counts, *other.counts], max(*self.counts, *other.counts)
        pieces = [
            _aligned(torch.cat(states._pieces, dim=1), states._columns) for states in (self, other)
        ]
        self._pieces = [
            torch.cat([pad(piece, (0, 0, 0, width - piece.shape[1])) for piece in pieces])
        ]
        self._columns = [list(range(count)) for count in counts]

    def _states(self, output: Scored) -> Tensor:
        """Return the requested layers' states [B, Q, D], captured or from the forward's output."""
        if output.captured is not None:
            return self._project(output.captured)
        returned = output.hidden_states or ()
        num_returned = len(returned)
        missing = [
            layer
            for layer in self._layers
            if not -num_returned <= layer < num_returned or returned[layer] is None
        ]
        is_whole = not missing and all(
            returned[layer].ndim == STATE_NDIM
            and returned[layer].shape[1] >= output.logits.shape[1]
            for layer in self._layers
        )
        if not is_whole:
            raise UnsupportedModelError(
                "the target must return a hidden state for every token, got none with "
                "output_hidden_states="
                f"{self.wanted}; use a drafter that does not read them"
            )
        return self._project(concatenated([returned[layer] for layer in self._layers]))


class NewestStates(HiddenStates):
    """The hidden state of each row's newest token."""

    BY_ROW = ("_num_emitted",)
    TENSORS = ("_newest",)
    join = PerRow.join

    def __init__(
        self,
        layers: Sequence[int],
        capture: LayerCapture | None,
        project: Callable[[Tensor], Tensor],
    ):
        super().__init__(layers, capture, project)
        self._num_emitted: list[int] = []  # [B] number of tokens since the drafter's last call
        self._newest: Tensor | None = None  # [B, 1, D]

    @property
    def counts(self) -> list[int]:
        return self._num_emitted

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Store the state of the last token.

        The target may then skip the states of other tokens in layers with shared states.
        """
        self._newest, self._num_emitted = self._states(output)[:, -1:], [1] * len(num_tokens)

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        states = self._states(output)
        if min(counts) == max(counts) > 0:
            newest = states[:, counts[0] - 1 : counts[0]]
        else:
            # [B, 1, 1]
            last = upload([max(count - 1, 0) for count in counts], states.device)[:, None, None]
            newest = states.gather(1, last.expand(-1, 1, states.shape[2]))
            if self._newest is not None and min(counts) == 0:
                has_new = upload([count > 0 for count in counts], states.device, torch.bool)[
                    :, None, None
                ]
                newest = torch.where(has_new, newest, self._newest)
        before = self._num_emitted or [0] * len(counts)
        self._newest, self._num_emitted = (
            newest,
            [count + new for count, new in zip(before, counts, strict=True)],
        )

    def take(self, device: torch.device, counts: Sequence[int] | None = None) -> Tensor:
        """Return the states [B, 1, D] of the rows' newest tokens as a copy on a device.

        Afterwards, all tokens of a row count as read, or the first `counts` [B] of them.
        """
        if self._newest is None:
            raise RuntimeError("a state must have been added before it is taken, got none")
        taken = self._num_emitted if counts is None else counts
        self._num_emitted = [
            num_emitted - read for num_emitted, read in zip(self._num_emitted, taken, strict=True)
        ]
        # Always copy: the drafter cannot write to a tensor created in inference mode.
        return self._newest.clone().to(device)


def _aligned(states: Tensor, columns: Sequence[Sequence[int]]) -> Tensor:
    """Return each row's `columns` of states [B, S, D], left-aligned, as [B, N, D].

    Columns after a row's last state are undefined.
    """
    max_len = max(map(len, columns))
    if all(list(row) == list(range(len(row))) for row in columns):
        return states[:, :max_len]
    # [B, N]
    order = upload([[*row, *[0] * (max_len - len(row))] for row in columns], states.device)
    return states.gather(1, order[..., None].expand(-1, -1, states.shape[2]))
