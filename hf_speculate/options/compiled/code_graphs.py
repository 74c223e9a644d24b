"""Run graphs of a model as loaded, or of its compiled code if that pays off.

The forward in captured functions is compiled once per model, and the launches of the compiled code
are captured like any others. Compiling takes about a minute, so it begins only if the model
has decoded for longer than that and the rest of the call will take longer than that.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from transformers import PreTrainedModel

from hf_speculate.cache.preallocated import PreallocatedKVCache
from hf_speculate.model_state import model_state
from hf_speculate.models.folded_attention import folding
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.options.compiled.compilation import Runner, Steps, cause_of, is_recompile_limit
from hf_speculate.options.compiled.graph_trial import CODE_TOLERANCES, compare
from hf_speculate.options.compiled.graphs import Graphing, round_states, tensors_of
from hf_speculate.options.compiled.language_model import CodedModel, Rows, States, forward_rows
from hf_speculate.types import Scored

CODE_FAILURE_KEY = "device graphs of compiled code"
# Estimated seconds for compiling a forward: for starting the compiler, and per layer. Lowering a
# layer takes 1.1 s on a 2-core CPU.
START_S, LAYER_S = 10.0, 1.2
MAX_QUERY = 64  # for longer queries, attention folds no heads and would compile again
MOST_CHECK_S = 5.0  # maximum duration of two forwards in seconds if neither is compiled
MIN_ROUNDS, NUM_RECENT = 4, 32  # number of rounds whose median is the pace of a call


class CodeTimes:
    """How long a model has spent in this process on decoding and on compiling, in seconds."""

    def __init__(self) -> None:
        self.decoded_s = 0.0
        self.compile_s: dict[Hashable, float] = {}  # keyed by class of shapes
        self.is_compiling = threading.Lock()  # held while a thread compiles for new shapes

    @classmethod
    def of(cls, model: PreTrainedModel) -> "CodeTimes":
        """Return the times of a model."""
        return model_state(model).get(cls, cls)

    def estimate_s(self, num_layers: int) -> float:
        """Estimate how long compiling the forward for another class of shapes takes, in seconds."""
        return max(self.compile_s.values(), default=START_S + LAYER_S * num_layers)


def is_worth_compiling(compile_s: float, decoded_s: float, rest_s: float) -> bool:
    """Return whether to compile now.

    A model that has already decoded for as long as compiling takes is likely to decode for as long
    again. In addition, the rest of the call should be worth the wait.

    Args:
        compile_s: seconds that compiling takes.
        decoded_s: seconds that the model has spent decoding in this process.
        rest_s: seconds that the rest of this call takes, up to its maximum length.
    """
    return min(decoded_s, rest_s) > compile_s


class Pace:
    """Pace of a call: the durations of its rounds, and the columns that they add to a cache."""

    def __init__(self, kv_cache: PreallocatedKVCache, times: CodeTimes):
        self._layout, self._times = kv_cache.layout, times
        self._first_column, self._num_rounds = self._layout.num_columns, 0
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)
        self._last_s: float | None = None
        self._last_column: int | None = None  # first column of the current round

    def tick(self, now_s: float) -> None:
        """Begin a round, unless the cache is as long as at its beginning.

        The parts of a split draft belong to one round. A round that took long, for example because
        another model was compiled, counts as at most twice the median.
        """
        num_columns = self._layout.num_columns
        if num_columns == self._last_column:
            return
        self._last_column = num_columns
        if self._last_s is not None:
            round_s = now_s - self._last_s
            self._num_rounds += 1
            most_s = 2 * median(self._recent_s) if self._recent_s else round_s
            self._times.decoded_s += min(round_s, most_s)
            self._recent_s.append(round_s)
        self._last_s = now_s

    @property
    def rest_s(self) -> float:
        """Estimated seconds for the rest of the call; 0 if unknown."""
        num_columns, max_columns = self._layout.num_columns, self._layout.max_columns
        num_new = num_columns - self._first_column
        if max_columns is None or num_new <= 0 or self._num_rounds < MIN_ROUNDS:
            return 0.0
        num_rounds = self._num_rounds * (max_columns - num_columns) / num_new
        return num_rounds * median(self._recent_s)


class CodeGraphing(Graphing):
    """Graphs of compiled code; after a failure, the graphs of the model as loaded remain."""

    model: PreTrainedModel
    called: PreTrainedModel | CodedModel
    failure_key = CODE_FAILURE_KEY

    def __init__(
        self,
        model: PreTrainedModel,
        units: CompiledUnits,
        on_failure: Callable[[str], None],
        num_query: int,  # maximum tokens per row in a forward
        layers: tuple[int, ...],  # see `forward_rows`
    ):
        super().__init__(model, units, on_failure, is_tried=True)
        self._num_query, self._layers = min(num_query, MAX_QUERY), layers
        failure = units.failures.get(CODE_FAILURE_KEY)
        if failure is not None:
            self.give_up(failure)

    def instead(self, why: str) -> str:
        name = type(self.model).__name__
        return f"graphs of {name} as loaded in place of its compiled code, {why}"

    def give_up(self, reason: str, figures: str = "") -> None:
        if not figures:
            super().give_up(reason)
            return
        self.is_working = False  # no warning, since the code is only slower
        self._on_failure(f"{reason}: {figures}")

    def prepare(self, kv_cache: PreallocatedKVCache, args: tuple[Any, ...], rest_s: float) -> bool:
        """Return whether the model's forward is compiled; compile it if that pays off.

        Before the first forward of each width, the compiled code and the model run once each, and
        their results are compared. Both write to the columns of the next tokens. Earlier steps of
        the same round may have written there too, so these states are restored.
        """
        rows = next(argument for argument in args if isinstance(argument, Rows))
        states = next(argument for argument in args if isinstance(argument, States))
        width, batch_size = rows.seen.shape[0], kv_cache.batch_size
        checked: set[int] = self._graphs.setdefault(CODE_FAILURE_KEY, set())
        times = CodeTimes.of(self.model)
        # torch compiles sizes of 1 separately
        sizes = min(batch_size, 2), min(self._num_query, 2), torch.is_inference_mode_enabled()
        unit = self._layers, sizes
        is_known = unit in times.compile_s
        if not is_known:
            estimate_s = times.estimate_s(len(states.keys))
            if not is_worth_compiling(estimate_s, times.decoded_s, rest_s):
                return False
            if not times.is_compiling.acquire(blocking=False):
                return False  # go on without the code that another thread compiles
        try:
            code = self.units.function(
                (CODE_FAILURE_KEY, self._layers),
                lambda: _with_sizes(self.backend.compile(forward_rows)),
            )
            self.called = CodedModel(self.model, code)
            if width in checked:
                return True
            query = torch.arange(batch_size * self._num_query, device=kv_cache.device)
            query = query.remainder(vocab_size_of(self.model)).view(batch_size, -1)
            ends, mask_spec = kv_cache.layout.row_lens.on_device(), kv_cache.mask_spec
            forward_args = query, ends, rows, states, mask_spec, self._layers
            begin_s = time.perf_counter()
            with torch.no_grad(), folding(), _restored(states, ends, self._num_query):
                difference = compare(
                    lambda: [forward_rows(self.called, *forward_args)],
                    lambda: [forward_rows(self.model, *forward_args)],
                    (states.keys[-1], states.values[-1]),
                    CODE_TOLERANCES,
                ).difference
            spent_s = time.perf_counter() - begin_s
        except torch.OutOfMemoryError:
            self.give_up(self.instead("which cannot be compiled in the device's memory"))
            return False
        except Exception as error:  # noqa: BLE001  # a compiler error must not fail a call
            is_lasting = not is_recompile_limit(error)
            self.fail(f"compiled: {cause_of(error)}", CODE_FAILURE_KEY if is_lasting else None)
            return False
        finally:
            if not is_known:
                times.is_compiling.release()
        if is_known and spent_s > MOST_CHECK_S:
            self.fail("kept: other shapes compile again", CODE_FAILURE_KEY)
            return False
        times.compile_s.setdefault(unit, spent_s)
        if difference:
            self.fail(f"used: it differs from the eager forward {difference}", CODE_FAILURE_KEY)
            return False
        checked.add(width)
        return True


class FastestGraphing(Runner):
    """Runs the fastest graphs, of the model as loaded or of its compiled code."""

    model: PreTrainedModel
    verifies = True
    _kv_cache: PreallocatedKVCache
    _pace: Pace  # over the bound cache

    def __init__(
        self,
        model: PreTrainedModel,
        units: CompiledUnits,
        on_failure: Callable[[str], None],
        # called with an empty reason once graphs of compiled code are in use, and with the reason
        # once they no longer are
        on_code: Callable[[str], None],
        num_query: int,  # maximum tokens per row in a forward
        layers: tuple[int, ...],  # see `forward_rows`
    ):
        super().__init__(model, units, on_failure)
        self._on_code = on_code
        self._has_times = False  # whether graphs of the model as loaded are timed
        self._loaded = Graphing(model, units, on_failure, is_tried=True)
        self._code = CodeGraphing(model, units, self._drop_code, num_query, layers)

    def bind(self, kv_cache: PreallocatedKVCache) -> None:
        self._loaded.bind(kv_cache)
        self._code.bind(kv_cache)
        self._kv_cache, self._pace = kv_cache, Pace(kv_cache, CodeTimes.of(self.model))

    def run(self, name: Hashable, function: Callable[..., Any], *args: Any) -> Any | None:
        return self._fastest(name, args, lambda graphs, name: graphs.run(name, function, *args))

    def repeat(
        self, name: Hashable, steps: Steps, num_steps: int, carry: Any, *args: Any
    ) -> tuple[Any, Any] | None:
        outputs: tuple[Any, Any] | None = self._fastest(
            name, args, lambda graphs, name: graphs.repeat(name, steps, num_steps, carry, *args)
        )
        return outputs

    def _fastest(
        self, name: Hashable, args: tuple[Any, ...], run: Callable[[Graphing, Hashable], Any | None]
    ) -> Any | None:
        """Run a function from graphs of the model as loaded or of its compiled code.

        Graphs of the code begin after the trial of graphs of the model as loaded.
        """
        self._pace.tick(time.perf_counter())
        outputs = None
        if (
            self._code.is_working
            and self._loaded.is_timed(name)
            and self._code.prepare(self._kv_cache, args, self._pace.rest_s)
        ):
            code_name = name, CODE_FAILURE_KEY
            is_decided = self._code.is_timed(code_name)
            self._code.rival = lambda: [self._run_loaded(name, run)]
            outputs = run(self._code, code_name)
            if is_decided and self._code.is_working:
                self._on_code("")
        if outputs is None:
            for state in round_states(args):
                state.restore()  # a failed replay may have advanced it
            outputs = run(self._loaded, name)
        self._has_times |= self._loaded.is_timed(name)
        # Compiled code may be faster than eager forwards even if graphs of the model as loaded are
        # not.
        may_use_code = self._code.is_working and self._has_times
        self.is_working = self._loaded.is_working or may_use_code
        return outputs

    def _run_loaded(
        self, name: Hashable, run: Callable[[Graphing, Hashable], Any | None]
    ) -> Any | None:
        """Run a function of the model as loaded from its graph, or eagerly if that is faster."""
        outputs = run(self._loaded, name)
        if outputs is None:
            self._loaded.is_eager = True
            outputs = run(self._loaded, name)
            self._loaded.is_eager = False
        return outputs

    def _drop_code(self, reason: str) -> None:
        """Report that graphs of compiled code are no longer in use."""
        (self._on_code if self._loaded.is_working else self._on_failure)(reason)


@contextmanager
def _restored(states: States, ends: Tensor, num_query: int) -> Iterator[None]:
    """Restore the states of `num_query` columns from `ends` [B] on at the end of the block."""
    rows = torch.arange(len(ends), device=ends.device)[:, None]
    columns = ends[:, None] + torch.arange(num_query, device=ends.device)  # [B, Q]
    buffers = (*states.keys, *states.values)
    kept = [buffer[rows, :, columns] for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in zip(buffers, kept, strict=True):
            buffer[rows, :, columns] = values


def has_code(model: PreTrainedModel) -> bool:
    """Return whether earlier calls of a model have compiled its functions for graphs."""
    failures = CompiledUnits.of(model).failures
    return bool(CodeTimes.of(model).compile_s) and CODE_FAILURE_KEY not in failures


def _with_sizes(code: Callable[..., Scored]) -> Callable[..., Scored]:
    """Compile `forward_rows` for any number of rows and columns, and for short queries."""

    def run(model: PreTrainedModel, query: Tensor, ends: Tensor, *args: Any) -> Scored:
        if query.shape[1] > MAX_QUERY:
            return forward_rows(model, query, ends, *args)
        # views and other strides would be compiled again
        query, ends = query.clone(memory_format=torch.contiguous_format), ends.clone()
        for tensor in tensors_of((query, ends, *args)):
            maybe_mark_dynamic(tensor, tuple(range(tensor.dim())))
        for states in (argument for argument in args if isinstance(argument, States)):
            for buffer in (*states.keys, *states.values):
                maybe_mark_dynamic(buffer, (0, 2))
        return code(model, query, ends, *args)

    return run
