"""Run forwards of few shapes over fixed buffers, for `torch.compile` and for device graphs."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import mark_static_address, maybe_mark_dynamic
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.masks import additive, hidden
from hf_speculate.cache.preallocated import MaskSpec, PreallocatedKVCache
from hf_speculate.compat import CACHE_NAME
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import LanguageModel, StateCapture
from hf_speculate.options.compiled.compilation import Runner
from hf_speculate.transfers import pack
from hf_speculate.types import (
    DeviceRows,
    DeviceVerdict,
    DraftOut,
    NoiseKeys,
    RoundRows,
    Scored,
    Verified,
)

# Attention reads the first 256, 320, 384, 448, 512, 640, ... columns: at most a fifth of them are
# unused. Widths compiled or captured one by one are 256, 384, 512, 768, ...
MIN_WIDTH = 256
# The last columns are never read, because slicing a whole buffer would trigger a recompilation.
UNREAD_COLUMNS = 8
_STATE = "round state"  # beside the graphs of a set of buffers

RoundRule = Callable[[Tensor, DraftOut, NoiseKeys, Tensor], DeviceVerdict]


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


class RoundState:
    """State of the rows on the device, read and advanced by the graphs of rounds.

    The host knows it too. It writes a state only if rows did not advance as on the device: at an
    end, for example.

    Args:
        numbers: [6, B] int64 at a fixed address: newest two tokens, column of the newest one's
            state, round and position of the noise keys, and 1 for rows that are not finished.
    """

    def __init__(self, numbers: Tensor):
        self.numbers = numbers
        self._written: list[list[int]] = []  # before the last round
        self._expected: list[list[int]] | None = None  # now; None if unknown

    def write(self, rows: RoundRows, ends: list[int]) -> None:
        """Bring the device's state to that of the rows; `ends` [B] are the lengths of the cache."""
        self._written = _listed(rows, ends)
        if self._written != self._expected:
            self.restore()
        self._expected = None

    def hold(self) -> None:
        """Finish all rows, so that they do not advance in the forwards of a capture."""
        self.numbers[-1].zero_()

    def restore(self) -> None:
        """Bring the device's state to that before the last round."""
        numbers = torch.tensor(self._written, device="cpu")
        if self.numbers.device.type == "cuda":
            numbers = numbers.pin_memory()  # otherwise the host waits for all work before
        self.numbers.copy_(numbers, non_blocking=True)

    def follow(self, verified: Verified, rows: RoundRows, ends: list[int]) -> DeviceRows | None:
        """Take the verdict of a round, read from the device.

        Returns:
            The state on the device, if it is that of the rows before the next round.
        """
        expected = []
        for numbers, ids, num_accepted in zip(
            zip(*self._written, strict=True), verified.new_ids, verified.num_accepted, strict=True
        ):
            older, newest, end, num_round, position, is_live = numbers
            if is_live and len(ids) != num_accepted + 1:
                return None  # cut since
            num_new = len(ids) if is_live else 0
            older, newest = [older, newest, *ids[:num_new]][-2:]
            expected.append(
                (older, newest, end + num_new, num_round + 1, position + num_new, is_live)
            )
        self._expected = [list(column) for column in zip(*expected, strict=True)]
        if self._expected != _listed(rows, ends):
            return None
        # new views, so that a graph that copies them sees that they have changed
        keys = NoiseKeys(rows.seeds, self.numbers[3], self.numbers[4])
        return DeviceRows(self.numbers[:2].T, keys)


def _listed(rows: RoundRows, ends: list[int]) -> list[list[int]]:
    """Return the numbers of `RoundState`."""
    older, newest = zip(*rows.newest_ids, strict=True)
    is_live = [int(is_live) for is_live in rows.is_live]
    return [list(older), list(newest), ends, rows.rounds, rows.positions, is_live]


class DraftTensors(NamedTuple):
    """Tensors of a draft, see `DraftOut`."""

    token_ids: Tensor
    lens: Tensor
    token_logits: Tensor | None
    logsumexp: Tensor | None


class RoundOut(NamedTuple):
    """The outputs of a round; its logits are those of the verdict."""

    judged: DeviceVerdict
    captured: Tensor | None


