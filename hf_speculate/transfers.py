"""Asynchronous copies between the host and an accelerator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers as a tensor on a device; the host goes on at once."""
    return send(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; a copy from the host does not wait. The tensor itself if it is there already."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        # Without pinning, the host waits for all that the device has to do before the copy.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def download(rows: Tensor, *counts: Tensor) -> list[Any]:
    """Copies integers [B, N] and further ones [B] of one device to the host in one transfer, as lists."""
    if rows.device.type == "cpu":
        return [numbers.tolist() for numbers in (rows, *counts)]
    packed = torch.cat([rows, torch.stack(counts, dim=1).to(rows.dtype)], dim=1)  # [B, N + C]
    if packed.device.type == "cuda":  # to pinned memory; the host waits for an event that follows
        packed, stream = packed.to("cpu", non_blocking=True), torch.cuda.current_stream(packed.device)
        copied = torch.cuda.Event()
        copied.record(stream)
        copied.synchronize()
    values, width = packed.tolist(), rows.shape[1]
    return [
        [row[:width] for row in values],
        *([row[column] for row in values] for column in range(width, packed.shape[1])),
    ]
