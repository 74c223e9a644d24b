"""Guesses several tokens ahead from one hidden state of a language model."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class MedusaHeads(nn.Module):
    """H heads, each a residual block in front of the language model's own output matrix.

    Of the state from which the newest token was chosen, head 0 makes the state of the token after that, head 1 the one
    after the next, and so on. A block begins as the identity. Its matrices are of rank R, and heads have no output
    matrix of their own, so that a head of the bundled target takes 2 * D * R numbers in place of D * (D + V).

    Args:
        hidden_size: D, the width of the states.
        num_heads: H, tokens that are guessed at most.
        rank: R.

    Source:
        Cai et al., "Medusa" (arXiv:2401.10774), section 2.1.1; heads alone are trained, as in Medusa-1.
    """

    def __init__(self, hidden_size: int, num_heads: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.randn(num_heads, hidden_size, rank) * hidden_size**-0.5)
        self.up = nn.Parameter(torch.zeros(num_heads, rank, hidden_size))

    @property
    def num_heads(self) -> int:
        """H."""
        return self.down.shape[0]

    def forward(self, states: Tensor, num: int | None = None) -> Tensor:
        """States [..., H, D] that the output matrix reads, from [..., D]; of the first `num` heads, all when None."""
        inner = torch.einsum("...d,hdr->...hr", states, self.down[:num])
        return states[..., None, :] + torch.einsum("...hr,hrd->...hd", nn.functional.silu(inner), self.up[:num])

    def save(self, path: Path) -> None:
        """Write the weights as float16."""
        save_file({name: weight.detach().half().contiguous() for name, weight in self.named_parameters()}, path)

    @classmethod
    def load(cls, path: Path, like: nn.Module) -> "MedusaHeads":
        """The saved heads in evaluation mode, where a model's weights lie and in their dtype."""
        weights = load_file(path)
        num_heads, hidden_size, rank = weights["down"].shape
        heads = cls(hidden_size, num_heads, rank)
        heads.load_state_dict(weights)
        weight = next(like.parameters())
        return heads.to(weight.device, weight.dtype).eval().requires_grad_(False)
