"""Simulated devices for `hf-speculate doctor`; each check's process enters one of them by its name."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hf_speculate.tools.doctor import catalogue, machine, worker
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.recorded_graphs import spoil

GRAPHS, KERNELS = "graphs: forwards, one row, float32", "kernels: greedy, ordinary rows"
OTHER_KERNELS = "kernels: point mass, hostile rows"
RIGHT = [
    "attention: bfloat16",
    "graphs: texts, float32",
    KERNELS,
    OTHER_KERNELS,
]


@contextmanager
def _device(names: list[str]) -> Iterator[None]:
    """A CUDA device, and nothing beside it, of which some checks are run."""
    with (
        FakeCuda(),
        patch.object(machine, "_devices", lambda: [fake_cuda.DEVICE]),
        patch.object(machine, "names_for", lambda *_, **__: names),
    ):
        yield


def right() -> Any:
    """All is right."""
    return _device(RIGHT)


@contextmanager
def everything_right() -> Iterator[None]:
    """All checks are run, and are right."""
    with FakeCuda(), patch.object(machine, "_devices", lambda: [fake_cuda.DEVICE]):
        yield


@contextmanager
def kernels_wrong() -> Iterator[None]:
    """The greedy kernel accepts one token more."""
    kernels = worker.pkgutil.resolve_name("hf_speculate.kernels.kernels")
    greedy = kernels.greedy

    def wrong(*args: Any) -> Any:
        verdict = greedy(*args)
        return verdict._replace(num_accepted=verdict.num_accepted + 1)

    with _device([KERNELS, OTHER_KERNELS]), patch.object(kernels, "greedy", wrong):
        yield


@contextmanager
def graphs_wrong() -> Iterator[None]:
    """Replays write other numbers."""
    replay = fake_cuda.FakeGraph.replay

    def wrong(graph: Any) -> None:
        replay(graph)
        spoil([graph.operators[-1].outputs])

    with _device([GRAPHS]), patch.object(fake_cuda.FakeGraph, "replay", wrong):
        yield


@contextmanager
def _with_check(check: Any) -> Iterator[None]:
    with _device([GRAPHS, KERNELS]), patch.dict(catalogue.CHECKS, {GRAPHS: check}):
        yield


def crashing() -> Any:
    """A check of graphs ends its process."""

    def crash(site: Any) -> str:
        os.write(2, b"an illegal memory access was encountered\n")
        os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    return _with_check(crash)


def hanging() -> Any:
    """A check of graphs never ends."""

    def hang(site: Any) -> str:
        while True:
            time.sleep(60)

    return _with_check(hang)
