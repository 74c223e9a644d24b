"""Run an operation with the Triton kernels, on a GPU or else in the interpreter."""

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.kernels import Sampled, Verdict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
BACKENDS = ["torch", pytest.param("triton", marks=NEEDS_TRITON)]


def moved(value: Any, device: str = DEVICE) -> Any:
    """Move tensors and tuples of tensors to `device`, with their strides; skip other values."""
    if isinstance(value, tuple):
        parts = [moved(field, device) for field in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor) and value.device.type != device:
        return value.to(device)
    return value


def on(backend: str, operation: Any, *args: Any, **options: Any) -> Any:
    """Run an operation with a backend and return its result on the CPU."""
    device = DEVICE if backend == "triton" else "cpu"
    options = {name: moved(value, device) for name, value in options.items()}
    return moved(operation(*moved(args, device), backend=backend, **options), "cpu")


on_triton = partial(on, "triton")


def assert_same(mine: Verdict | Sampled, yours: Verdict | Sampled) -> None:
    """Assert equal ids, counts and status, and log-sum-exps that agree within 1e-5."""
    for tensor, expected in zip(mine, yours, strict=True):
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert torch.equal(tensor, expected), f"{mine} against {yours}"
