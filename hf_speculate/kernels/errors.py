"""Exceptions that the operations raise; inside hf_speculate they are named as of `hf_speculate.errors`."""

_HOME = __name__.replace(".kernels", "")  # the kernels alone are no subpackage


class SpeculateError(Exception):
    """Base class of the exceptions of hf_speculate."""

    __module__ = _HOME


class ConfigError(SpeculateError, ValueError):
    """A setting is unknown, out of range or incompatible with another one."""

    __module__ = _HOME


class ShapeError(SpeculateError, ValueError):
    """A tensor has a shape, dtype or device that the operation does not support."""

    __module__ = _HOME


class KernelUnavailableError(SpeculateError, RuntimeError):
    """The requested backend is not available."""

    __module__ = _HOME
