"""The first CUDA device, as `on_gpu.py` measures it."""

import bisect
import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from _gpu_device import ACCEPTANCE, Call, Models, RoundCost
from _subjects import Oracle, load_pair, random_pair
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from hf_speculate.models.foreign_code import KNOWN_PACKAGES

KNOWN_PACKAGES.add(__name__.partition(".")[0])  # the hooks here count forwards, or treat each token by itself

_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync")
_NUM_KERNELS, _MAX_NAME = 24, 90  # that are named, and characters of a name
_FORWARD, _ROUND_END = "a model's forward", "the end of a round"
_SYNCHRONIZES = "called a synchronizing"  # in the warnings of torch.cuda.set_sync_debug_mode


class CudaDevice:
    """See `_gpu_device.Device`."""

    is_dry = False

    def __enter__(self) -> "CudaDevice":
        if not torch.cuda.is_available():
            raise SystemExit("on_gpu.py needs a CUDA device, found none; pass --dry-run for the simulated one")
        torch.zeros(1, device="cuda:0")  # makes the context, so that no cell is charged for it
        return self

    def __exit__(self, error_type: type | None, *error: object) -> None:
        if error_type is None:
            torch.cuda.synchronize()

    def small_pair(self, dtype: torch.dtype) -> Models:
        """The bundled pair."""
        pair = load_pair("bfloat16", torch.device("cuda:0"))
        return Models(pair.target.to(dtype), pair.draft.to(dtype))

    def large_pair(self) -> tuple[Models, Oracle]:
        """See `Device.large_pair`."""
        models = Models(*random_pair("llama-8b", "bfloat16", torch.device("cuda:0")))
        return models, Oracle(*models, ACCEPTANCE)

    def count_rounds(self, models: Models, call: Call) -> list[RoundCost]:
        """See `Device.count_rounds`; launches by the profiler, waits by torch's warnings."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled, _forward_ranges(models):
            call(lambda report: record_function(_ROUND_END).__enter__().__exit__(None, None, None))
        events = [(event.time_range.start, event.time_range.end, event.name) for event in profiled.events()]
        forwards = sorted((begin, end) for begin, end, name in events if name == _FORWARD)
        ends = sorted(begin for begin, _, name in events if name == _ROUND_END)
        own, plans = [0] * len(ends), [0] * len(ends)
        for begin, _, name in events:
            if not ends or begin >= ends[-1]:
                continue
            at = bisect.bisect(forwards, (begin, float("inf"))) - 1
            if name in _LAUNCHES and not (at >= 0 and begin < forwards[at][1]):
                own[bisect.bisect_left(ends, begin)] += 1
            if "cudnn" in name.lower() and "attention" in name.lower():
                plans[bisect.bisect_left(ends, begin)] += 1
        waits = self._waits(call)
        return [RoundCost(*cost) for cost in zip(own, waits, plans, strict=False)][1:]

    def kernels_of(self, run: Callable[[], object]) -> dict[str, Any]:
        """See `Device.kernels_of`."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
        spans, by_name = [], Counter[str]()
        counts = Counter[str]()
        for event in profiled.profiler.kineto_results.events():
            if event.device_type() == DeviceType.CUDA:
                spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
                by_name[event.name()] += event.duration_ns()
                counts[event.name()] += 1
        busy, end = 0, 0
        for begin, until in sorted(spans):
            busy += max(until - max(begin, end), 0)
            end = max(end, until)
        total = max(end for _, end in spans) - min(begin for begin, _ in spans)
        kernels = [(name[:_MAX_NAME], counts[name], ns / 1e6) for name, ns in by_name.most_common(_NUM_KERNELS)]
        return {"total_ms": total / 1e6, "idle_ms": (total - busy) / 1e6, "num_kernels": len(spans), "kernels": kernels}

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """See `Device.seconds`."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / repeats

    def graphed(self, run: Callable[[], object], times: int) -> Callable[[], object]:
        """See `Device.graphed`."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                run()
        return graph.replay

    def recover(self) -> bool:
        """See `Device.recover`; after some errors every later call on the device fails."""
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    def peak_bytes(self) -> int:
        """See `Device.peak_bytes`."""
        peak = int(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _waits(self, call: Call) -> list[int]:
        waits: list[int] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            def end(report: object) -> None:
                waits.append(sum(_SYNCHRONIZES in str(warning.message) for warning in caught) - sum(waits))

            torch.cuda.set_sync_debug_mode("warn")
            try:
                call(end)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return waits


@contextmanager
def _forward_ranges(models: Models) -> Iterator[None]:
    """Mark both models' forwards in the profile."""
    begun: list[Any] = []
    with ExitStack() as stack:
        for model in models:
            enter = model.register_forward_pre_hook(lambda *_: begun.append(record_function(_FORWARD).__enter__()))
            leave = model.register_forward_hook(lambda *_: begun.pop().__exit__(None, None, None), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield


make = CudaDevice  # what `on_gpu.py` makes
