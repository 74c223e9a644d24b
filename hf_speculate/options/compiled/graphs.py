"""Capture forwards over fixed buffers as device graphs, and replay each with one launch."""

import itertools
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig

from hf_speculate.cache.preallocated import PreallocatedKVCache
from hf_speculate.models.folded_attention import folding
from hf_speculate.models.module_walk import forward_hook_ids, parameters_of
from hf_speculate.models.runner import GRAPH_BACKENDS, CompiledUnits
from hf_speculate.options.compiled.compilation import Runner, Steps, compiled, copies
from hf_speculate.options.compiled.fixed_tensors import Owner, OwnerRef, fix, owner_of
from hf_speculate.options.compiled.graph_trial import GraphTrial, Run
from hf_speculate.options.compiled.language_model import CodedModel, Numbers, RoundState, States
from hf_speculate.types import DeviceVerdict

# Several steps are compared this often, since a token changed by rounding also changes later
# tokens.
_MAX_DIFFERING = 3
_NUMBERS = itertools.count()  # numbers of captured graphs
_IN_PLACE = (States, Numbers)  # types of arguments at fixed addresses
FAILURE_KEY = "device graphs"  # key of failures that later calls must not repeat
# entries next to the graphs of a set of buffers
_WEIGHTS, _BACKEND, _TRIAL = "weights", "backend", "trial"
# With "auto", graphs are only captured if at least this share of the device's memory is free.
MIN_FREE_SHARE = 1 / 32


class Graph(NamedTuple):
    """The captured launches of a function."""

    outputs: Any  # overwritten by every replay
    replay: Callable[[], None]


_HOST_READS = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "repeat_interleave",
)  # fmt: skip
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class HostReads(TorchDispatchMode):
    """Dispatch mode that detects host reads.

    It raises RuntimeError if an operator copies numbers to the host, because captures do not allow
    that.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        kwargs = kwargs or {}
        if name in _HOST_READS or _finds_true(name, args) or _leaves_device(name, args, kwargs):
            raise RuntimeError(f"the host was read in a forward: {name}")
        return func(*args, **kwargs)


def _finds_true(name: str, args: Any) -> bool:
    """Return whether an operator indexes with a mask, and therefore counts its true elements."""
    return name in _INDEXED and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )


def _leaves_device(name: str, args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    return (
        name == "_to_copy"
        and device is not None
        and device.type == "cpu"
        and args[0].device.type != "cpu"
    )


class CudaGraphs:
    """Backend of CUDA graphs with one shared memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        # torch reuses free memory only on the same stream, so one stream lets graphs share theirs.
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # created after the first function without host reads

    def capture(self, function: Callable[[], Any]) -> Graph:
        """Capture the launches of `function`.

        Its tensors must keep their addresses for as long as the graph is replayed.
        """
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), self._stream
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    if self._pool is None:
                        # An error here is cleaner than a failed capture.
                        with HostReads():  # type: ignore[no-untyped-call]
                            function()
                        self._pool = torch.cuda.graph_pool_handle()
                    # warm-up: library workspaces and Triton compilation cannot be captured
                    function()
            finally:
                current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            _drop_workspaces()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
                ):
                    outputs = function()
            finally:
                torch.cuda.set_stream(current)  # torch leaves the stream set after a failed capture
                _drop_workspaces()
        return Graph(outputs, graph.replay)

    def timed(self, run: Callable[[], list[Any]]) -> tuple[list[Any], float]:
        """Return the results of `run` and its duration; synchronise the device before and after."""
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        results = run()
        torch.cuda.synchronize(self._device)
        return results, time.perf_counter() - begin

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function with Inductor, without torch's own graphs."""
        options = {"triton.cudagraphs": False}
        return compiled(function, CompileConfig(backend="inductor", options=options))

    def has_room(self) -> bool:
        """Return whether enough memory is free to capture graphs with "auto"."""
        free, total = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free + unused >= MIN_FREE_SHARE * total


def _drop_workspaces() -> None:
    """Drop cuBLAS workspaces, so that a captured graph allocates them in its own memory.

    torch frees all workspaces whenever `torch.compile` records graphs. A workspace from outside the
    graph, such as the warm-up's, would then be freed while the graph still uses it.
    """
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # CPU builds lack it


def weights_key(*modules: nn.Module) -> Hashable:
    """Return a key that changes if graphs that read the modules must not be replayed."""
    return tuple(
        (
            module.training,
            forward_hook_ids(module),
            tuple(map(tensor_key, (*parameters_of(module), *module.buffers()))),
        )
        for module in modules
    )


