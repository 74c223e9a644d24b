"""A watch on operations that would wait for the device."""

from torch.utils._python_dispatch import TorchDispatchMode


class NoHostSync(TorchDispatchMode):
    """Raises where a result would have to reach the host."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(func.name().split("::")[1].split(".")[0].startswith(name) for name in self.WAITS):
            raise AssertionError(f"{func.name()} waits for the device")
        return func(*args, **(kwargs or {}))
