"""Left padding: masks and position ids of rows that all end in one column, and moves of rows to the right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.rows.row_lens import ArangeCache, RowLens
from hf_speculate.transfers import upload

_GROUP_BYTES = 32 << 20  # the most bytes of states that move in one launch, which takes as much memory


class RowShift(NamedTuple):
    """Shift of each row to the right, in columns."""

    per_row: Tensor  # [B, 1] int64 on the device, `common` less the shifts
    common: int
    aranges: ArangeCache

    def sources(self, num_columns: int) -> Tensor:
        """[B, T] int64: the column that each of T columns comes from, negative in the padding that rows gain."""
        return self.aranges.span(-self.common, num_columns) + self.per_row


def shift_rows(layers: Sequence[Any], shift: RowShift) -> None:
    """Move the keys and values of attention layers. They become new tensors: others may hold the old ones."""
    index: dict[Any, Tensor] = {}
    for group in _groups(layers):
        states: list[Tensor] = [getattr(layer, name) for layer, name in group]
        shape, device = states[0].shape, states[0].device
        key = (*shape[1:3], device) if device.type == "cpu" else (shape[2], device)
        if key not in index:
            source = shift.sources(shape[2]).clamp_min_(0).to(device)  # [B, T]
            index[key] = _flat_index(source, shape[1]) if device.type == "cpu" else source[:, None, :, None]
        for (layer, name), moved in zip(group, _take(states, index[key]), strict=True):
            setattr(layer, name, moved)


def _groups(layers: Sequence[Any]) -> list[list[tuple[Any, str]]]:
    """Groups of states that move in one launch: of one shape, dtype and device, up to a size; single ones on a CPU."""
    groups: list[list[tuple[Any, str]]] = []  # pairs of a layer and "keys" or "values"
    last: dict[Any, list[tuple[Any, str]]] = {}
    for layer in layers:
        for name in ("keys", "values"):
            states: Tensor = getattr(layer, name)
            key, num_bytes = (states.shape, states.dtype, states.device), states.numel() * states.element_size()
            group = last.get(key)
            if group is None or states.device.type == "cpu" or (len(group) + 1) * num_bytes > _GROUP_BYTES:
                group = last[key] = []
                groups.append(group)
            group.append((layer, name))
    return groups


def _flat_index(source: Tensor, num_heads: int) -> Tensor:
    """[B * H * T] int64, rows of the flat states, from the column [B, T] that each column comes from."""
    batch_size, num_columns = source.shape
    first = torch.arange(batch_size * num_heads, device=source.device).view(batch_size, num_heads, 1) * num_columns
    return (first + source[:, None]).flatten()


def _take(states: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
    """States [B, H, T, D] rebuilt: a CPU copies whole rows by a flat index, in half of the time of a gather."""
    if index.dim() == 1:
        return [state.reshape(-1, state.shape[-1]).index_select(0, index).view(state.shape) for state in states]
    if len(states) == 1:
        return [states[0].gather(2, index.expand(-1, states[0].shape[1], -1, states[0].shape[3]))]
    stacked = torch.stack(list(states))  # [N, B, H, T, D]
    return stacked.gather(3, index.expand(*stacked.shape[:1], -1, stacked.shape[2], -1, stacked.shape[4])).unbind()


class LeftPadding:
    """Columns of padding before each row, also those gained by moves to the right, with masks and position ids."""

    def __init__(self, pads: Sequence[int], device: torch.device | str):
        self.pads = list(pads)
        self.own = list(pads)  # the padding of the prompts
        self._lens = RowLens([0] * len(self.pads), ArangeCache(device))  # columns without gained padding
        self._own_there: Tensor | None = None  # [B, 1] int64 on the device
        self._num_expected = 0
        self._mask: Tensor | None = None  # [B, T + N] int64
        # [B or 1, N] int64, negative in padding: of the columns to come, and of those before if there is a mask
        self._positions: Tensor | None = None
        self._first_column = 0  # the column of the first of these positions

    def expect(self, num_tokens: int) -> None:
        self._num_expected = num_tokens
        self._mask = self._positions = None

    def mask(self, num_columns: int, num_query: int) -> Tensor | None:
        """[B, T + Q] int64, 1 for real tokens, over T columns and a forward of Q; None if nothing is padded."""
        if not any(self.pads):
            return None
        end = num_columns + num_query
        if self._mask is None or self._mask.shape[1] < end:
            positions = self._make_positions(0, num_columns, num_columns + max(num_query, self._num_expected))
            self._positions, self._first_column = positions, 0
            is_real = torch.ge(positions, 0, out=torch.empty_like(positions))  # [B or 1, T+N]
            self._mask = is_real.expand(len(self.pads), -1)
        return self._mask[:, :end]

    def positions(self, num_columns: int, num_query: int) -> Tensor:
        """[B or 1, Q] int64: real tokens before each of the coming ones; 0 in padding."""
        cached, first = self._positions, num_columns - self._first_column
        if cached is None or not 0 <= first <= first + num_query <= cached.shape[1]:
            cached = self._make_positions(num_columns, num_columns, max(num_query, self._num_expected))
            self._positions, self._first_column, first = cached, num_columns, 0
        positions = cached[:, first : first + num_query]
        return positions.clamp_min(0) if max(self.pads) > num_columns else positions

    def positions_before(self, num_columns: int, width: int) -> Tensor | None:
        """[B or 1, W] int64 of the last of T columns, negative in padding; None if nothing is padded."""
        return self._make_positions(num_columns - width, num_columns, width) if any(self.pads) else None

    def drop(self, drops: Sequence[int], num_columns: int, like: RowLens | None) -> RowShift | None:
        """Count `drops` [B] tokens and the padding that rows gain by them; their moves to the right, or None."""
        before = self._lens_at(num_columns).copy()
        self._lens.set([length - drop for length, drop in zip(before.on_host, drops, strict=True)], like)
        smallest = min(drops, default=0)
        shifts = [drop - smallest for drop in drops]
        self.pads = [pad + gained for pad, gained in zip(self.pads, shifts, strict=True)]
        if not any(shifts):
            return None
        per_row, common = self._lens.less(before)
        return RowShift(per_row[:, None], -common - smallest, self._lens.aranges)

    def surplus(self) -> int:
        """Columns of padding that all rows have gained; they are forgotten."""
        surplus = min((now - own for now, own in zip(self.pads, self.own, strict=True)), default=0)
        self.pads = [pad - surplus for pad in self.pads]
        return surplus

    def skip(self) -> int:
        """Forget the columns of padding before all rows, before there are others; how many these are."""
        common = min(self.pads, default=0)
        self.pads = [pad - common for pad in self.pads]
        self.own, self._own_there = [min(pair) for pair in zip(self.own, self.pads, strict=True)], None
        self.expect(0)
        return common

    def rows(self, indices: Sequence[int], num_columns: int) -> int:
        """Keep the rows `indices`; how many columns of their prompts' padding none of them needs."""
        self._lens_at(num_columns)
        self.pads = [self.pads[row] for row in indices]
        own = [self.own[row] for row in indices]
        common = min(own, default=0)
        self.own, self._own_there = [pad - common for pad in own], None
        self._lens.rows(indices)
        self._lens.add(-common)
        self.expect(0)
        return common

    def join(self, other: "LeftPadding", num_columns: int, num_joining_columns: int) -> None:
        """Add the rows of `other`, which hold so many columns, behind these; the shorter ones gain padding.

        The padding of the prompts then counts as gained, so that what all rows have of it goes.
        """
        longest = max(num_columns, num_joining_columns)
        self.pads = [pad + longest - num_columns for pad in self.pads]
        self.pads += [pad + longest - num_joining_columns for pad in other.pads]
        self.own, self._own_there = [0] * len(self.pads), None
        self._lens = RowLens([longest - pad for pad in self.pads], self._lens.aranges)
        self.expect(0)

    def _lens_at(self, num_columns: int) -> RowLens:
        """The lengths once the states have so many columns."""
        lens = [num_columns - pad + own for pad, own in zip(self.pads, self.own, strict=True)]
        gained = lens[0] - self._lens.on_host[0] if lens else 0
        if [length + gained for length in self._lens.on_host] == lens:
            self._lens.add(gained)
        else:
            self._lens.set(lens)
        return self._lens

    def _make_positions(self, first_column: int, num_columns: int, num: int) -> Tensor:
        """[B or 1, num] int64."""
        if any(self.own) and self._own_there is None:
            self._own_there = upload(self.own, self._lens.aranges.device)[:, None]
        return self._lens_at(num_columns).positions(num, first_column - num_columns, self._own_there)
