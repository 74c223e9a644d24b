"""Errors that the library raises."""

from hf_speculate.triton_kernels.errors import ConfigError as ConfigError
from hf_speculate.triton_kernels.errors import KernelUnavailableError as KernelUnavailableError
from hf_speculate.triton_kernels.errors import ShapeError as ShapeError
from hf_speculate.triton_kernels.errors import SpeculateError as SpeculateError


class UnsupportedModelError(SpeculateError, TypeError, ValueError):
    """A model is not supported, for example because its cache cannot be rolled back.

    Also a `ValueError`, because transformers raises one for an assistant that does not fit.
    """


class UnsupportedGenerationError(SpeculateError, ValueError):
    """A combination of `generate()` arguments cannot be decoded speculatively."""


class MissingExtraError(SpeculateError, ImportError):
    """A library that only some features need is not installed."""


class BadLogitsError(SpeculateError, RuntimeError):
    """Logits define no distribution: they hold a NaN or a +inf, or only -inf."""
