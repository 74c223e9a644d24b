"""Simulated devices for `hf-speculate doctor`; each check's process enters one of them by its name."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hf_speculate.tools.doctor import catalogue, machine, worker
from tests import fake_cuda
from tests.fake_cuda import FakeCuda
from tests.recorded_graphs import spoil


@contextmanager
def right() -> Iterator[None]:
    """A CUDA device on which all is right, and nothing beside it."""
    with FakeCuda(), patch.object(machine, "_devices", lambda: [fake_cuda.DEVICE]):
        yield


@contextmanager
def kernels_wrong() -> Iterator[None]:
    """The greedy kernel accepts one token more."""
    kernels = worker.pkgutil.resolve_name("hf_speculate.triton_kernels.kernels")
    greedy = kernels.greedy

    def wrong(*args: Any) -> Any:
        verdict = greedy(*args)
        return verdict._replace(num_accepted=verdict.num_accepted + 1)

    with right(), patch.object(kernels, "greedy", wrong):
        yield


@contextmanager
def graphs_wrong() -> Iterator[None]:
    """Replays write other numbers."""
    replay = fake_cuda.FakeGraph.replay

    def wrong(graph: Any) -> None:
        replay(graph)
        spoil([graph.operators[-1].outputs])

    with right(), patch.object(fake_cuda.FakeGraph, "replay", wrong):
        yield


@contextmanager
def _with_check(name: str, check: Any) -> Iterator[None]:
    with right(), patch.dict(catalogue.CHECKS, {name: check}):
        yield


def crashing() -> Any:
    """A check of graphs ends its process."""

    def crash(site: Any) -> str:
        os.write(2, b"an illegal memory access was encountered\n")
        os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    return _with_check("graphs: forwards, one row, float32", crash)


def hanging() -> Any:
    """A check of graphs never ends."""

    def hang(site: Any) -> str:
        while True:
            time.sleep(60)

    return _with_check("graphs: forwards, one row, float32", hang)
