"""Device graphs: forwards over fixed buffers are captured once and replayed by one launch each, without a compiler."""

import pkgutil
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_speculate.models.folded_attention import folding
from hf_speculate.models.module_walk import forward_hook_ids, parameters_of
from hf_speculate.models.runner import GRAPH_BACKENDS, CompiledUnits
from hf_speculate.options.compiled.compilation import Runner, copies
from hf_speculate.options.compiled.graph_trial import GraphTrial
from hf_speculate.options.compiled.language_model import States

FAILURE_KEY = "device graphs"  # key of failures that later calls need not repeat
_WEIGHTS, _BACKEND, _TRIAL = "weights", "backend", "trial"  # entries beside the graphs of a set of buffers
# Graphs that nobody asked for are captured only where as much of the device's memory is free.
MIN_FREE_SHARE = 1 / 32


class Graph(NamedTuple):
    """What a function launched."""

    outputs: Any  # in memory that every replay writes again
    replay: Callable[[], None]


_HOST_READS = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
    "is_nonzero", "repeat_interleave",
)  # fmt: skip
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class HostReads(TorchDispatchMode):
    """Raises RuntimeError where an operator brings numbers to the host: a device that captures cannot do that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        kwargs = kwargs or {}
        if name in _HOST_READS or _finds_true(name, args) or _leaves_device(name, args, kwargs):
            raise RuntimeError(f"the host was read in a forward: {name}")
        return func(*args, **kwargs)


def _finds_true(name: str, args: Any) -> bool:
    """Whether an operator indexes with a mask, the number of whose elements it must know."""
    return name in _INDEXED and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])


def _leaves_device(name: str, args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    return name == "_to_copy" and device is not None and device.type == "cpu" and args[0].device.type != "cpu"


class CudaGraphs:
    """CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None  # made when a function was seen to stay on the device

    def capture(self, function: Callable[[], Any]) -> Graph:
        """Capture what `function` launches, whose tensors must stay where they are as long as the graph is replayed."""
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    if self._pool is None:
                        # A capture that fails leaves more behind than an error here.
                        with HostReads():  # type: ignore[no-untyped-call]
                            function()
                        self._pool = torch.cuda.graph_pool_handle()
                    function()  # libraries make their workspaces and Triton compiles, which cannot be captured
            finally:
                current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            _drop_workspaces()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    outputs = function()
            finally:
                torch.cuda.set_stream(current)  # which torch does not after a capture that failed
                _drop_workspaces()
        return Graph(outputs, graph.replay)

    def timed(self, run: Callable[[], list[Any]]) -> tuple[list[Any], float]:
        """What `run` gives, and the seconds until the device has done it; nothing else runs there meanwhile."""
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        results = run()
        torch.cuda.synchronize(self._device)
        return results, time.perf_counter() - begin

    def has_room(self) -> bool:
        """Whether enough memory is free to capture what nobody asked for."""
        free, total = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused >= MIN_FREE_SHARE * total


def _drop_workspaces() -> None:
    """Let matrix products allocate new workspaces, in the memory of the graph while one is captured.

    torch frees them all whenever `torch.compile` records graphs of its own: one from outside of the graph, such as the
    run before the capture made, would then be gone from under it.
    """
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # builds for CPUs lack it


class _Recorded(NamedTuple):
    inputs: list[Tensor]  # that the graph reads
    sources: list[Tensor | None]  # what was copied to each of them last
    graph: Graph


