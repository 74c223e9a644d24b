"""Asynchronous copies between the host and an accelerator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(
    numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
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
        rows: [B, N] int64 ids.
        counts: [B] int32 each, on the same device.

    Returns:
        `rows` and each of `counts` as lists.
    """
    if rows.device.type == "cpu":
        return [numbers.tolist() for numbers in (rows, *counts)]
    return unpack(pack(rows, *counts), rows.shape[1])


def pack(rows: Tensor, *counts: Tensor) -> Tensor:
    """Join the integers of a `download` to one tensor [B, 2 N + C] int32, on their device."""
    num_rows, num_ids = rows.shape
    # the ids as int32, which one operator joins with the counts
    ids = rows.to(torch.int64).reshape(-1).view(torch.int32).view(num_rows, 2 * num_ids)
    return torch.cat([ids, *(count.to(torch.int32)[:, None] for count in counts)], dim=1)


def unpack(packed: Tensor, num_ids: int) -> list[Any]:
    """Copy the integers of `pack` to the host; `num_ids` is N."""
    num_rows, width = packed.shape[0], 2 * num_ids
    if packed.device.type == "cuda":  # copy to pinned memory, then wait for the event after it
        packed, stream = (
            packed.to("cpu", non_blocking=True),
            torch.cuda.current_stream(packed.device),
        )
        copied = torch.cuda.Event()
        copied.record(stream)
        copied.synchronize()
    packed = packed.cpu()
    ids = packed[:, :width].reshape(-1).view(torch.int64).view(num_rows, num_ids)
    return [ids.tolist(), *packed[:, width:].T.tolist()]
