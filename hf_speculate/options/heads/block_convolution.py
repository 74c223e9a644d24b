"""Causal convolutions within a block, before and after each sublayer of a DFlash 2 head.

Let T be the number of taps, G the number of groups of g = H / G channels, and x [B, b, H] the
normed input of the sublayer. Side 0 acts on the sublayer's input and side 1 on its output:

    D = kernel_projection(x)                                               [B, b, 2, T, G]
    conv(y)[j, c] = sum over tau = 0..min(T - 1, j) of
                    (base[side, tau, c] + D[j, side, tau, c // g]) * y[j - tau, c]

Slot j only reads slots of its own row's block, never the context.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Qwen3Config

from hf_speculate.options.heads.layers import DecoderLayer, Rotation
from hf_speculate.options.heads.row_cache import CacheView

_NUM_SIDES = 2


class BlockConvolution(nn.Module):
    """Two convolutions around one sublayer.

    Their kernels are computed from the sublayer's input.
    """

    def __init__(self, width: int, num_taps: int, group_size: int):
        super().__init__()
        num_groups = width // group_size
        self._kernel_shape, self._group_size = (_NUM_SIDES, num_taps, num_groups), group_size
        self.base_kernel = nn.Parameter(torch.empty(_NUM_SIDES, num_taps, width, device="meta"))
        self.kernel_projection = nn.Linear(width, _NUM_SIDES * num_taps * num_groups, bias=False)

    def kernels(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides' kernels [B, b, T, H] for the sublayer's normed input [B, b, H]."""
        # [B, b, 2, T, G]
        by_group = self.kernel_projection(normed).unflatten(-1, self._kernel_shape)
        before, after = (
            self.base_kernel + by_group.repeat_interleave(self._group_size, -1)
        ).unbind(2)
        return before, after


def convolved(states: Tensor, kernel: Tensor) -> Tensor:
    """Convolve states [B, b, H] with a kernel [B, b, T, H]; return [B, b, H]."""
    result = kernel[:, :, 0] * states
    for tap in range(1, min(kernel.shape[2], states.shape[1])):
        result = result + kernel[:, :, tap] * pad(states, (0, 0, tap, -tap))
    return result


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions before and after attention and MLP."""

    def __init__(self, config: Qwen3Config, has_norms: bool, num_taps: int, group_size: int):
        super().__init__(config, has_norms)
        self.attention_conv = BlockConvolution(config.hidden_size, num_taps, group_size)
        self.mlp_conv = BlockConvolution(config.hidden_size, num_taps, group_size)

    def forward(self, states: Tensor, rotation: Rotation, view: CacheView, layer: int) -> Tensor:
        normed = self.input_layernorm(states)
        before, after = self.attention_conv.kernels(normed)
        attended = self.self_attn(convolved(normed, before), rotation, view, layer)
        return self.finish(states, convolved(attended, after))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        residual = residual + attended
        normed = self.post_attention_layernorm(residual)
        before, after = self.mlp_conv.kernels(normed)
        return residual + convolved(self.mlp(convolved(normed, before)), after)
