"""Exceptions raised by the operations.

Inside hf_speculate, their module name is `hf_speculate.errors`.
"""

_HOME = __name__.replace(".kernels", "")  # on their own, the kernels are not a subpackage


class SpeculateError(Exception):
    """Base class for all exceptions of hf_speculate."""

    __module__ = _HOME


class ConfigError(SpeculateError, ValueError):
    """A setting is unknown, out of range or incompatible."""

    __module__ = _HOME


class ShapeError(SpeculateError, ValueError):
    """A tensor has an unsupported shape, dtype or device."""

    __module__ = _HOME


class KernelUnavailableError(SpeculateError, RuntimeError):
    """The requested backend is not available."""

    __module__ = _HOME
