"""Drawing the tokens of a round, one position after another."""

import torch
from torch import Tensor

from ._checks import check_keys, check_logits, check_shape
from .backends import operations
from .errors import ConfigError
from .noise import exponentials
from .reference.sampling import Drawn, draw, logsumexps
from .sampling import sample
from .types import NoiseKeys, Stream

# Noise of up to so many entries is made for all draws at once: 2 MB, what a core's caches hold until it is read. Small
# rows cost what their operations cost, however little each does (V = 4,096, 2 cores of an AMD EPYC).
MAX_SHARED_NUMEL = 1 << 19


class Draws:
    """Draws as `sample` does, bit for bit, and computes what a round's draws share once.

    Args:
        keys: [B] int64 each; `positions` is that of the first drawn token.
        stream: which noise.
        num_draws: N, how often `draw` will be called at most.
        backend: "auto", "torch" or "triton".
    """

    def __init__(self, keys: NoiseKeys, stream: Stream, num_draws: int, *, backend: str = "auto"):
        self.keys, self.stream, self.num_draws, self.backend = keys, stream, num_draws, backend
        self._clocks: Tensor | None = None  # [B, N, V] float32; None until the first draw, and where each makes its own
        self._drawn: list[Drawn] = []
        self._logsumexps: list[Tensor] = []  # [B] float32 each, where each draw makes its own noise

    @torch.no_grad()
    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token of every row.

        Args:
            logits: [B, V], any float dtype, final; alike in shape and device for all draws.

        Returns:
            [B] int64.

        Raises:
            ConfigError: more draws than announced.
            KernelUnavailableError: backend="triton" where it cannot run.
            ShapeError: a shape, dtype or device that does not fit.
        """
        step = len(self._drawn) + len(self._logsumexps)
        if step == self.num_draws:
            raise ConfigError(f"num_draws must cover every draw, got {self.num_draws}; begin another round")
        if step == 0:
            self._clocks = self._make_clocks(logits)
        if self._clocks is None:
            keys = self.keys._replace(positions=self.keys.positions + step)
            drawn = sample(logits, keys=keys, stream=self.stream, backend=self.backend)
            self._logsumexps.append(drawn.logsumexp)
            return drawn.token_ids
        clocks = self._clocks[:, step]
        check_shape("logits", logits, "B, V", clocks.shape)
        self._drawn.append(draw(logits, clocks))
        return self._drawn[-1].token_ids

    def logsumexps(self) -> Tensor:
        """Of the laws drawn from so far, at least one: [B, n] float32, see `sample`."""
        if self._clocks is None:
            return torch.stack(self._logsumexps, dim=1)
        return logsumexps(self._drawn)

    def _make_clocks(self, logits: Tensor) -> Tensor | None:
        """The noise of all draws; None where each had better make its own."""
        check_logits("logits", logits, "B, V")
        check_keys(self.keys, logits)
        operations(self.backend, logits.device)  # raises where it cannot run
        if logits.device.type != "cpu" or self.backend == "triton":
            return None
        if logits.numel() * self.num_draws > MAX_SHARED_NUMEL:
            return None
        offsets = torch.arange(self.num_draws)[None, :, None]  # [1, N, 1]
        token_ids = torch.arange(logits.shape[-1], dtype=torch.int32)
        return exponentials(self.keys, self.stream, offsets, token_ids)
