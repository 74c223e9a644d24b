"""Simulate devices for `hf-speculate doctor`; each check runs in a process with one of them."""

import os
import pkgutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hf_speculate.tools.doctor import checks
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.recorded_graphs import spoil


@contextmanager
def kernels_wrong() -> Iterator[None]:
    """Let the greedy kernel accept one token too many."""
    kernels = pkgutil.resolve_name("hf_speculate.kernels.kernels")
    greedy = kernels.greedy

    def wrong(*args: Any) -> Any:
        verdict = greedy(*args)
        return verdict._replace(num_accepted=verdict.num_accepted + 1)

    with FakeCuda(), patch.object(kernels, "greedy", wrong):
        yield


@contextmanager
def graphs_wrong() -> Iterator[None]:
    """Let graph replays write wrong numbers."""
    replay = fake_cuda.FakeGraph.replay

    def wrong(graph: Any) -> None:
        replay(graph)
        spoil([graph.operators[-1].outputs])

    with FakeCuda(), patch.object(fake_cuda.FakeGraph, "replay", wrong):
        yield


@contextmanager
def crashing() -> Iterator[None]:
    """Let graphs kill their process."""

    def crash(*_: Any) -> str:
        os.write(2, b"an illegal memory access was encountered\n")
        os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    with FakeCuda(), patch.dict(checks.CHECKS, {checks.GRAPHS: crash}):
        yield


@contextmanager
def hanging() -> Iterator[None]:
    """Let text generation never end."""

    def hang(*_: Any) -> str:
        while True:
            time.sleep(60)

    with FakeCuda(), patch.dict(checks.CHECKS, {checks.TEXTS: hang}):
        yield
