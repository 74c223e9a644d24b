"""Exceptions that the operations raise; `hf_speculate.errors` exports them."""


class SpeculateError(Exception):
    """Base class of the exceptions of hf_speculate."""


class ConfigError(SpeculateError, ValueError):
    """A setting is unknown, out of range or incompatible with another one."""


class ShapeError(SpeculateError, ValueError):
    """A tensor has a shape, dtype or device that the operation does not support."""


class KernelUnavailableError(SpeculateError, RuntimeError):
    """The requested backend is not available."""
