"""Operations of speculative decoding on tensors, one function each.

Every operation takes `backend="auto" | "torch" | "triton"`; the torch twin defines what it computes. Logits come raw:
no softmax is written before the call. Noise is a function of `NoiseKeys` and a `Stream`, never of hidden state.
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
]
