"""Memory of a device."""

import os

import torch

_UNKNOWN_MEMORY_BYTES = 8 << 30


def memory_bytes(device: torch.device) -> int:
    """Return the total memory of a device or of the host in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not POSIX
        return _UNKNOWN_MEMORY_BYTES
