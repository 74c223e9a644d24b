"""Left padding: masks and position ids for right-aligned rows, and shifts of rows to the right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.rows.row_lens import ArangeCache, RowLens
from hf_speculate.transfers import upload

_GROUP_BYTES = 32 << 20  # most state bytes moved per launch, which needs the same memory again


class RowShift(NamedTuple):
    """Shift of each row to the right, in columns."""

    per_row: Tensor  # [B, 1] int64 on the device, `common` minus the shift of the row
    common: int
    aranges: ArangeCache

    def sources(self, num_columns: int) -> Tensor:
        """Return the source column of each of T columns, [B, T] int64.

        The source column is negative in added padding.
        """
        return self.aranges.span(-self.common, num_columns) + self.per_row


def shift_rows(layers: Sequence[Any], shift: RowShift) -> None:
    """Shift the keys and values of attention layers, in new tensors as the old may be shared."""
    index: dict[Any, Tensor] = {}
    for group in _groups(layers):
        states: list[Tensor] = [getattr(layer, name) for layer, name in group]
        shape, device = states[0].shape, states[0].device
        key = (*shape[1:3], device) if device.type == "cpu" else (shape[2], device)
        if key not in index:
            source = shift.sources(shape[2]).clamp_min_(0).to(device)  # [B, T]
            index[key] = (
                _flat_index(source, shape[1]) if device.type == "cpu" else source[:, None, :, None]
            )
        for (layer, name), moved in zip(group, _take(states, index[key]), strict=True):
            setattr(layer, name, moved)


def _groups(layers: Sequence[Any]) -> list[list[tuple[Any, str]]]:
    """Group the states that one launch moves, as pairs of a layer and "keys" or "values".

    All states in a group have the same shape, dtype and device, and at most `_GROUP_BYTES` in
    total. On a CPU, each state forms its own group.
    """
    groups: list[list[tuple[Any, str]]] = []
    open_groups: dict[Any, list[tuple[Any, str]]] = {}
    for layer in layers:
        for name in ("keys", "values"):
            states: Tensor = getattr(layer, name)
            key, num_bytes = (
                (states.shape, states.dtype, states.device),
                states.numel() * states.element_size(),
            )
            group = open_groups.get(key)
            if (
                group is None
                or states.device.type == "cpu"
                or (len(group) + 1) * num_bytes > _GROUP_BYTES
            ):
                group = open_groups[key] = []
                groups.append(group)
            group.append((layer, name))
    return groups


def _flat_index(source: Tensor, num_heads: int) -> Tensor:
    """Convert source columns [B, T] to rows of the flattened states, [B * H * T] int64."""
    batch_size, num_columns = source.shape
    first = (
        torch.arange(batch_size * num_heads, device=source.device).view(batch_size, num_heads, 1)
        * num_columns
    )
    return (first + source[:, None]).flatten()


def _take(states: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
    """Gather states [B, H, T, D] with an index.

    On a CPU, a flat index copies whole rows, which takes half the time of a gather.
    """
    if index.dim() == 1:
        return [
            state.reshape(-1, state.shape[-1]).index_select(0, index).view(state.shape)
            for state in states
        ]
    if len(states) == 1:
        return [states[0].gather(2, index.expand(-1, states[0].shape[1], -1, states[0].shape[3]))]
    stacked = torch.stack(list(states))  # [N, B, H, T, D]
    return stacked.gather(
        3, index.expand(*stacked.shape[:1], -1, stacked.shape[2], -1, stacked.shape[4])
    ).unbind()


class LeftPadding:
    """Padding of each row, in columns.

    The padding includes columns added by shifts to the right. It determines masks and position ids.
    """

    def __init__(self, pads: Sequence[int], device: torch.device | str):
        self.pads = list(pads)
        self.prompt_pads = list(pads)  # padding of the prompts
        # number of columns without added padding
        self._lens = RowLens([0] * len(self.pads), ArangeCache(device))
        self._prompt_pads_on_device: Tensor | None = None  # [B, 1] int64 on the device
        self._num_expected = 0
        self._mask: Tensor | None = None  # [B, T + N] int64
        # [B or 1, N] int64, negative in padding; the positions of the next columns, and of all
        # earlier columns if there is a mask
        self._positions: Tensor | None = None
        self._first_column = 0  # column of the first position

    def expect(self, num_tokens: int) -> None:
        self._num_expected = num_tokens
        self._mask = self._positions = None

    def mask(self, num_columns: int, num_query: int) -> Tensor | None:
        """Return the mask over T columns and Q queries, [B, T + Q], 1 for real tokens.

        The result is None without padding.
        """
        if not any(self.pads):
            return None
        end = num_columns + num_query
        if self._mask is None or self._mask.shape[1] < end:
            positions = self._make_positions(
                0, num_columns, num_columns + max(num_query, self._num_expected)
            )
            self._positions, self._first_column = positions, 0
            is_real = torch.ge(positions, 0, out=torch.empty_like(positions))  # [B or 1, T+N]
            self._mask = is_real.expand(len(self.pads), -1)
        return self._mask[:, :end]

    def positions(self, num_columns: int, num_query: int) -> Tensor:
        """Count the real tokens before each query, [B or 1, Q] int64; 0 in padding."""
        cached, first = self._positions, num_columns - self._first_column
        if cached is None or not 0 <= first <= first + num_query <= cached.shape[1]:
            cached = self._make_positions(
                num_columns, num_columns, max(num_query, self._num_expected)
            )
            self._positions, self._first_column, first = cached, num_columns, 0
        positions = cached[:, first : first + num_query]
        return positions.clamp_min(0) if max(self.pads) > num_columns else positions

    def positions_before(self, num_columns: int, width: int) -> Tensor | None:
        """Return the positions of the last W columns, [B or 1, W] int64, negative in padding.

        The result is None without padding.
        """
        return (
            self._make_positions(num_columns - width, num_columns, width)
            if any(self.pads)
            else None
        )

    def drop(self, drops: Sequence[int], num_columns: int, like: RowLens | None) -> RowShift | None:
        """Drop the last `drops` [B] tokens of the rows and pad the rows on the left instead.

        Return the shift of the rows to the right; None if no row moves.
        """
        before = self._lens_at(num_columns).copy()
        self._lens.set(
            [length - drop for length, drop in zip(before.on_host, drops, strict=True)], like
        )
        smallest = min(drops, default=0)
        shifts = [drop - smallest for drop in drops]
        self.pads = [pad + gained for pad, gained in zip(self.pads, shifts, strict=True)]
        if not any(shifts):
            return None
        per_row, common = self._lens.less(before)
        return RowShift(per_row[:, None], -common - smallest, self._lens.aranges)

    def surplus(self) -> int:
        """Forget the padding columns that all rows have gained, and return their number."""
        gained_pads = [
            pad - prompt_pad for pad, prompt_pad in zip(self.pads, self.prompt_pads, strict=True)
        ]
        surplus = min(gained_pads, default=0)
        self.pads = [pad - surplus for pad in self.pads]
        return surplus

    def skip(self) -> int:
        """Forget the padding columns common to all rows of an empty cache; return their number."""
        common = min(self.pads, default=0)
        self.pads = [pad - common for pad in self.pads]
        self.prompt_pads = [min(pair) for pair in zip(self.prompt_pads, self.pads, strict=True)]
        self._prompt_pads_on_device = None
        self.expect(0)
        return common

    def rows(self, indices: Sequence[int], num_columns: int) -> int:
        """Keep the rows `indices`.

        Return the number of prompt padding columns common to all of them.
        """
        self._lens_at(num_columns)
        self.pads = [self.pads[row] for row in indices]
        prompt_pads = [self.prompt_pads[row] for row in indices]
        common = min(prompt_pads, default=0)
        self.prompt_pads, self._prompt_pads_on_device = [pad - common for pad in prompt_pads], None
        self._lens.rows(indices)
        self._lens.add(-common)
        self.expect(0)
        return common

    def join(self, other: "LeftPadding", num_columns: int, num_joining_columns: int) -> None:
        """Append the rows of `other`; the rows with fewer columns gain padding.

        The padding of the prompts then counts as gained padding, so its common part is cut off.
        """
        longest = max(num_columns, num_joining_columns)
        self.pads = [pad + longest - num_columns for pad in self.pads]
        self.pads += [pad + longest - num_joining_columns for pad in other.pads]
        self.prompt_pads, self._prompt_pads_on_device = [0] * len(self.pads), None
        self._lens = RowLens([longest - pad for pad in self.pads], self._lens.aranges)
        self.expect(0)

    def _lens_at(self, num_columns: int) -> RowLens:
        """Update the row lengths for states of `num_columns` columns, and return the lengths."""
        lens = [
            num_columns - pad + prompt_pad
            for pad, prompt_pad in zip(self.pads, self.prompt_pads, strict=True)
        ]
        gained = lens[0] - self._lens.on_host[0] if lens else 0
        if [length + gained for length in self._lens.on_host] == lens:
            self._lens.add(gained)
        else:
            self._lens.set(lens)
        return self._lens

    def _make_positions(self, first_column: int, num_columns: int, num: int) -> Tensor:
        """Compute the positions of `num` columns from `first_column` on, [B or 1, num] int64."""
        if any(self.prompt_pads) and self._prompt_pads_on_device is None:
            self._prompt_pads_on_device = upload(self.prompt_pads, self._lens.aranges.device)[
                :, None
            ]
        return self._lens_at(num_columns).positions(
            num, first_column - num_columns, self._prompt_pads_on_device
        )
