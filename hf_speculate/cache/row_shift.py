"""Row shift: rows of a batch move right, each by its own number of columns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.cache.row_lens import Ruler

_GROUP_BYTES = 32 << 20  # of the states that move in one launch, which takes as much memory


class RowShift(NamedTuple):
    """How far each row moves right."""

    varying: Tensor  # [B, 1] int64 on the device, `shared` less the shifts
    shared: int
    ruler: Ruler

    def sources(self, num_columns: int) -> Tensor:
        """[B, T] int64: the column that each of T columns comes from, negative in the padding that rows gain."""
        return self.ruler.span(-self.shared, num_columns) + self.varying


class _Place(NamedTuple):
    """States of one layer."""

    layer: Any
    name: str  # "keys" or "values"

    @property
    def states(self) -> Tensor:
        """[B, H, T, D]."""
        states: Tensor = getattr(self.layer, self.name)
        return states


def shift_rows(layers: Sequence[Any], shift: RowShift) -> None:
    """Move the keys and values of attention layers. They become new tensors: others may hold the old ones."""
    index: dict[Any, Tensor] = {}
    for places in _groups(layers):
        shape, device = places[0].states.shape, places[0].states.device
        key = (*shape[1:3], device) if device.type == "cpu" else (shape[2], device)
        if key not in index:
            source = shift.sources(shape[2]).clamp_min_(0).to(device)  # [B, T]
            index[key] = _flat_index(source, shape[1]) if device.type == "cpu" else source[:, None, :, None]
        moved = _take([place.states for place in places], index[key])
        for place, states in zip(places, moved, strict=True):
            setattr(place.layer, place.name, states)


def _groups(layers: Sequence[Any]) -> list[list[_Place]]:
    """What moves in one launch: states of one shape, dtype and device up to a size; a CPU moves them one by one."""
    groups: list[list[_Place]] = []
    last: dict[Any, list[_Place]] = {}
    for layer in layers:
        for place in (_Place(layer, "keys"), _Place(layer, "values")):
            states = place.states
            key, num_bytes = (states.shape, states.dtype, states.device), states.numel() * states.element_size()
            group = last.get(key)
            if group is None or states.device.type == "cpu" or (len(group) + 1) * num_bytes > _GROUP_BYTES:
                group = last[key] = []
                groups.append(group)
            group.append(place)
    return groups


def _flat_index(source: Tensor, num_heads: int) -> Tensor:
    """[B * H * T] int64, rows of the flat states, from the column [B, T] that each column comes from."""
    batch_size, num_columns = source.shape
    first = torch.arange(batch_size * num_heads, device=source.device).view(batch_size, num_heads, 1) * num_columns
    return (first + source[:, None]).flatten()


def _take(states: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
    """States [B, H, T, D] rebuilt: a CPU copies whole rows by a flat index, in half of the time of a gather."""
    if index.dim() == 1:
        return [one.reshape(-1, one.shape[-1]).index_select(0, index).view(one.shape) for one in states]
    if len(states) == 1:
        return [states[0].gather(2, index.expand(-1, states[0].shape[1], -1, states[0].shape[3]))]
    stacked = torch.stack(list(states))  # [N, B, H, T, D]
    return stacked.gather(3, index.expand(*stacked.shape[:1], -1, stacked.shape[2], -1, stacked.shape[4])).unbind()
