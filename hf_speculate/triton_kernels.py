"""The former name of `hf_speculate.kernels`; it warns, and goes after 0.2.0."""

import warnings

from hf_speculate.kernels import *  # noqa: F403
from hf_speculate.kernels import __all__ as __all__

warnings.warn(
    "hf_speculate.triton_kernels is deprecated; import hf_speculate.kernels",
    DeprecationWarning,
    stacklevel=2,
)
