"""Run forwards of few shapes over fixed buffers, for `torch.compile` and for device graphs."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import mark_static_address, maybe_mark_dynamic
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.masks import additive, hidden
from hf_speculate.cache.preallocated import MaskSpec, PreallocatedKVCache
from hf_speculate.compat import CACHE_NAME
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import LanguageModel, StateCapture
from hf_speculate.options.compiled.compilation import Runner
from hf_speculate.types import Scored

# Attention reads the first 256, 320, 384, 448, 512, 640, ... columns: at most a fifth of them are
# unused. Widths compiled or captured one by one are 256, 384, 512, 768, ...
MIN_WIDTH = 256
# The last columns are never read, because slicing a whole buffer would trigger a recompilation.
UNREAD_COLUMNS = 8


class Rows(NamedTuple):
    """Constant tensors of the rows.

    They are inputs of a compiled forward, so its Python numbers never change.
    """

    pads: Tensor  # [B] int64, columns of padding before the first token
    seen: Tensor  # [W] int64, columns 0..W-1, read by attention
    last_position: Tensor  # [1] int64, upper bound of position ids


class States(NamedTuple):
    """KV buffers of all layers."""

    keys: tuple[Tensor, ...]  # each [B, H, capacity, D]
    values: tuple[Tensor, ...]


class Numbers(NamedTuple):
    """Integers of the rows at a fixed address, for graphs to read in place."""

    by_row: Tensor  # [N, B] int64


class StaticSlotLayer(CacheLayerMixin):
    """Cache layer over fixed buffers [B, H, capacity, D].

    It serves one forward. The states of new tokens of rows `rows` [B, 1] int64 are written to
    columns `slots` [B, Q] int64; attention reads the first `width` columns.
    """

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, width: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.rows, self.slots = rows, slots
        self.width = width
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because the buffers exist already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        seen = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            # Through a flat view, the compiler would copy the whole buffer.
            buffer[self.rows, :, self.slots] = states.transpose(1, 2)  # type: ignore[index]  # [B, Q, H, D]
            seen.append(buffer[:, :, : self.width])  # type: ignore[index]
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        """Return the columns read by attention; row lengths exist only as tensors."""
        return self.width

    def get_max_length(self) -> int:
        return self.width


class CodedModel(NamedTuple):
    """A model with compiled code of `forward_rows`."""

    model: PreTrainedModel
    forward: Callable[..., Scored]  # with the arguments of `forward_rows`


def forward_rows(
    model: PreTrainedModel | CodedModel,
    query: Tensor,
    ends: Tensor,
    rows: Rows,
    states: States,
    mask_spec: MaskSpec,
    layers: tuple[int, ...] = (),
) -> Scored:
    """Score query tokens [B, Q] int64 and write their states.

    The states of a row are written from its column in `ends` [B] int64 on. The inputs of the
    decoder layers `layers` are captured; -1 is the state after the final norm.
    """
    if isinstance(model, CodedModel):
        return model.forward(model.model, query, ends, rows, states, mask_spec, layers)
    offsets = torch.arange(query.shape[1], device=query.device)
    slots = ends[:, None] + offsets  # [B, Q]
    positions = torch.minimum((slots - rows.pads[:, None]).clamp_min(0), rows.last_position)
    is_padding = rows.seen < rows.pads[:, None, None]  # [B, 1, W]
    mask = mask_spec.masks(
        lambda window: additive(
            hidden(rows.seen, slots[:, :, None], window) | is_padding, mask_spec.mask_dtype
        )
    )
    width = rows.seen.shape[0]
    indices = torch.arange(slots.shape[0], device=slots.device)[:, None]  # [B, 1]
    layers_of_call: list[Any] = [
        StaticSlotLayer(*buffers, indices, slots, width) for buffers in zip(*states, strict=True)
    ]
    options: dict[str, Any] = {CACHE_NAME: Cache(layers=layers_of_call)}
    if layers:
        options["output_hidden_states"] = True
    output: Any = model(
        input_ids=query,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        return_dict=True,
        **options,
    )
    captured = (
        torch.cat([output.hidden_states[layer] for layer in layers], dim=-1) if layers else None
    )
    return Scored(output.logits, captured=captured)


def width_for(num_columns: int, capacity: int, num_steps: int = 2) -> int:
    """Return the number of columns to be read by attention.

    Args:
        num_columns: columns in use.
        capacity: columns of the buffers.
        num_steps: number of widths between two powers of two.
    """
    base = MIN_WIDTH
    while 2 * base <= num_columns:
        base *= 2
    step = base // num_steps
    width = max(-(-num_columns // step) * step, base)
    return min(width, capacity - UNREAD_COLUMNS)


class FixedBuffers:
    """Cache arguments of compiled forwards.

    The cache's fixed buffers hold states already. With dynamic sizes, one compilation serves all
    numbers of rows and columns and all widths; a single row is compiled separately.
    """

    def __init__(self, kv_cache: PreallocatedKVCache, max_position: int | None, varies: bool):
        self.kv_cache = kv_cache
        self._varies = varies
        layers: list[Any] = kv_cache.cache.layers
        self.states = States(
            tuple(layer.keys for layer in layers), tuple(layer.values for layer in layers)
        )
        device = kv_cache.device
        self._pads = self.vary(torch.tensor(kv_cache.layout.pads, device=device), 0)
        self._last_position = torch.tensor(
            [2**62 if max_position is None else max_position], device=device
        )
        self._seen: dict[int, Tensor] = {}
        for buffer in (*self.states.keys, *self.states.values):
            if buffer.device.type == "cuda":
                mark_static_address(buffer)
            self.vary(buffer, 0, 2)

    def arguments(self, num_query: int) -> tuple[Tensor, Rows, States, MaskSpec]:
        """Return the arguments after the query for a forward of `num_query` columns."""
        ends = self.vary(self.kv_cache.layout.row_lens.on_device(), 0)
        return ends, *self.constants(num_query)

    def constants(self, num_query: int) -> tuple[Rows, States, MaskSpec]:
        """Return the arguments that do not change while attention reads the same columns."""
        layout = self.kv_cache.layout
        capacity = self.states.keys[0].shape[2]
        serves_all = self._varies and self.kv_cache.device.type != "cuda"
        width = width_for(
            layout.num_columns + num_query, capacity, num_steps=4 if serves_all else 2
        )
        if width not in self._seen:
            self._seen[width] = self.vary(torch.arange(width, device=self.kv_cache.device), 0)
        rows = Rows(self._pads, self._seen[width], self._last_position)
        return rows, self.states, self.kv_cache.mask_spec

    def put(self, name: Hashable, parts: Sequence[Tensor]) -> Numbers:
        """Write integers [n, B] int64 one below the other to a fixed address, in one launch."""
        graphs, key = self.kv_cache.graphs, (name, sum(map(len, parts)), parts[0].shape[1])
        numbers: Numbers | None = graphs.get(key)
        if numbers is None:
            numbers = graphs[key] = Numbers(self.vary(torch.cat(list(parts)), 1))
        else:
            torch.cat(list(parts), out=numbers.by_row)
        return numbers

    def vary(self, tensor: Tensor, *dims: int) -> Tensor:
        """Mark some dimensions of a tensor as dynamic, if sizes may vary, and return it."""
        if self._varies:
            maybe_mark_dynamic(tensor, dims)
        return tensor


class CompiledLanguageModel(LanguageModel):
    """A `LanguageModel` with compiled forwards.

    Short queries run compiled, padded to compiled lengths. Prompts run eagerly.
    """

    pads_queries = True

    def __init__(
        self,
        model: PreTrainedModel,
        max_position: int | None,
        runner: Runner,
        query_lens: Sequence[int],
        extra_inputs: ExtraInputs | None = None,
        capture: StateCapture | None = None,
    ):
        # All forwards share one mode, or everything would compile twice.
        super().__init__(
            model, max_position, keeps_states=True, extra_inputs=extra_inputs, capture=capture
        )
        self.runner = runner
        self.query_lens = tuple(query_lens)
        self._buffers: FixedBuffers | None = None

    def buffers(self, kv_cache: KVCache) -> FixedBuffers | None:
        """Return the buffers of `kv_cache` for compiled forwards; None if they must run eagerly."""
        if not isinstance(kv_cache, PreallocatedKVCache) or kv_cache.layout.capacity is None:
            return None
        if not self.runner.is_working or not kv_cache.num_columns:
            return None
        if self._buffers is None or self._buffers.kv_cache is not kv_cache:
            self._buffers = FixedBuffers(kv_cache, self.max_position, self.runner.varies)
            self.runner.bind(kv_cache)
        return self._buffers

    def run(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        *,
        logits_to_keep: int | None = None,
        **forward_options: Any,
    ) -> Scored:
        num_query = query_token_ids.shape[1]
        padded_len = next((length for length in self.query_lens if length >= num_query), None)
        buffers = None if self.extra_inputs.awaits_prompt else self.buffers(kv_cache)
        scored: Scored | None = None
        if buffers is not None and padded_len is not None and num_query and not forward_options:
            padded = query_token_ids.new_zeros(query_token_ids.shape[0], padded_len)  # [B, Q]
            padded[:, :num_query] = query_token_ids
            layers = () if self.capture is None else self.capture.layers
            name = f"forward with {layers}" if layers else "forward"
            query = buffers.vary(padded, 0, 1)
            ends, rows, states, mask_spec = buffers.arguments(padded_len)
            scored = self.runner.run(
                name, forward_rows, query, ends, rows, states, mask_spec, layers
            )
        if scored is None:
            return super().run(
                query_token_ids, kv_cache, logits_to_keep=logits_to_keep, **forward_options
            )
        kv_cache.advance(num_query)
        first = 0 if logits_to_keep is None else num_query - logits_to_keep
        captured = None if scored.captured is None else scored.captured[:, :num_query]
        return scored._replace(logits=scored.logits[:, first:num_query], captured=captured)
