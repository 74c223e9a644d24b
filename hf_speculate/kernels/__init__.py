"""Speculative decoding on tensors: verification and sampling, in torch and as Triton kernels.

Every function takes `backend="auto" | "torch" | "triton"`. The torch implementation is the
reference. Functions take raw logits and compute the softmax themselves. Random numbers depend only
on `NoiseKeys` and a `Stream`.
"""

from .block import verify_block
from .coupled import verify_coupled
from .draws import Draws
from .drop_ins.chain import chain_speculative_sampling
from .drop_ins.single_sequence import greedy_match, speculative_sampling
from .drop_ins.typical_sampler import TypicalAcceptanceSampler
from .errors import ConfigError, KernelUnavailableError, ShapeError, SpeculateError
from .greedy import verify_greedy
from .noise import exponentials, row_seeds, uniforms
from .rejection import verify_rejection
from .sampling import sample
from .types import NoiseKeys, Sampled, Status, Stream, Verdict
from .typical import verify_typical
from .warping import warp_logits

__all__ = [
    "ConfigError",
    "Draws",
    "KernelUnavailableError",
    "NoiseKeys",
    "Sampled",
    "ShapeError",
    "SpeculateError",
    "Status",
    "Stream",
    "TypicalAcceptanceSampler",
    "Verdict",
    "chain_speculative_sampling",
    "exponentials",
    "greedy_match",
    "row_seeds",
    "sample",
    "speculative_sampling",
    "uniforms",
    "verify_block",
    "verify_coupled",
    "verify_greedy",
    "verify_rejection",
    "verify_typical",
    "warp_logits",
]
