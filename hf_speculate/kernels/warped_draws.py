"""Warp and sample the drafted tokens of a round, with one Triton operation per token."""

from typing import Any

import torch
from torch import Tensor

from ._checks import check_keys, check_logits, check_shape
from ._inputs import WarpedDraw
from .backends import runs_kernels
from .errors import ConfigError
from .types import NoiseKeys, Stream
from .warping import cut_of


class WarpedDraws:
    """Samples of one round from warped logits.

    They are bitwise equal to samples of `Draws` from the results of `warp_logits`. A draw takes
    only the three launches of `warp_logits`. See `can_run`.

    Args:
        keys: [B] int64 each, at the position of the first token.
        stream: random number stream.
        num_draws: N, maximum number of calls of `draw`.
        keeps_logits: whether `logits` will be called.
        warp: arguments of `warp_logits`.
    """

    def __init__(
        self,
        keys: NoiseKeys,
        stream: Stream,
        num_draws: int,
        keeps_logits: bool,
        warp: dict[str, Any],
    ):
        self.keys, self.stream, self.num_draws, self.warp = keys, stream, num_draws, warp
        self.num_drawn = 0
        self._num_kept = num_draws if keeps_logits else 1
        # [B, N, V], or [B, 1, V] if only the last draw's logits are read
        self._logits = self._memory(0, 0)
        self._logsumexps = self._memory(num_draws)  # [B, N]

    @staticmethod
    def can_run(backend: str, device: torch.device) -> bool:
        """Return whether the kernels run on a device, which needs atomics to count programs."""
        if not runs_kernels(backend, device):
            return False
        from . import kernels  # imports Triton

        return kernels.has_atomics(device)

    @torch.no_grad()
    def draw(self, logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Warp the logits and sample the next token of every row.

        Args:
            logits: [B, V], any float dtype; the shape and device must be the same in all calls.
            out: [B] int64, contiguous memory for the tokens; None for new memory.

        Returns:
            [B] int64, and the warped logits [B, V] float32.

        Raises:
            ConfigError: `draw` was called more than `num_draws` times, or an argument of
                `warp_logits` is invalid.
            ShapeError: a tensor has the wrong shape, dtype or device.
        """
        from . import kernels  # imports Triton

        if self.num_drawn == self.num_draws:
            raise ConfigError(
                f"num_draws must cover every draw, got {self.num_draws}; begin another round"
            )
        check_logits("logits", logits, "B, V")
        if self.num_drawn == 0:
            check_keys(self.keys, logits)
            self._logits = self._memory(self._num_kept, logits.shape[1])
        num_rows, num_kept, vocab_size = self._logits.shape
        check_shape("logits", logits, "B, V", (num_rows, vocab_size))
        token_ids = logits.new_empty(num_rows, dtype=torch.int64) if out is None else out
        step, self.num_drawn = self.num_drawn, self.num_drawn + 1
        drawn = WarpedDraw(token_ids, self._logsumexps[:, step], self._logits[:, step % num_kept])
        rule, temperature = (
            cut_of(vocab_size, **self.warp),
            float(self.warp.get("temperature", 1.0)),
        )
        kernels.cut_and_draw(logits, temperature, rule, self.keys, self.stream, step, drawn)
        return token_ids, drawn.logits

    def logits(self) -> Tensor:
        """Return the warped logits of the n >= 1 tokens drawn so far, [B, n, V] float32."""
        return self._logits[:, : self.num_drawn]

    def logsumexps(self) -> Tensor:
        """Return the log-sum-exps of `logits`, [B, n] float32."""
        return self._logsumexps[:, : self.num_drawn]

    def _memory(self, *sizes: int) -> Tensor:
        """Allocate uninitialised [B, ...] float32."""
        return self.keys.seeds.new_empty(len(self.keys.seeds), *sizes, dtype=torch.float32)
