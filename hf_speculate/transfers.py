"""Asynchronous copies between the host and an accelerator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers to a tensor on a device without waiting for the copy."""
    return send(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device; a copy from the host does not wait.

    A tensor already on the device is returned itself.
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        # Without pinning, the host waits for all work queued before the copy.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def download(rows: Tensor, *counts: Tensor) -> list[Any]:
    """Copy integers to the host in one transfer.

    Args:
        rows: [B, N] integers.
        counts: [B] integers each, on the same device.

    Returns:
        `rows` and each of `counts` as lists.
    """
    if rows.device.type == "cpu":
        return [numbers.tolist() for numbers in (rows, *counts)]
    packed = torch.cat([rows, torch.stack(counts, dim=1).to(rows.dtype)], dim=1)  # [B, N + C]
    if packed.device.type == "cuda":  # copy to pinned memory, then wait for the event after it
        packed, stream = packed.to("cpu", non_blocking=True), torch.cuda.current_stream(packed.device)
        copied = torch.cuda.Event()
        copied.record(stream)
        copied.synchronize()
    values, width = packed.tolist(), rows.shape[1]
    return [
        [row[:width] for row in values],
        *([row[column] for row in values] for column in range(width, packed.shape[1])),
    ]
