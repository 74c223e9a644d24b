"""Optimise hidden matrices with Muon in float32.

Muon replaces the momentum of a matrix with the nearest semi-orthogonal matrix, computed by five
Newton-Schulz steps. All matrices of the same shape are stacked, so a step takes a few batched
products.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from collections import defaultdict

import torch
from transformers import PreTrainedModel

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_NEWTON_SCHULZ_STEPS = 5
TABLES = ("embed", "lm_head", "codebook")


def orthogonalize(stack: torch.Tensor) -> torch.Tensor:
    """Push the singular values of every matrix towards one.

    Args:
        stack: matrices, [M, R, C] float32.

    Returns:
        Matrices of the same shape with singular values of about 0.7 to 1.2.
    """
    wide = stack if stack.shape[1] <= stack.shape[2] else stack.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = a * wide + torch.baddbmm(b * gram, gram, gram, alpha=c) @ wide
    return wide if stack.shape[1] <= stack.shape[2] else wide.mT


class StackedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum.

    There is one parameter group per matrix shape.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[tuple(matrix.shape)].append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix in place from its gradient."""
        for group in self.param_groups:
            params = group["params"]
            grads = torch.stack([param.grad for param in params])  # [M, R, C]
            state = self.state[params[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grads)
            momentum = state["momentum"].lerp_(grads, 1 - MOMENTUM)
            update = orthogonalize(grads.lerp(momentum, MOMENTUM))
            scale = max(1.0, grads.shape[1] / grads.shape[2]) ** 0.5
            for param, delta in zip(params, update, strict=True):
                param.add_(delta, alpha=-group["lr"] * scale)


class PairOptimizer:
    """Muon and AdamW under one schedule.

    Muon optimises the matrices of the layers, and AdamW optimises embeddings, output matrices and
    norms.
    """

    def __init__(self, model: PreTrainedModel, matrix_lr: float, vector_lr: float) -> None:
        matrices, vectors = [], []
        for name, param in model.named_parameters():
            (
                matrices
                if param.ndim == 2 and not any(table in name for table in TABLES)
                else vectors
            ).append(param)
        adamw = torch.optim.AdamW(vectors, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.parts = [(StackedMuon(matrices, matrix_lr), matrix_lr), (adamw, vector_lr)]

    def step(self, scale: float) -> None:
        """Update with both learning rates times `scale` in 0..1, then clear the gradients."""
        for optimizer, peak_lr in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        """Return the states of both optimisers."""
        return [optimizer.state_dict() for optimizer, _ in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restore states returned by `state_dict`."""
        for (optimizer, _), state in zip(self.parts, states, strict=True):
            optimizer.load_state_dict(state)