class Graphing(Runner):
    """The graphs of one model, over states where they are and copies of all other tensors."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, units: CompiledUnits, on_failure: Callable[[str], None], is_tried: bool):
        super().__init__(model, units, on_failure)
        self._is_tried = is_tried  # whether graphs are compared with eager forwards, and used only where faster
        addresses = tuple(tensor.data_ptr() for tensor in (*parameters_of(model), *model.buffers()))
        self._weights: Hashable = model.training, forward_hook_ids(model), addresses
        self._graphs: dict[Hashable, Any] = {}

    def bind(self, graphs: dict[Hashable, Any]) -> None:
        """Use the graphs of a set of buffers; they are dropped if the model's weights or hooks have changed."""
        if graphs.get(_WEIGHTS) != self._weights:
            graphs.clear()
            graphs[_WEIGHTS] = self._weights
            graphs[_BACKEND] = pkgutil.resolve_name(GRAPH_BACKENDS[self.model.device.type])(self.model.device)
        self._graphs = graphs

    def run(self, name: Hashable, function: Callable[..., Any], *args: Any) -> Any | None:
        recorded = self._recorded(name, function, args)
        if recorded is None:
            return None
        results = self._attempt(
            name, recorded, lambda: [self._replay(recorded)], lambda: [function(self.model, *args)], 1, args
        )
        return None if results is None else results[0]

    def repeat(
        self, name: Hashable, step: Callable[..., Any], num_steps: int, carry: Any, *args: Any
    ) -> list[Any] | None:

        def advance(model: PreTrainedModel, carry: Any, *args: Any) -> Any:
            result, following = step(model, carry, *args)
            for buffer, value in zip(_tensors(carry), _tensors(following), strict=True):
                if value is not buffer:
                    buffer.copy_(value)
            return result

        def eager() -> list[Any]:
            results, now = [], carry
            for _ in range(num_steps):
                result, now = step(self.model, now, *args)
                results.append(result)
            return results

        recorded = self._recorded(name, advance, (carry, *args))
        if recorded is None:
            return None
        results = self._attempt(
            name, recorded, lambda: [self._replay(recorded) for _ in range(num_steps)], eager, num_steps, args
        )
        for index, _ in enumerate(_tensors(carry)):
            recorded.sources[index] = None  # the steps have written there
        return results

    def _attempt(
        self,
        name: Hashable,
        recorded: _Recorded,
        replay: Callable[[], list[Any]],
        eager: Callable[[], list[Any]],
        num_steps: int,
        args: tuple[Any, ...],
    ) -> list[Any] | None:
        """The results of a function's steps, from its graph or, while that is tried, eagerly; None if it fails."""
        if not self._is_tried:
            return replay()

        def forwards() -> list[Any]:
            with torch.no_grad(), folding():
                return eager()

        states = next((part for part in args if isinstance(part, States)), None)
        try:
            done = self._trial(name).run(id(recorded), replay, forwards, num_steps, states)
        except torch.OutOfMemoryError:
            self.give_up(self._eagerly("whose graphs cannot be compared in the device's memory"))
            return None
        except RuntimeError as error:  # the eager forward that follows raises again what is not the graph's own fault
            self.fail(f"replayed: {_first_line(error)}", FAILURE_KEY)
            return None
        if done.difference:
            self.fail(f"captured: a replay differs from the eager forward {done.difference}", FAILURE_KEY)
        return done.results

    def _trial(self, name: Hashable) -> GraphTrial:
        trial: GraphTrial = self._graphs.setdefault((_TRIAL, name), GraphTrial(self._graphs[_BACKEND]))
        return trial

    def _may_run(self, name: Hashable) -> bool:
        """Whether a function still runs from graphs; if they were seen to be slower, nothing does in this call."""
        slower = self._trial(name).slower if self.is_working and self._is_tried else ""
        if slower:
            self.give_up(self._eagerly("whose graphs are not faster"), slower)
        return self.is_working

    def _eagerly(self, why: str) -> str:
        return f"eager forwards of {type(self.model).__name__}, {why}"

    def _recorded(self, name: Hashable, function: Callable[..., Any], args: tuple[Any, ...]) -> _Recorded | None:
        """The graph of a function, captured on first use, with its inputs in place."""
        if not self._may_run(name):
            return None
        tensors = list(_tensors(args))
        key = name, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        recorded: _Recorded | None = self._graphs.get(key) or self._capture(function, args)
        if recorded is None:
            return None
        self._graphs[key] = recorded
        for index, tensor in enumerate(tensors):
            if tensor is not recorded.sources[index]:
                recorded.inputs[index].copy_(tensor)
                recorded.sources[index] = tensor
        return recorded

    def _capture(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Recorded | None:
        if self._is_tried and not self._graphs[_BACKEND].has_room():
            self.give_up(self._eagerly("for whose graphs too little of the device's memory is free"))
            return None

        def forward() -> Any:
            with torch.no_grad(), folding():
                return function(self.model, *inputs)

        try:
            inputs = copies(args, kept=(States,))
            graph = self._graphs[_BACKEND].capture(forward)
        except RuntimeError as error:
            is_lasting = not isinstance(error, torch.OutOfMemoryError)
            self.fail(f"captured: {_first_line(error)}", FAILURE_KEY if is_lasting else None)
            return None
        tensors = list(_tensors(inputs))
        return _Recorded(tensors, [None] * len(tensors), graph)

    def _replay(self, recorded: _Recorded) -> Any:
        """Copies of the outputs, which the next replay would overwrite."""
        recorded.graph.replay()
        return copies(recorded.graph.outputs)


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, those of states left out."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple) and not isinstance(tree, States):
        for part in tree:
            yield from _tensors(part)
