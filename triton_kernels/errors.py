"""The errors that the operations raise; `hf_speculate.errors` hands them on."""


class SpeculateError(Exception):
    """Base of every error that hf_speculate raises on purpose."""


class ConfigError(SpeculateError, ValueError):
    """A setting is unknown, out of range, or cannot hold together with another."""


class ShapeError(SpeculateError, ValueError):
    """A tensor has a shape, dtype or device that the operation does not take."""


class KernelUnavailableError(SpeculateError, RuntimeError):
    """A backend was asked for by name and is not there."""
