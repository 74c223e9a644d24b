"""Run tests written for the host on a device: tests of options and caches not marked `gpu`.

    python -m pytest -p tests.support.on_device -n 8 tests/options tests/generation

This plugin puts models, and tensors without an explicit device, on `$ON_DEVICE`, by default
`cuda:0`, with the same numbers as on the host. Tests that name the host, start threads or compile
fail only because of the plugin. Look at failures whose last lines are in `hf_speculate/`, and
compare them with the same test on a CPU.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# set before the import of transformers, which reads it once
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from transformers import PreTrainedModel

from tests.support import fallbacks, tiny, tiny_encoders, tiny_families, tiny_wrappers

DEVICE = torch.device(os.environ.get("ON_DEVICE", "cuda:0"))
_FACTORIES = frozenset(_device_constructors())
# A device draws different random numbers.
_RANDOM = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)
_COMPARISONS = (torch.equal, torch.allclose, torch.isclose)
_MAKERS = {
    tiny: ("make_model", "make_small_model"),
    tiny_families: ("make_family",),
    tiny_wrappers: ("make",),
    tiny_encoders: (
        "make_t5",
        "make_bart",
        "make_whisper",
        "make_llava",
        "make_qwen2_vl",
        "make_qwen3_5_vl",
    ),
}


class OnDevice(TorchFunctionMode):
    """Mode that creates tensors on the device unless a call names a device."""

    is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_free = kwargs.get("device") is None and kwargs.get("out") is None
        if self.is_paused:
            return func(*args, **kwargs)
        if func in _RANDOM and is_free:
            return func(*args, **kwargs).to(DEVICE)
        if func in _FACTORIES and is_free:
            kwargs["device"] = DEVICE
        elif func in _COMPARISONS:
            args = [value.cpu() if isinstance(value, Tensor) else value for value in args]
        elif _draws_on_the_host(args, kwargs):
            drawn = func(args[0].cpu(), *args[1:], **kwargs)
            return args[0].copy_(drawn) if func.__name__.endswith("_") else drawn.to(DEVICE)
        return func(*args, **kwargs)


def _draws_on_the_host(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a host generator is used to fill, or sample from, a tensor on the device."""
    generator = kwargs.get("generator")
    on_host = generator is not None and generator.device.type == "cpu"
    return on_host and bool(args) and isinstance(args[0], Tensor) and args[0].device.type != "cpu"


MODE = OnDevice()


@contextmanager
def _on_host() -> Iterator[None]:
    before, MODE.is_paused = MODE.is_paused, True
    try:
        yield
    finally:
        MODE.is_paused = before


def _moved(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return value.to(DEVICE)
    return tuple(map(_moved, value)) if type(value) is tuple else value


def _moving(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes models: it runs on the host, and its result is moved."""

    @functools.wraps(make)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _on_host():
            made = make(*args, **kwargs)
        return _moved(made)

    return run


def pytest_configure(config: pytest.Config) -> None:
    for module, names in _MAKERS.items():
        for name in names:
            setattr(module, name, _moving(getattr(module, name)))
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(_moving(load))  # type: ignore[assignment]
    for name in ("numpy", "__array__"):
        read = getattr(Tensor, name)
        setattr(
            Tensor,
            name,
            lambda self, *args, read=read, **kwargs: read(self.detach().cpu(), *args, **kwargs),
        )
    compare, without_caches = torch.testing.assert_close, fallbacks.without_caches
    torch.testing.assert_close = functools.partial(compare, check_device=False)
    fallbacks.without_caches = lambda reasons: [
        words for words in without_caches(reasons) if "no graphs" not in words
    ]
    MODE.__enter__()
