"""Uno adapters of tiny targets, written to folders, and a reference without cache."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
RANK, ALPHA = 3, 12.0  # a scale of 4
Tensors = dict[str, Tensor]


def make_tensors(target: PreTrainedModel, size: float = 0.05, seed: int = 0) -> Tensors:
    """Make tensors by their names in a file, without a prefix."""
    generator, tensors = torch.Generator().manual_seed(seed), Tensors()
    for place, parent, name in linear_layers(target):
        weight = getattr(parent, name).weight
        for side, shape in {"A": (RANK, weight.shape[1]), "B": (weight.shape[0], RANK)}.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            tensors[f"{place}.lora_{side}.weight"] = values * size
    return tensors


def linear_layers(target: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each adapted layer: its name in a file, its parent and its name there."""
    for index, layer in enumerate(getattr(target.get_decoder(), "layers", ())):
        for part, names in PARTS.items():
            parent = getattr(layer, part, None)
            for name in names:
                if isinstance(getattr(parent, name, None), nn.Module):
                    yield f"model.layers.{index}.{part}.{name}", parent, name


def write_adapter(
    folder: Path,
    tensors: Tensors,
    *,
    prefix: str = "",
    files: Sequence[str] = ("adapter_model.safetensors",),
    **fields: Any,
) -> Path:
    """Write a folder as PEFT does; tensors take turns among several files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.05,
        "target_modules": [name for names in PARTS.values() for name in names],
        "bias": "none",
        "base_model_name_or_path": None,
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for number, file in enumerate(files):
        names = list(tensors)[number :: len(files)]
        save_file({prefix + name: tensors[name] for name in names}, folder / file)
    return folder


class Adapted(nn.Module):
    """y = W x + s B (m * A x), with a mask by column."""

    def __init__(self, inner: nn.Module, down: Tensor, up: Tensor):
        super().__init__()
        self.inner, self.down, self.up = inner, down, up
        self.mask: Tensor  # [T, 1]

    def forward(self, states: Tensor) -> Tensor:
        low = self.mask * (states @ self.down.T)
        return self.inner(states) + ALPHA / RANK * (low @ self.up.T)


class Reference:
    """The format's formula: a whole forward for each draft."""

    def __init__(self, target: PreTrainedModel, tensors: Tensors):
        self.model, self.layers = copy.deepcopy(target), list[Adapted]()
        for place, parent, name in linear_layers(self.model):
            sides = (tensors[f"{place}.lora_{side}.weight"] for side in "AB")
            self.layers.append(Adapted(getattr(parent, name), *sides))
            setattr(parent, name, self.layers[-1])

    @torch.no_grad()
    def logits(self, text: Sequence[int], noise: Sequence[int]) -> Tensor:
        """Return the logits [1 + N, V] of the newest token and of each noise token."""
        mask = torch.tensor([0.0] * len(text) + [1.0] * len(noise), dtype=torch.float64)[:, None]
        for layer in self.layers:
            layer.mask = mask
        ids = torch.tensor([[*text, *noise]])
        return self.model(ids).logits[0, len(text) - 1 :]
