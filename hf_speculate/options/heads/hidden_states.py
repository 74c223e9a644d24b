"""Hidden states of the target that the drafter has yet to read."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.draft.base import Drafter
from hf_speculate.engine.plan import Plan
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.options.heads.layer_capture import FINAL_STATE, STATE_NDIM, LayerCapture, concatenated
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import upload
from hf_speculate.types import Scored


def make_states(plan: Plan, drafter: Drafter) -> "HiddenStates":
    """The states that the drafter of a plan reads, which are captured unless the target's forward returns them."""
    layers = plan.hidden_layers or ()  # numbered for candidate generators as `output_hidden_states` numbers them
    project = drafter.project_states
    if not drafter.reads_prompt:
        # states of several layers must be of the same tokens to be joined
        capture = LayerCapture(plan.target.model, layers, needs_all_tokens=len(layers) > 1)
        return NewestStates(layers, capture, project)
    is_eager = "target" not in plan.runners.parts
    is_returned = bool(plan.source.reads_outputs) or (layers == (FINAL_STATE,) and is_eager)
    return HiddenStates(layers, None if is_returned else LayerCapture(plan.target.model, layers), project)


class HiddenStates(PerRow):
    """The hidden states that the drafter has not read, row by row: those from which an emitted token was chosen."""

    BY_ROW = ("_columns",)
    TENSORS = ("_pieces",)

    def __init__(self, layers: Sequence[int], capture: LayerCapture | None, project: Callable[[Tensor], Tensor]):
        self._layers = list(layers)  # concatenated along D in this order
        self._project = project  # applied to states before they are kept
        self.capture = capture  # None if the output of the target's forward holds the states
        # the value of `output_hidden_states` in the target's forward: a list names the first layers only
        self.wanted: bool | list[int] = capture is None and (min(self._layers) < 0 or self._layers)
        self._pieces: list[Tensor] = []  # each [B, Q, D]
        self._columns: list[list[int]] = []  # [B] the columns of the joined pieces that belong to each row, ascending

    @property
    def counts(self) -> list[int]:
        """[B] number of states of each row; empty if there are none."""
        return [len(columns) for columns in self._columns]

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Append states of the prompt, `num_ahead` columns before its end on, of the last `num_tokens` [B] tokens."""
        states = self._states(output)
        width = states.shape[1]
        self._add(states, [range(min(max(num_ahead - num, 0), width), width) for num in num_tokens])

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        """Append the states of a round in which each row emitted `counts` [B] tokens."""
        self._add(self._states(output), [range(num) for num in counts])

    def _add(self, states: Tensor, spans: Sequence[range]) -> None:
        offset = sum(piece.shape[1] for piece in self._pieces)
        before = self._columns or [[]] * len(spans)
        self._columns = [own + [offset + column for column in span] for own, span in zip(before, spans, strict=True)]
        self._pieces.append(states)

    def take(self, device: torch.device, counts: Sequence[int] | None = None) -> Tensor:
        """[B, N, D] of the first `counts` [B] states of each row, None for all, on a device; undefined past a row's.

        These are then forgotten.
        """
        # Always a copy: the drafter could not write into a tensor created in inference mode.
        states, columns = torch.cat(self._pieces, dim=1), self._columns  # [B, S, D]
        if counts is None:
            self._pieces, self._columns = [], []
            return _aligned(states, columns).to(device)
        left = [own[num:] for own, num in zip(columns, counts, strict=True)]
        self._pieces, self._columns = [_aligned(states, left)], [list(range(len(own))) for own in left]
        return _aligned(states, [own[:num] for own, num in zip(columns, counts, strict=True)]).to(device)

    def join(self, other: "HiddenStates") -> None:
        """Add the rows of `other` behind these; every row has a state that was not read."""
        counts, width = [*self.counts, *other.counts], max(*self.counts, *other.counts)
        parts = [_aligned(torch.cat(states._pieces, dim=1), states._columns) for states in (self, other)]
        self._pieces = [torch.cat([pad(part, (0, 0, 0, width - part.shape[1])) for part in parts])]
        self._columns = [list(range(num)) for num in counts]

    def _states(self, output: Scored) -> Tensor:
        """[B, Q, D] of the wanted layers, captured or from the forward's output."""
        if output.captured is not None:
            return self._project(output.captured)
        returned = output.hidden_states or ()
        num = len(returned)
        few = [layer for layer in self._layers if not -num <= layer < num or returned[layer] is None]
        is_whole = not few and all(
            returned[layer].ndim == STATE_NDIM and returned[layer].shape[1] >= output.logits.shape[1]
            for layer in self._layers
        )
        if not is_whole:
            raise UnsupportedModelError(
                f"the target must return a hidden state for every token, got none with output_hidden_states="
                f"{self.wanted}; use a drafter that does not read them"
            )
        return self._project(concatenated([returned[layer] for layer in self._layers]))


class NewestStates(HiddenStates):
    """Hidden states of a drafter that reads those of each row's newest token alone, whatever came before."""

    BY_ROW = ("_num_emitted",)
    TENSORS = ("_newest",)
    join = PerRow.join

    def __init__(self, layers: Sequence[int], capture: LayerCapture | None, project: Callable[[Tensor], Tensor]):
        super().__init__(layers, capture, project)
        self._num_emitted: list[int] = []  # [B] tokens since the drafter's last call
        self._newest: Tensor | None = None  # [B, 1, D]

    @property
    def counts(self) -> list[int]:
        return self._num_emitted

    def add_prompt(self, output: Scored, num_tokens: Sequence[int], num_ahead: int) -> None:
        """Keep the state of the last token; the target need not have computed others in layers that share states."""
        self._newest, self._num_emitted = self._states(output)[:, -1:], [1] * len(num_tokens)

    def add(self, output: Scored, counts: Sequence[int]) -> None:
        states = self._states(output)
        if min(counts) == max(counts) > 0:
            newest = states[:, counts[0] - 1 : counts[0]]
        else:
            last = upload([max(num - 1, 0) for num in counts], states.device)[:, None, None]  # [B, 1, 1]
            newest = states.gather(1, last.expand(-1, 1, states.shape[2]))
            if self._newest is not None and min(counts) == 0:
                has_new = upload([num > 0 for num in counts], states.device, torch.bool)[:, None, None]
                newest = torch.where(has_new, newest, self._newest)
        before = self._num_emitted or [0] * len(counts)
        self._newest, self._num_emitted = newest, [num + new for num, new in zip(before, counts, strict=True)]

    def take(self, device: torch.device, counts: Sequence[int] | None = None) -> Tensor:
        """[B, 1, D] of each row's newest token, on a device; its tokens then count as read, or `counts` [B] of them."""
        if self._newest is None:
            raise RuntimeError("a state must have been added before it is taken, got none")
        taken = self._num_emitted if counts is None else counts
        self._num_emitted = [num - read for num, read in zip(self._num_emitted, taken, strict=True)]
        # Always a copy: the drafter could not write into a tensor created in inference mode.
        return self._newest.clone().to(device)


def _aligned(states: Tensor, columns: Sequence[Sequence[int]]) -> Tensor:
    """[B, N, D] of the columns of each row in states [B, S, D], from the left; undefined past a row's own."""
    most = max(map(len, columns))
    if all(list(own) == list(range(len(own))) for own in columns):
        return states[:, :most]
    order = upload([[*own, *[0] * (most - len(own))] for own in columns], states.device)  # [B, N]
    return states.gather(1, order[..., None].expand(-1, -1, states.shape[2]))
