"""DSpark's corrections of a block: a bias from the previous token, and an estimate of the acceptance."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Adds to a slot's logits what follows from the token before it.

    With e = w1[previous token] and h the slot's state, the bias is w2 of e ("vanilla"), of e gated by
    sigmoid(gate(h, e)) ("gated"), or of tanh(output) of a recurrent unit over the block's slots ("rnn").

    Args:
        kind: "vanilla", "gated" or "rnn".
        width: H.
        shapes: of the weights by name.
    """

    def __init__(self, kind: str, width: int, shapes: Mapping[str, Sequence[int]]):
        super().__init__()
        num_ids, rank = shapes["markov_head.markov_w1.weight"]
        num_columns = shapes["markov_head.markov_w2.weight"][0]
        self.markov_w1 = nn.Embedding(num_ids, rank)
        self.markov_w2 = nn.Linear(rank, num_columns, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank, bias=False) if kind == "gated" else None
        self.joint_proj = nn.Linear(width + 2 * rank, 3 * rank, bias=False) if kind == "rnn" else None

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[B, r] of the previous tokens [B] int64."""
        return self.markov_w1(token_ids)  # type: ignore[no-any-return]

    def forward(self, embeddings: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A slot's bias.

        Args:
            embeddings: [B, r] of the previous tokens.
            states: [B, H] of the slot.
            memory: [B, r] of the recurrent unit; None at the block's first slot, and for other kinds.

        Returns:
            [B, Vd], and the memory for the next slot.
        """
        if self.gate_proj is not None:
            gate = torch.sigmoid(self.gate_proj(torch.cat([states, embeddings], dim=-1)))
            return self.markov_w2(gate * embeddings), None
        if self.joint_proj is None:
            return self.markov_w2(embeddings), None
        memory = torch.zeros_like(embeddings) if memory is None else memory
        joint = self.joint_proj(torch.cat([memory, embeddings, states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        memory = gate * memory + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), memory


class ConfidenceHead(nn.Module):
    """Estimates the probability that the target keeps a slot's token.

    Args:
        in_width: H, or H + r with the previous token's embedding.
    """

    def __init__(self, in_width: int):
        super().__init__()
        self.proj = nn.Linear(in_width, 1, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[B] in (0, 1) of [B, in_width]."""
        return torch.sigmoid(self.proj(states)[:, 0].float())
