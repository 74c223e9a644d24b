"""Runs an operation on the Triton kernels: on a GPU where there is one, else in Triton's interpreter."""

from typing import Any

import torch
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Sampled, Verdict
from tests.triton_kernels.operations import OPERATIONS, Operation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def moved(value: Any, device: str = DEVICE) -> Any:
    """Tensors and named tuples of them on `device`, strides kept; anything else as it is."""
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor) and value.device.type != device:
        return value.to(device)
    return value


def on_triton(operation: Any, *args: Any, **options: Any) -> Any:
    """What an operation gives with backend="triton", on the CPU."""
    options = {name: moved(value) for name, value in options.items()}
    return moved(operation(*moved(args), backend="triton", **options), "cpu")


def verify_on_triton(
    name: str, target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None = None
) -> Verdict:
    """The kernels' verdict of one of OPERATIONS."""
    operation: Operation = OPERATIONS[name]
    rest = () if lens is None else (moved(lens),)
    return moved(operation(moved(target), moved(ids), moved(draft), moved(keys), *rest, backend="triton"), "cpu")


def assert_same(mine: Verdict | Sampled, yours: Verdict | Sampled) -> None:
    """Ids, counts and status equal; log-sum-exps, rounded in another order, to 1e-5."""
    for one, other in zip(mine, yours, strict=True):
        if one.dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert torch.equal(one, other), f"{mine} against {yours}"