def score_and_verify(
    model: PreTrainedModel,
    state: RoundState,
    seeds: Tensor,
    draft: DraftTensors,
    rows: Rows,
    states: States,
    mask_spec: MaskSpec,
    layers: tuple[int, ...],
    rule: RoundRule,
) -> RoundOut:
    """Score and verify a draft, and advance the rows; see `forward_rows`."""
    older, newest, ends, rounds, positions, is_live = state.numbers.unbind()
    query = torch.cat([newest[:, None], draft.token_ids.clamp_min(0)], dim=1)  # [B, K+1]
    scored = forward_rows(model, query, ends, rows, states, mask_spec, layers)
    judged = rule(
        scored.logits, DraftOut(*draft), NoiseKeys(seeds, rounds, positions), newest[:, None]
    )
    token_ids, num_accepted, status = judged.verdict
    num_new = (num_accepted + 1) * is_live  # [B] int64
    new_ids = torch.cat([older[:, None], newest[:, None], token_ids], dim=1)  # [B, K+3]
    indices = num_new[:, None] + torch.arange(2, device=query.device)
    newest_ids = new_ids.gather(1, indices).unbind(1)
    packed = pack(judged.ids, num_accepted, status, draft.lens)
    state.numbers.copy_(
        torch.stack([*newest_ids, ends + num_new, rounds + 1, positions + num_new, is_live])
    )
    return RoundOut(judged._replace(packed=packed), scored.captured)


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
        self._no_drafts: dict[int, DraftTensors] = {}
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

    def padded(self, draft: DraftOut, num_tokens: int) -> DraftTensors:
        """Return the tensors of a draft, padded to `num_tokens` tokens that do not count."""
        num_missing, tensors = num_tokens - draft.token_ids.shape[1], DraftTensors(*draft[:4])
        if not num_missing:
            return tensors
        if num_missing == num_tokens:
            if num_tokens not in self._no_drafts:
                ids = draft.token_ids.new_zeros(self.kv_cache.batch_size, num_tokens)
                self._no_drafts[num_tokens] = DraftTensors(ids, draft.lens, None, None)
            return self._no_drafts[num_tokens]
        ids, lens, logits, logsumexp = tensors
        return DraftTensors(
            pad(ids, (0, num_missing)),
            lens,
            None if logits is None else pad(logits, (0, 0, 0, num_missing)),
            None if logsumexp is None else pad(logsumexp, (0, num_missing)),
        )

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
        self._state: RoundState | None = None  # if rounds are verified in graphs

    def buffers(self, kv_cache: KVCache) -> FixedBuffers | None:
        """Return the buffers of `kv_cache` for compiled forwards; None if they must run eagerly."""
        if not isinstance(kv_cache, PreallocatedKVCache) or kv_cache.layout.capacity is None:
            return None
        if not self.runner.is_working or not kv_cache.num_columns:
            return None
        if self._buffers is None or self._buffers.kv_cache is not kv_cache:
            self._buffers = FixedBuffers(kv_cache, self.max_position, self.runner.varies)
            self.runner.bind(kv_cache)
            self._state = None
        return self._buffers

    def run_round(
        self, rows: RoundRows, draft: DraftOut, kv_cache: KVCache, rule: RoundRule
    ) -> Scored | None:
        num_query = draft.token_ids.shape[1] + 1
        padded_len = self._padded_len(num_query)
        buffers = None if self.extra_inputs.awaits_prompt else self.buffers(kv_cache)
        if buffers is None or padded_len is None or not self.runner.verifies:
            return None
        layers = () if self.capture is None else self.capture.layers
        state = self._round_state(buffers.kv_cache)
        state.write(rows, list(buffers.kv_cache.layout.lens))
        tensors, constants = (
            buffers.padded(draft, padded_len - 1),
            buffers.constants(padded_len),
        )
        name = f"round with {layers}", rule
        out: RoundOut | None = self.runner.run(
            name, score_and_verify, state, rows.seeds, tensors, *constants, layers, rule
        )
        if out is None:
            state.restore()  # it holds the keys of the round
            return None
        kv_cache.advance(num_query)
        captured = None if out.captured is None else out.captured[:, :num_query]
        return Scored(out.judged.logits[:, :num_query], captured=captured, judged=out.judged)

    def end_round(
        self, verified: Verified, rows: RoundRows, kv_cache: KVCache
    ) -> DeviceRows | None:
        if self._state is None or self._buffers is None or self._buffers.kv_cache is not kv_cache:
            return None
        return self._state.follow(verified, rows, list(self._buffers.kv_cache.layout.lens))

    def run(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        *,
        logits_to_keep: int | None = None,
        **forward_options: Any,
    ) -> Scored:
        num_query = query_token_ids.shape[1]
        padded_len = self._padded_len(num_query)
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

    def _round_state(self, kv_cache: PreallocatedKVCache) -> RoundState:
        """Return the state of the rows, at one address for all graphs over the buffers."""
        if self._state is None:
            if _STATE not in kv_cache.graphs:
                kv_cache.graphs[_STATE] = torch.zeros(
                    6, kv_cache.batch_size, dtype=torch.int64, device=kv_cache.device
                )
            self._state = RoundState(kv_cache.graphs[_STATE])
        return self._state

    def _padded_len(self, num_query: int) -> int | None:
        """Return the length of the shortest compiled query for `num_query` tokens; None if none is."""
        return next((length for length in self.query_lens if length >= num_query), None)