def tensor_key(tensor: Tensor) -> Hashable:
    """Return a key of the memory and the type of a tensor."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)


class _Recorded(NamedTuple):
    inputs: list[Tensor]  # read by the graph
    sources: list[Tensor | None]  # the last tensor copied to each input
    graph: Graph
    owner: Owner  # owner of the graph's outputs
    read: frozenset[OwnerRef]  # owners of the inputs
    number: int  # unlike an id, never that of an earlier graph


class Graphing(Runner):
    """Runs one model's device graphs.

    Graphs read states, `Numbers` and fixed tensors in place, and copies of all other tensors. They
    share one memory pool, so a replay may overwrite the outputs of all graphs.
    """

    verifies = True
    failure_key: Hashable = FAILURE_KEY
    rival: Run | None = None
    """Steps timed against replays in a trial; None for the eager ones."""
    is_eager: bool = False
    """Whether functions run eagerly, although graphs exist."""

    def __init__(
        self,
        model: nn.Module,
        units: CompiledUnits,
        on_failure: Callable[[str], None],
        is_tried: bool,
        key: Hashable = None,  # changes if graphs of other modules must not be replayed
    ):
        super().__init__(model, units, on_failure)
        # whether graphs are compared with eager forwards, and only used if faster
        self._is_tried = is_tried
        self.called: nn.Module | CodedModel = model  # the model argument of functions
        self._weights: Hashable = weights_key(model), key
        self._graphs: dict[Hashable, Any] = {}
        # owners of the fixed tensors read last, by function and shapes
        self._owners: dict[Hashable, frozenset[OwnerRef]] = {}
        self._num_differing: Counter[int] = Counter()  # number of failed comparisons, by graph

    def bind(self, kv_cache: PreallocatedKVCache) -> None:
        self.bind_to(kv_cache.graphs)

    def bind_to(self, graphs: dict[Hashable, Any]) -> None:
        """Use the graphs over some buffers, or drop them if weights or hooks have changed."""
        if graphs.get(_WEIGHTS) != self._weights:
            graphs.clear()
            graphs[_WEIGHTS], device = self._weights, next(self.model.parameters()).device
            graphs[_BACKEND] = pkgutil.resolve_name(GRAPH_BACKENDS[device.type])(device)
        self._graphs = graphs

    def run(self, name: Hashable, function: Callable[..., Any], *args: Any) -> Any | None:
        outputs = self.run_in_place(name, 1, function, *args)
        # The next replay overwrites them, and a verdict is only used in its round.
        return copies(outputs, kept=(DeviceVerdict,))

    def repeat(
        self, name: Hashable, steps: Steps, num_steps: int, carry: Any, *args: Any
    ) -> tuple[Any, Any] | None:

        def run_steps(model: nn.Module | CodedModel, carry: Any, *args: Any) -> tuple[Any, Any]:
            results = []
            for _ in range(num_steps):
                result, carry = steps.step(model, carry, *args)
                results.append(result)
            return steps.finish(results, *args), carry

        outputs: tuple[Any, Any] | None = self.run_in_place(
            name, num_steps, run_steps, carry, *args
        )
        return outputs

    def run_in_place(
        self, name: Hashable, num_steps: int, function: Callable[..., Any], *args: Any
    ) -> Any | None:
        """Run a function of `num_steps` steps, or return None if it cannot run.

        The outputs are those of its graph: other graphs read them in place, and the next replay of
        any graph overwrites them.
        """
        recorded = self._recorded(name, num_steps, function, args)
        if recorded is None:
            return None
        results = self._attempt(
            name,
            recorded,
            lambda: [_replay(recorded)],
            lambda: [function(self.called, *args)],
            num_steps,
            args,
        )
        if results is None:
            return None
        outputs = recorded.graph.outputs
        if results[0] is not outputs:  # the results come from an eager forward
            for output, value in zip(tree_leaves(outputs), tree_leaves(results[0]), strict=True):
                if isinstance(output, Tensor):
                    output.copy_(value)
        return outputs

    def _attempt(
        self,
        name: Hashable,
        recorded: _Recorded,
        replay: Callable[[], list[Any]],
        eager: Callable[[], list[Any]],
        num_steps: int,
        args: tuple[Any, ...],
    ) -> list[Any] | None:
        """Run a function's steps from its graph, or eagerly during the trial; None if it fails."""
        if not self._is_tried:
            return replay()

        def again(run: Run) -> list[Any]:
            for state in round_states(args):
                state.restore()  # an earlier run of the same round has advanced it
            return run()

        def forwards() -> list[Any]:
            with torch.no_grad(), folding():
                return again(eager)

        if self.is_eager:
            return forwards()
        states = [argument for argument in args if isinstance(argument, States)]
        buffers = [buffer for each in states for buffer in (each.keys[-1], each.values[-1])]
        buffers += [state.numbers for state in round_states(args)]
        try:
            rival = None if self.rival is None else partial(again, self.rival)
            attempt = self._trial(name).run(
                recorded.number, replay, forwards, num_steps, buffers, rival
            )
        except torch.OutOfMemoryError:
            self.give_up(self.instead("whose graphs cannot be compared in the device's memory"))
            return None
        except RuntimeError as error:  # the next eager forward raises other faults again
            self.fail(f"replayed: {_first_line(error)}", self.failure_key)
            return None
        if attempt.difference:
            self._num_differing[recorded.number] += 1
            if self._num_differing[recorded.number] >= min(num_steps, _MAX_DIFFERING):
                self.fail(
                    f"captured: a replay differs from the eager forward {attempt.difference}",
                    self.failure_key,
                )
        return attempt.results

    def _trial(self, name: Hashable) -> GraphTrial:
        trial: GraphTrial = self._graphs.setdefault(
            (_TRIAL, name), GraphTrial(self._graphs[_BACKEND])
        )
        return trial

    def _may_run(self, name: Hashable) -> bool:
        """Return whether a function may run from graphs; give up if they are slower."""
        slower = self._trial(name).slower if self.is_working and self._is_tried else ""
        if slower:
            self.give_up(self.instead("whose graphs are not faster"), slower)
        return self.is_working or self.is_eager

    @property
    def backend(self) -> Any:
        """The backend of the bound graphs."""
        return self._graphs[_BACKEND]

    def is_timed(self, name: Hashable) -> bool:
        """Return whether a function's graphs over these buffers have been timed."""
        return self._trial(name).is_timed

    def _recorded(
        self, name: Hashable, num_steps: int, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> _Recorded | None:
        """Return the graph of a function, captured on first use, with its inputs in place."""
        if not self._may_run(name):
            return None
        tensors = list(tensors_of(args))
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        form = name, num_steps, shapes
        # Memory that this call has already read belongs to it until it ends, so it may write there.
        owners = frozenset(filter(None, map(owner_of, tensors)))
        owners = owners or self._owners.get(form, frozenset())
        self._owners[form] = owners
        key = *form, owners
        recorded: _Recorded | None = self._graphs.get(key) or self._capture(function, args, owners)
        if recorded is None:
            return None
        self._graphs[key] = recorded
        for index, tensor in enumerate(tensors):
            if tensor is not recorded.inputs[index] and tensor is not recorded.sources[index]:
                recorded.inputs[index].copy_(tensor)
                is_overwritten = owner_of(tensor) or owner_of(recorded.inputs[index])
                recorded.sources[index] = None if is_overwritten else tensor
        return recorded

    def _capture(
        self, function: Callable[..., Any], args: tuple[Any, ...], owners: frozenset[OwnerRef]
    ) -> _Recorded | None:
        self._drop_unowned()
        if self._is_tried and not self._graphs[_BACKEND].has_room():
            self.give_up(self.instead("for whose graphs too little of the device's memory is free"))
            return None

        def forward() -> Any:
            with torch.no_grad(), folding():
                return function(self.called, *inputs)

        try:
            inputs = copies(args, kept=_IN_PLACE, is_kept=_is_fixed)
            for state in round_states(args):
                state.hold()
            try:
                graph = self._graphs[_BACKEND].capture(forward)
            finally:
                for state in round_states(args):
                    state.restore()
        except RuntimeError as error:
            is_lasting = not isinstance(error, torch.OutOfMemoryError)
            self.fail(f"captured: {_first_line(error)}", self.failure_key if is_lasting else None)
            return None
        owner = Owner()
        for tensor in tensors_of(graph.outputs):
            fix(tensor, owner)
        tensors = list(tensors_of(inputs))
        return _Recorded(tensors, [None] * len(tensors), graph, owner, owners, next(_NUMBERS))

    def _drop_unowned(self) -> None:
        """Drop the graphs that read outputs of graphs that are no longer there."""
        for key, recorded in list(self._graphs.items()):
            if isinstance(recorded, _Recorded) and any(owner() is None for owner in recorded.read):
                del self._graphs[key]


def _replay(recorded: _Recorded) -> Any:
    recorded.graph.replay()
    return recorded.graph.outputs


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]


def _is_fixed(tensor: Tensor) -> bool:
    return owner_of(tensor) is not None


def round_states(args: tuple[Any, ...]) -> list[RoundState]:
    """Return the round states among a function's arguments."""
    return [argument for argument in args if isinstance(argument, RoundState)]


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested tuples, except for those that graphs read in place."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple) and not isinstance(tree, _IN_PLACE):
        for child in tree:
            yield from tensors_of(child)
