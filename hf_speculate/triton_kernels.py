"""Former name of `hf_speculate.kernels`, which issues a warning until 0.3.0."""

import warnings

from hf_speculate.kernels import *  # noqa: F403
from hf_speculate.kernels import __all__ as __all__

warnings.warn(
    "hf_speculate.triton_kernels is deprecated; import hf_speculate.kernels",
    DeprecationWarning,
    stacklevel=2,
)
