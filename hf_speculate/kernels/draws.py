"""Sample the drafted tokens of a round position by position, with shared noise."""

import torch
from torch import Tensor

from ._checks import check_keys, check_logits, check_shape
from .backends import operations
from .errors import ConfigError
from .noise import exponentials
from .reference.sampling import Drawn, draw, logsumexps
from .sampling import sample
from .types import NoiseKeys, Stream

# Above this size, every draw computes its own noise, since only 2 MB stay in a core's cache until
# they are read. Sharing is faster for small rows, whose time is bounded by the number of operations
# (V = 4,096, 2 cores of an AMD EPYC).
MAX_SHARED_NUMEL = 1 << 19


class Draws:
    """Samples of one round with shared noise.

    They are bitwise equal to those of `sample`.

    Args:
        keys: [B] int64 each, at the position of the first token.
        stream: random number stream.
        num_draws: N, maximum number of calls of `draw`.
        backend: "auto", "torch" or "triton".
    """

    def __init__(self, keys: NoiseKeys, stream: Stream, num_draws: int, *, backend: str = "auto"):
        self.keys, self.stream, self.num_draws, self.backend = keys, stream, num_draws, backend
        self._positions: Tensor | None = None  # [N, B] int64; None until the first draw
        self._noise: Tensor | None = None  # [B, N, V] float32; None if every draw computes its own
        self._drawn: list[Drawn] = []
        self._logsumexps: list[Tensor] = []  # [B] float32 each, only used without shared noise

    @torch.no_grad()
    def draw(self, logits: Tensor) -> Tensor:
        """Sample the next token of every row.

        Args:
            logits: [B, V], any float dtype; the shape and device must be the same in all calls.

        Returns:
            [B] int64.

        Raises:
            ConfigError: `draw` was called more than `num_draws` times.
            KernelUnavailableError: backend="triton" is not available.
            ShapeError: a tensor has the wrong shape, dtype or device.
        """
        step = len(self._drawn) + len(self._logsumexps)
        if step == self.num_draws:
            raise ConfigError(
                f"num_draws must cover every draw, got {self.num_draws}; begin another round"
            )
        if step == 0:
            self._noise = self._shared_noise(logits)
        if self._noise is None:
            if self._positions is None:
                offsets = torch.arange(self.num_draws, device=self.keys.positions.device)
                self._positions = self.keys.positions + offsets[:, None]
            keys = self.keys._replace(positions=self._positions[step])
            drawn = sample(logits, keys=keys, stream=self.stream, backend=self.backend)
            self._logsumexps.append(drawn.logsumexp)
            return drawn.token_ids
        noise = self._noise[:, step]
        check_shape("logits", logits, "B, V", noise.shape)
        self._drawn.append(draw(logits, noise))
        return self._drawn[-1].token_ids

    def logsumexps(self) -> Tensor:
        """Return the log-sum-exps of the n >= 1 draws so far, [B, n] float32; see `sample`."""
        if self._noise is None:
            return torch.stack(self._logsumexps, dim=1)
        return logsumexps(self._drawn)

    def _shared_noise(self, logits: Tensor) -> Tensor | None:
        """Compute the noise of all draws, [B, N, V]; None if sharing does not pay."""
        check_logits("logits", logits, "B, V")
        check_keys(self.keys, logits)
        operations(self.backend, logits.device)  # raises if the backend is not available
        if logits.device.type != "cpu" or self.backend == "triton":
            return None
        if logits.numel() * self.num_draws > MAX_SHARED_NUMEL:
            return None
        offsets = torch.arange(self.num_draws, device=logits.device)[None, :, None]  # [1, N, 1]
        token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
        return exponentials(self.keys, self.stream, offsets, token_ids)
