"""Simulate device graphs on any device: record operators and their tensors, and run them again.

An error is raised where a CUDA graph would be wrong: a tensor from outside has since moved, changed
its shape or been freed, the host was read during the capture, or outputs are read after a later
replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from hf_speculate.options.compiled.graphs import Graph, HostReads

_HOST_METHODS = (Tensor.tolist, Tensor.numpy)


class Operator(NamedTuple):
    func: Any
    args: tuple[Any, ...]  # tensors from outside are `Outside`
    kwargs: dict[str, Any]
    outputs: list[Any]
    is_view: bool


def is_view(func: Any) -> bool:
    returned = [result.alias_info for result in func._schema.returns]
    return any(info is not None and not info.is_write for info in returned)


class Outside:
    """Tensor from before the capture, as the graph expects it."""

    def __init__(self, tensor: Tensor):
        self._tensor = ref(tensor)
        self._known = tensor.data_ptr(), tensor.shape, tensor.stride()

    def get(self) -> Tensor:
        tensor = self._tensor()
        if tensor is None:
            raise AssertionError("a tensor that a graph reads was freed")
        identity = tensor.data_ptr(), tensor.shape, tensor.stride()
        if identity != self._known:
            raise AssertionError(
                f"a tensor that a graph reads was {self._known}, is now {identity}"
            )
        return tensor


class _HostMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_METHODS:
            raise RuntimeError(f"the host was read in a forward: {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Mode that runs operators and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self._made: dict[int, Tensor] = {}  # by id; recorded operators keep the tensors alive
        self._outside: dict[int, Outside] = {}

    def add_launch(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Record a kernel that writes to its arguments."""
        args, kwargs = tree_map(self._known, (args, kwargs))
        self.operators.append(Operator(run, args, kwargs, [None], False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode, composite operators reach the mode
                return func.decompose(*args, **(kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._known, (args, kwargs or {}))
        flat = tree_flatten(outputs)[0]
        self._made |= {
            id(tensor): tensor
            for tensor in flat
            if isinstance(tensor, Tensor) and id(tensor) not in self._outside
        }
        self.operators.append(Operator(func, args, kwargs, flat, is_view(func)))
        return outputs

    def _known(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in self._made:
            return value
        return self._outside.setdefault(id(value), Outside(value))


class _Compiler(TorchDispatchMode):
    """Mode that replaces an operator with others, as compilers do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.silu.default:
            return func(*args, **(kwargs or {}))
        gate = torch.sigmoid(args[0])
        return args[0] * (1 - gate if RecordedGraphs.is_code_wrong else gate)


class RecordedGraphs:
    """Graphs with the interface of `CudaGraphs` that replay recorded operators on a fake clock."""

    num_captures = 0
    num_replays = 0
    num_code_replays = 0  # replays of compiled code among them
    spent_s = 0.0  # simulated time of all replays
    replay_s, code_s, eager_s = 1.0, 0.5, 2.0
    is_wrong = False  # whether replays give wrong numbers
    is_code_wrong = False  # whether compiled code gives wrong numbers
    has_memory = True

    def __init__(self, device: torch.device):
        self.device = device
        self._outputs: list[Any] = []  # outputs of all graphs, which share their memory

    def capture(self, function: Callable[[], Any]) -> Graph:
        with recording() as operators:
            outputs = function()
        RecordedGraphs.num_captures += 1
        is_code = any(entry.func is torch.ops.aten.sigmoid.default for entry in operators)
        self._outputs.append(outputs)

        def again() -> None:
            RecordedGraphs.num_replays += 1
            RecordedGraphs.num_code_replays += is_code
            RecordedGraphs.spent_s += self.code_s if is_code else self.replay_s
            overwrite(self._outputs)
            replay(operators)
            if RecordedGraphs.is_wrong:
                spoil(outputs)

        return Graph(outputs, again)

    def timed(self, run: Callable[[], list[Any]]) -> tuple[list[Any], float]:
        before_s = RecordedGraphs.spent_s
        results = run()
        return results, RecordedGraphs.spent_s - before_s or self.eager_s * len(results)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def code(*args: Any) -> Any:
            with _Compiler():
                return function(*args)

        return code

    def has_room(self) -> bool:
        return self.has_memory


def overwrite(outputs: Any) -> None:
    """Fill the tensors in nested lists and tuples with NaN, or with ids that no model has."""
    for output in tree_flatten(outputs)[0]:
        if isinstance(output, Tensor) and output.dtype == torch.bool:
            output.logical_not_()
        elif isinstance(output, Tensor):
            output.fill_(torch.nan if output.is_floating_point() else torch.iinfo(output.dtype).max)


def spoil(outputs: Any) -> None:
    """Change the tensors in nested tuples."""
    for output in tree_flatten(outputs)[0]:
        if isinstance(output, Tensor) and output.dtype == torch.bool:
            output.logical_not_()
        elif isinstance(output, Tensor):
            output.add_(1)


@contextmanager
def recording() -> Iterator[list[Operator]]:
    """Record the operators that run in the block."""
    with _HostMethods(), HostReads(), _Recorder() as recorder:
        _RECORDERS.append(recorder)
        try:
            yield recorder.operators
        finally:
            _RECORDERS.pop()


_RECORDERS: list[_Recorder] = []  # recorders of the captures in progress


def record_launch(run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Record a kernel that writes to its arguments, if a capture is in progress."""
    for recorder in _RECORDERS:
        recorder.add_launch(run, *args, **kwargs)


def replay(operators: list[Operator]) -> None:
    """Run recorded operators again and copy their results to the recorded outputs."""
    with torch.inference_mode():  # inference mode can write to tensors of either mode
        for operator in operators:
            args, kwargs = tree_map(
                lambda part: part.get() if isinstance(part, Outside) else part, operator[1:3]
            )
            if operator.is_view:
                continue  # the view still refers to the same memory
            results = tree_flatten(operator.func(*args, **kwargs))[0]
            for recorded, value in zip(operator.outputs, results, strict=True):
                if isinstance(recorded, Tensor) and recorded is not value:
                    recorded.copy_(value)
