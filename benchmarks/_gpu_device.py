"""The devices that `on_gpu.py` runs on: a CUDA device, or one that is simulated."""

import bisect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from _subjects import Oracle, load_pair, load_shape
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from tests.fake_cuda import FakeCuda
from tests.gpu_rounds import Enough, Rounds
from tests.tiny import make_model, noisy_copy

ACCEPTANCE = 0.8  # of the oracle
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync")
_FORWARD, _ROUND_END = "a model's forward", "the end of a round"
_SYNCHRONIZES = "called a synchronizing"  # in the warnings of torch.cuda.set_sync_debug_mode


class RoundCost(NamedTuple):
    """What a round did besides the models' forwards."""

    num_launches: int
    num_waits: int  # other than for the event of the verdict's copy
    num_plans: int  # that cuDNN attention built


class Models(NamedTuple):
    """A target with its draft."""

    target: PreTrainedModel
    draft: PreTrainedModel


Call = Callable[[Callable[..., None]], Any]
"""Decodes, with the argument as `speculation_callback`."""


class Device(Protocol):
    """What the parts ask of a device."""

    is_dry: bool

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...

    def small_pair(self, dtype: torch.dtype) -> Models:
        """A small pair on the device."""

    def large_pair(self) -> Models:
        """A pair of the shapes of Llama 8B and 1B in bfloat16, on the device; an oracle fixes its acceptance."""

    def count_rounds(self, models: Models, call: Call) -> list[RoundCost]:
        """What each round of a call costs, the first one left out."""

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Seconds of one run, on average, until the device has done it."""

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """Replays what `run` launches from a CUDA graph."""


class CudaDevice:
    """The first CUDA device."""

    is_dry = False

    def __enter__(self) -> "CudaDevice":
        if not torch.cuda.is_available():
            raise SystemExit("on_gpu.py needs a CUDA device, found none; pass --dry-run for the simulated one")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()

    def small_pair(self, dtype: torch.dtype) -> Models:
        """The bundled pair."""
        pair = load_pair("bfloat16", torch.device("cuda:0"))
        return Models(pair.target.to(dtype), pair.draft.to(dtype))

    def large_pair(self) -> Models:
        """See `Device.large_pair`."""
        pair = load_shape("llama-8b", "bfloat16", torch.device("cuda:0"), ACCEPTANCE)
        return Models(pair.target, pair.draft)

    def count_rounds(self, models: Models, call: Call) -> list[RoundCost]:
        """See `Device.count_rounds`; launches by the profiler, waits by torch's warnings."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled, _forward_ranges(models):
            call(lambda report: record_function(_ROUND_END).__enter__().__exit__(None, None, None))
        events = [(one.time_range.start, one.time_range.end, one.name) for one in profiled.events()]
        forwards = sorted((begin, end) for begin, end, name in events if name == _FORWARD)
        ends = sorted(begin for begin, _, name in events if name == _ROUND_END)
        own = [0] * len(ends)
        for begin, _, name in events:
            at = bisect.bisect(forwards, (begin, float("inf"))) - 1
            if name in _LAUNCHES and ends and begin < ends[-1] and not (at >= 0 and begin < forwards[at][1]):
                own[bisect.bisect_left(ends, begin)] += 1
        plans = [0] * len(ends)
        for begin, _, name in events:
            if "cudnn" in name.lower() and "attention" in name.lower() and ends and begin < ends[-1]:
                plans[bisect.bisect_left(ends, begin)] += 1
        waits = self._waits(call)
        return [RoundCost(*cost) for cost in zip(own, waits, plans, strict=False)][1:]

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """See `Device.seconds`."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / repeats

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """See `Device.graphed`."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _waits(self, call: Call) -> list[int]:
        waits: list[int] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            def end(report: object) -> None:
                waits.append(sum(_SYNCHRONIZES in str(one.message) for one in caught) - sum(waits))

            torch.cuda.set_sync_debug_mode("warn")
            try:
                call(end)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return waits


class DryDevice:
    """A simulated device with tiny models: it runs every line of the parts, and measures nothing."""

    is_dry = True

    def __init__(self) -> None:
        self._gpu = FakeCuda()
        self._stack = ExitStack()
        self._watched: list[Models] = []

    def __enter__(self) -> "DryDevice":
        self._stack.enter_context(self._gpu)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def small_pair(self, dtype: torch.dtype) -> Models:
        """A tiny pair."""
        target = make_model("llama", dtype=dtype)
        draft = noisy_copy(target, 0.1)
        return Models(target.to("cuda:0"), draft.to("cuda:0"))

    def large_pair(self) -> Models:
        """A tiny pair with an oracle."""
        models = self.small_pair(torch.bfloat16)
        Oracle(*models, ACCEPTANCE)
        return models

    def count_rounds(self, models: Models, call: Call) -> list[RoundCost]:
        """See `Device.count_rounds`."""
        if models not in self._watched:
            self._watched.append(models)
            for model, stage in zip(models, models._fields, strict=True):
                self._gpu.watch(model, stage)
        rounds = Rounds(self._gpu)
        rounds.most = 3
        self._gpu.log.clear()
        with suppress(Enough):
            call(rounds.end)
        ends = [0, *(one.num_plans for one in rounds)]
        plans = [now - before for before, now in pairwise(ends)]
        waits = [sum(name != "event" for name in one.waits) for one in rounds]  # torch warns of no event either
        return [RoundCost(one.num_launches, *rest) for one, *rest in zip(rounds, waits, plans, strict=True)][1:]

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Runs once; of no meaning."""
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """The function itself."""
        return run


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
