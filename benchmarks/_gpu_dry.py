"""A simulated device with tiny models: it runs every line of the parts of `on_gpu.py`, and measures nothing."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any

import torch
from _gpu_device import ACCEPTANCE, Call, Models, RoundCost
from _subjects import Oracle

from tests.support.fake_cuda import FakeCuda
from tests.support.gpu_rounds import Enough, Rounds
from tests.support.tiny import make_model, noisy_copy


class DryDevice:
    """See `_gpu_device.Device`."""

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

    def large_pair(self) -> tuple[Models, Oracle]:
        """A tiny pair with an oracle."""
        models = self.small_pair(torch.bfloat16)
        return models, Oracle(*models, ACCEPTANCE)

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
        ends = [0, *(cost.num_plans for cost in rounds)]
        plans = [now - before for before, now in pairwise(ends)]
        waits = [sum(name != "event" for name in cost.waits) for cost in rounds]  # torch warns of no event either
        return [RoundCost(cost.num_launches, *rest) for cost, *rest in zip(rounds, waits, plans, strict=True)][1:]

    def kernels_of(self, run: Callable[[], object]) -> dict[str, Any]:
        """Runs once; nothing is measured."""
        run()
        return {}

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Runs once; of no meaning."""
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def graphed(self, run: Callable[[], object], times: int) -> Callable[[], object]:
        """The function itself."""
        return run

    def recover(self) -> bool:
        """A simulated device goes on after any error."""
        return True

    def peak_bytes(self) -> int:
        """Nothing is measured."""
        return 0


make = DryDevice  # what `on_gpu.py` makes
