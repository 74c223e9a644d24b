"""Simulate a CUDA device whose tensors report `cuda:0`, keep their data on the CPU and are logged.

    with FakeCuda() as gpu:
        model.to("cuda")
        ...
    gpu.log.launches, gpu.log.waits, gpu.log.attention

Every ATen operator except views counts as one launch, and so does every Triton kernel, which runs
in Triton's interpreter. As on a GPU, mixing host tensors with device tensors is an error. An
asynchronous copy to the host contains garbage until the host waits for an event or a stream.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from tests.kernels.interpreter import quick_interpreter
from tests.support.fake_attention import (
    EFFICIENT,
    FLASH,
    AttentionCall,
    direct_attention,
    sdpa_call,
)
from tests.support.recorded_graphs import (
    Operator,
    is_view,
    record_launch,
    recording,
    replay,
)

DEVICE = torch.device("cuda", 0)
_GARBAGE = 0x5A  # in every byte of a copy that has not arrived
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_NO_LAUNCH = (
    *_ALLOCATIONS,
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "detach",
    "alias",
    "_assert_async",
)
_WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "equal",
    "is_nonzero",
    "repeat_interleave",
)


class FakeCudaTensor(Tensor):
    """Tensor that reports the GPU as its device and keeps its values in `data_on_host`."""

    data_on_host: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "FakeCudaTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device="meta",  # in a CPU build of torch, the only other device without data
        )

    def __init__(self, data: Tensor):
        self.data_on_host = data

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.data_on_host.data_ptr()

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert like torch's method, which would treat the tensor as one on another device."""
        device, dtype, *_ = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        stays = device is None or device.type == "cuda"
        if (
            stays
            and dtype in (None, self.dtype)
            and not kwargs.get("copy")
            and "memory_format" not in kwargs
        ):
            return self
        with torch._C.DisableTorchFunctionSubclass():
            return torch.ops.aten._to_copy(
                self,
                dtype=dtype,
                device=DEVICE if stays else device,
                non_blocking=bool(kwargs.get("non_blocking", False)),
                memory_format=kwargs.get("memory_format"),
            )

    def __repr__(self) -> str:
        return f"FakeCudaTensor({self.data_on_host!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = FakeCudaTensor(self.data_on_host.clone())
        return nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and FakeCuda.present is not None:
            return FakeCuda.present.attend(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeCuda.present is None:
            raise RuntimeError("a tensor of the fake GPU was used after the GPU had gone")
        return FakeCuda.present.run(func, args, kwargs or {})


@dataclass
class Log:
    """Operations since the last `clear`, by stage; "" is the stage outside watched modules."""

    launches: dict[str, Counter[str]] = field(default_factory=dict)
    waits: dict[str, list[str]] = field(default_factory=dict)  # waits of the host for the device
    # from pinned memory, so nothing waits for them
    uploads: list[str] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    # plans of cuDNN, which makes one for each set of sizes and strides
    plans: set[Any] = field(default_factory=set)

    def num_launches(self, stage: str = "") -> int:
        return self.launches.get(stage, Counter()).total()

    def clear(self) -> None:
        """Clear everything except the plans, which a GPU keeps."""
        for entries in (self.launches, self.waits, self.uploads, self.attention):
            entries.clear()


class FakeEvent:
    """Replacement for `torch.cuda.Event` and base of the stream."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._num_before = 0

    def record(self, stream: Any = None) -> None:
        self._num_before = _device().num_begun

    def synchronize(self) -> None:
        _device().arrive(self._num_before, "event")


class FakeStream(FakeEvent):
    """Replacement for the current stream."""

    def synchronize(self) -> None:
        _device().arrive(_device().num_begun, "stream")

    def wait_stream(self, stream: Any) -> None:
        """Do nothing, because the device waits and not the host."""


class FakeGraph:
    """Replacement for `torch.cuda.CUDAGraph`; a replay is one launch."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []

    def replay(self) -> None:
        log, launches = _device().log, _device().log.launches
        log.launches = {}
        replay(self.operators)
        log.launches = launches
        _device().launch("graph")


@contextmanager
def _captured(graph: FakeGraph, **options: Any) -> Iterator[None]:
    """Replace `torch.cuda.graph`; operators also run, because their results are needed."""
    with recording() as graph.operators:
        yield


class _Mode(TorchDispatchMode):
    """Mode that intercepts the creation of device tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device().run(func, args, kwargs or {})


class FakeCuda:
    """Simulated device, used as a context, one at a time and in one thread.

    Launches are logged under `stage`.
    """

    present: "FakeCuda | None" = None

    def __init__(self) -> None:
        self.log = Log()
        self.stage = ""
        self.num_begun = 0
        # number, target on the host that still contains garbage, data
        self._transfers: list[tuple[int, Tensor, Tensor]] = []
        self._pinned = WeakIdKeyDictionary()  # tensors of the host
        self._mode = _Mode()
        self._stack = ExitStack()

    def __enter__(self) -> "FakeCuda":
        lifts_on_host = torch._C._only_lift_cpu_tensors()
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, lifts_on_host)
        # makes the copy inside torch.tensor(..., device="cuda") visible to the mode
        torch._C._set_only_lift_cpu_tensors(True)
        torch._C._ensureCUDADeviceGuardSet()
        self._stack.enter_context(patch.multiple(torch.cuda, **_OF_CUDA))
        self._stack.enter_context(
            patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        )
        self._stack.enter_context(quick_interpreter())
        self._stack.enter_context(_triton_on_device())
        FakeCuda.present = self
        self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *error: Any) -> None:
        FakeCuda.present = None
        self._stack.close()

    def watch(self, module: nn.Module, stage: str) -> None:
        """Log the launches in a module's forwards under `stage`, until the device is removed."""
        before: list[str] = []

        def enter(*args: Any) -> None:
            before.append(self.stage)
            self.stage = stage

        def leave(*args: Any) -> None:
            self.stage = before.pop()

        self._stack.callback(module.register_forward_pre_hook(enter).remove)
        self._stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def launch(self, name: str, count: int = 1) -> None:
        self.num_begun += 1
        self.log.launches.setdefault(self.stage, Counter())[name] += count

    def wait(self, name: str) -> None:
        """Log a wait of the host, after which all earlier launches have arrived."""
        self.arrive(self.num_begun, name)

    def arrive(self, num_begun: int, name: str) -> None:
        """Log a wait for the first `num_begun` launches."""
        self.log.waits.setdefault(self.stage, []).append(name)
        for number, side, data in self._transfers:
            if number <= num_begun:
                side.copy_(data)
        self._transfers = [entry for entry in self._transfers if entry[0] > num_begun]

    def attend(self, *args: Any, **kwargs: Any) -> FakeCudaTensor:
        """Compute attention with the backend that torch 2.11 chooses on sm_90."""
        call, output = sdpa_call(*_unwrapped(args), **_unwrapped(kwargs))
        self._book(call)
        return FakeCudaTensor(output)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on the data of its tensors, and log it."""
        flat, _ = tree_flatten((args, kwargs))
        on_device = [tensor for tensor in flat if isinstance(tensor, FakeCudaTensor)]
        device = kwargs.get("device")
        goes_there = device is not None and _is_there(torch.device(device))
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ("pin_memory", "_pin_memory"):
            pinned = args[0].clone()
            self._pinned[pinned] = True
            return pinned
        if name == "is_pinned":
            return args[0] in self._pinned
        if not on_device and not goes_there:
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self._mode:  # in inference mode, composite operators reach the mode
                return func.decompose(*args, **kwargs)
        on_host = [
            tensor
            for tensor in flat
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeCudaTensor)
        ]
        if name in ("_to_copy", "copy_"):
            return self._copy(name, func, args, kwargs)
        is_index = name in ("index", "index_put_", "index_put")
        _check_devices(name, on_host if on_device else (), is_index)
        if name in (FLASH, EFFICIENT):
            call, outputs = direct_attention(name, *_unwrapped(args), **_unwrapped(kwargs))
            self._book(call)
            return tuple(
                FakeCudaTensor(tensor) if isinstance(tensor, Tensor) else tensor
                for tensor in outputs
            )
        if is_index and on_host:
            self.wait(f"{name} by indices of the host")
        has_bools = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in on_device[1:])
        if name.startswith(_WAITS) or (is_index and has_bools):
            self.wait(name)
        has_views = is_view(func)
        if not has_views and name not in _NO_LAUNCH:
            self.launch(name)
        output = func(*_unwrapped(args), **_on_host(_unwrapped(kwargs)))
        return _wrapped(output, on_device, has_views)

    def _copy(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy within the device, or between the host and the device."""
        source = args[1] if name == "copy_" else args[0]
        target = args[0] if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        goes_up = not isinstance(source, FakeCudaTensor) and _is_there(target)
        goes_down = isinstance(source, FakeCudaTensor) and not _is_there(target)
        is_async = bool(
            kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        )
        if not (goes_up or goes_down):
            self.launch(name)
        if goes_up:
            if is_async and source in self._pinned:
                self.log.uploads.append("pinned")
            else:
                self.wait("upload of pageable memory" if is_async else "upload")
        # only asynchronous `_to_copy` goes to pinned memory
        elif goes_down and not (is_async and name == "_to_copy"):
            self.wait("download")
        output = func(*_unwrapped(args), **_on_host(_unwrapped(kwargs)))
        if goes_down and is_async and name == "_to_copy":
            on_device, data = output.clone(), output.clone()
            on_device.view(-1).view(torch.uint8).fill_(_GARBAGE)
            self.num_begun += 1
            self._transfers.append((self.num_begun, on_device, data))
            return on_device
        if name == "copy_":
            return args[0]
        return FakeCudaTensor(output) if _is_there(target) else output.clone()

    def _book(self, call: AttentionCall) -> None:
        self.launch(f"attention by {call.backend}", call.num_launches)
        self.log.attention.append(call)
        if call.backend == "cudnn":
            self.log.plans.add(call.plan)


def _device() -> FakeCuda:
    assert FakeCuda.present is not None
    return FakeCuda.present


def _is_there(target: Any) -> bool:
    return isinstance(target, FakeCudaTensor) or (
        isinstance(target, torch.device) and target.type in ("cuda", "meta")
    )


def _unwrapped(tree: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.data_on_host if isinstance(leaf, FakeCudaTensor) else leaf, tree
    )


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _wrapped(output: Any, inputs: Sequence[FakeCudaTensor], has_views: bool) -> Any:
    """Return an operator's output as device tensors, reusing the inputs that it wrote to."""
    by_id = {id(tensor.data_on_host): tensor for tensor in inputs}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return by_id[id(leaf)] if id(leaf) in by_id else FakeCudaTensor(leaf)

    # so its views are ordinary tensors, even in inference mode
    if has_views and not inputs[0].is_inference():
        with torch.inference_mode(False):
            return tree_map(wrap, output)
    return tree_map(wrap, output)


def _check_devices(name: str, on_host: Sequence[Tensor], is_index: bool) -> None:
    """Raise where a GPU would: a host tensor may only be a number or an index."""
    indices = (torch.int64, torch.bool, torch.uint8) if is_index else ()
    strays = [
        tuple(tensor.shape) for tensor in on_host if tensor.dim() and tensor.dtype not in indices
    ]
    if strays:
        words = (
            "Expected all tensors to be on the same device, but found at least two devices, "
            "cuda:0 and cpu"
        )
        raise RuntimeError(f"{words}: {name} was given tensors of the host of shapes {strays}")


_PROPERTIES = SimpleNamespace(
    name="fake H200", major=9, minor=0, multi_processor_count=132, total_memory=139 << 30
)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


# Functions that the library and transformers call to ask torch about a GPU.
_OF_CUDA: dict[str, Any] = {
    **dict.fromkeys(
        ("_lazy_init", "reset_peak_memory_stats", "empty_cache", "manual_seed", "manual_seed_all"),
        _nothing,
    ),
    **dict.fromkeys(
        ("current_device", "max_memory_allocated", "memory_allocated"), lambda device=None: 0
    ),
    "memory_reserved": lambda device=None: 0,
    **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda device: 0),
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "mem_get_info": lambda device=None: (130 << 30, 139 << 30),
    "Event": FakeEvent,
    **dict.fromkeys(("current_stream", "Stream"), FakeStream),
    "stream": nullcontext,
    "set_stream": _nothing,
    "graph_pool_handle": lambda: (0, 0),
    "CUDAGraph": FakeGraph,
    "graph": _captured,
    "synchronize": lambda device=None: FakeStream().synchronize(),
}


def _triton_on_device() -> AbstractContextManager[Any]:
    """Let Triton's interpreter run on tensors of the simulated device."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        _device().launch(f"triton {executor.fn.__name__}")
        record_launch(interpreted, executor, *args, **kwargs)
        interpreted(executor, *args, **kwargs)

    def interpreted(executor: Any, *args: Any, **kwargs: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            run(executor, *_unwrapped(args), **_unwrapped(kwargs))

    return patch.object(GridExecutor, "__call__", launched)
