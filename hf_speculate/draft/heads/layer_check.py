"""Measures whether a draft head reads the layers that it was trained on."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.draft.base import DrafterSetup, DraftRequest
from hf_speculate.draft.heads.target_parts import shape_of
from hf_speculate.errors import ConfigError
from hf_speculate.models.language_model import device_of
from hf_speculate.models.layer_capture import FINAL_STATE, LayerCapture
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import Kept, Stream

if TYPE_CHECKING:
    from hf_speculate.draft.heads.head import DraftHead

_SHIFTS = (0, 1, -1)
_FEWEST_READ = 8  # tokens before the first that is predicted, if the prompts are that long
_MARGIN = 0.05  # by which another shift must be better, about two standard deviations of 200 tokens


class LayerCheck(NamedTuple):
    """How often a head's first token was the target's own choice, by what it read."""

    layers: tuple[int, ...]  # that it reads
    accuracies: dict[int, float]  # by shift of all ids: 0, and +1 and -1 where there are such layers
    num_tokens: int  # that were predicted with each

    @property
    def best_layers(self) -> tuple[int, ...]:
        """The ids with the highest accuracy, pass them as `aux_layers`."""
        best = max(self.accuracies, key=lambda shift: self.accuracies[shift])
        return tuple(layer + best for layer in self.layers)


class _Text(NamedTuple):
    """A prompt with what the target makes of it."""

    token_ids: Tensor  # [T] int64
    states: dict[int, Tensor]  # by id, [T, Ht]
    choices: Tensor  # [T] int64, the target's next token after each


def check_layers(
    head: "DraftHead", target: PreTrainedModel, prompts: Tensor | Mapping[str, Tensor], num_tokens: int = 200
) -> LayerCheck:
    """Predict the next tokens of texts with the ids of a head and shifted by one, see `DraftHead.check_layers`."""
    if not head.hidden_layers or FINAL_STATE in head.hidden_layers:
        raise ConfigError(
            "check_layers needs a head that reads the states of layers, got one that reads "
            f"{head.hidden_layers or 'none'}; there is nothing to shift"
        )
    num_layers = shape_of(target.config).num_layers
    shifted = {shift: tuple(layer + shift for layer in head.hidden_layers) for shift in _SHIFTS}
    shifted = {shift: ids for shift, ids in shifted.items() if min(ids) >= 0 and max(ids) <= num_layers}
    wanted = sorted({layer for ids in shifted.values() for layer in ids})
    texts = [_read(target, row, wanted) for row in _rows_of(prompts, num_tokens)]
    if not texts:
        raise ConfigError("prompts must hold a text of at least three tokens, got none; pass some lines of text")
    counts = {shift: [_hits(head.with_layers(ids), target, text) for text in texts] for shift, ids in shifted.items()}
    total = sum(len(hits) for hits in counts[0])
    accuracies = {shift: float(torch.cat(hits).double().mean()) for shift, hits in counts.items()}
    check = LayerCheck(head.hidden_layers, accuracies, total)
    if accuracies[0] + _MARGIN < max(accuracies.values()):
        warnings.warn(
            f"the head predicts {max(accuracies.values()):.0%} of {total} tokens from layers {check.best_layers}, and "
            f"{accuracies[0]:.0%} from {head.hidden_layers}; load it with aux_layers={list(check.best_layers)}",
            stacklevel=3,
        )
    return check


def _rows_of(prompts: Tensor | Mapping[str, Tensor], num_tokens: int) -> list[Tensor]:
    """The texts without padding, cut so that they hold little more than is predicted."""
    ids = prompts if isinstance(prompts, Tensor) else prompts["input_ids"]
    mask = None if isinstance(prompts, Tensor) else prompts.get("attention_mask")
    rows = [row if mask is None else row[mask[index].bool()] for index, row in enumerate(ids)]
    longest = _FEWEST_READ + -(-num_tokens // max(len(rows), 1))
    return [row[:longest] for row in rows if len(row) > 2]


@torch.no_grad()
def _read(target: PreTrainedModel, token_ids: Tensor, layers: Sequence[int]) -> _Text:
    with LayerCapture(target, layers) as capture:
        output = target(token_ids[None].to(device_of(target)), use_cache=False)
        states = {layer: capture.state(layer)[0] for layer in layers}
    return _Text(token_ids, states, output.logits[0].argmax(-1).cpu())


def _hits(head: "DraftHead", target: PreTrainedModel, text: _Text) -> Tensor:
    """[N] bool: whether the first drafted token was the target's choice, token by token of a text."""
    length = len(text.token_ids)
    drafter = head(_setup(target, length))
    states = torch.cat([text.states[layer].to(target.device) for layer in head.hidden_layers], dim=-1)[None]
    states = drafter.project_states(states)  # [1, T, D]
    ids, hits, told = text.token_ids[None].to(target.device), [], 1
    for num_read in range(min(_FEWEST_READ, length // 2) + 1, length + 1):
        new = ids[:, told:num_read]
        count = torch.tensor([num_read - told], dtype=torch.int32, device="cpu")
        kept = Kept(new, count, states[:, told - 1 : num_read - 1])
        draft = drafter.draft(DraftRequest(ids[:, :num_read], None, 1, kept=kept))
        hits.append(draft.token_ids[0, 0].cpu() == text.choices[num_read - 1])
        told = num_read
    return torch.stack(hits)


def _setup(target: PreTrainedModel, length: int) -> DrafterSetup:
    return DrafterSetup(
        target=target,
        batch_size=1,
        num_pads=(0,),
        max_length=length + 1,
        max_draft_tokens=1,
        vocab_size=shape_of(target.config).vocab_size,
        eos_token_ids=frozenset(),
        device=target.device,
        processors=BlockLogitsProcessorList(),
        stream=Stream.DRAFT,
    )
