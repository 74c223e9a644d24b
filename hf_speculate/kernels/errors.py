"""Exceptions of the operations.

Inside hf_speculate they are named as of `hf_speculate.errors`.
"""

_HOME = __name__.replace(".kernels", "")  # the kernels alone are no subpackage


class SpeculateError(Exception):
    """Base class of the exceptions of hf_speculate."""

    __module__ = _HOME


class ConfigError(SpeculateError, ValueError):
    """Setting that is unknown, out of range or incompatible."""

    __module__ = _HOME


class ShapeError(SpeculateError, ValueError):
    """Tensor of an unsupported shape, dtype or device."""

    __module__ = _HOME


class KernelUnavailableError(SpeculateError, RuntimeError):
    """The requested backend is not available."""

    __module__ = _HOME
