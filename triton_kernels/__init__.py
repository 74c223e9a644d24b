"""Operations of speculative decoding on tensors, one function each.

Every operation takes `backend="auto" | "torch" | "triton"`; the torch twin defines what it computes. Logits come raw:
no softmax is written before the call. Noise is a function of `NoiseKeys` and a `Stream`, never of hidden state.
"""

from .chain import greedy_match, speculative_sampling
from .errors import ConfigError, KernelUnavailableError, ShapeError, SpeculateError
from .noise import exponentials, row_seeds, uniforms
from .reference import sample, verify_greedy, verify_rejection, verify_typical
from .types import NoiseKeys, Sampled, Status, Stream, Verdict

__all__ = [
    "ConfigError",
    "KernelUnavailableError",
    "NoiseKeys",
    "Sampled",
    "ShapeError",
    "SpeculateError",
    "Status",
    "Stream",
    "Verdict",
    "exponentials",
    "greedy_match",
    "row_seeds",
    "sample",
    "speculative_sampling",
    "uniforms",
    "verify_greedy",
    "verify_rejection",
    "verify_typical",
]
