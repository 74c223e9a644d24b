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


class Download:
    """A tensor on its way to the host.

    On a CUDA device the copy goes to pinned memory, and reading it waits for that copy alone, not for what was launched
    after it.
    """

    def __init__(self, tensor: Tensor):
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            tensor, stream = tensor.to("cpu", non_blocking=True), torch.cuda.current_stream(tensor.device)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        self._tensor = tensor

    def tolist(self) -> Any:
        """The numbers, once they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.tolist()
