"""Every error the library raises on purpose."""

from hf_speculate.triton_kernels.errors import (
    ConfigError,
    KernelUnavailableError,
    ShapeError,
    SpeculateError,
)


class UnsupportedModelError(SpeculateError, TypeError):
    """A model cannot take part: its cache cannot roll back, or its kind is not served yet."""


class UnsupportedGenerationError(SpeculateError, ValueError):
    """A combination of `generate()` arguments cannot be decoded speculatively."""


__all__ = [
    "ConfigError",
    "KernelUnavailableError",
    "ShapeError",
    "SpeculateError",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
]
