"""Measures whether a draft head reads the layers that it was trained on."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.draft.base import DrafterSetup, DraftRequest
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


@torch.no_grad()
def check_layers(
    head: "DraftHead", target: PreTrainedModel, prompts: Tensor | Mapping[str, Tensor], num_tokens: int
) -> LayerCheck:
    """Predict the next tokens of texts with the ids of a head and shifted by one, see `DraftHead.check_layers`."""
    if not head.hidden_layers or FINAL_STATE in head.hidden_layers:
        raise ConfigError(
            "check_layers needs a head that reads the states of layers, got one that reads "
            f"{head.hidden_layers or 'none'}; there is nothing to shift"
        )
    shifted = {shift: tuple(layer + shift for layer in head.hidden_layers) for shift in _SHIFTS}
    shifted = {shift: ids for shift, ids in shifted.items() if min(ids) >= 0 and max(ids) <= head.shape.num_layers}
    batch = {"input_ids": prompts} if isinstance(prompts, Tensor) else prompts
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    texts = [row[mask.bool()].to(device_of(target)) for row, mask in zip(batch["input_ids"], masks, strict=True)]
    longest = _FEWEST_READ + -(-num_tokens // max(len(texts), 1))
    texts = [text[:longest] for text in texts if len(text) > 2]
    if not texts:
        raise ConfigError("prompts must hold a text of at least three tokens, got none; pass some lines of text")
    hits: dict[int, list[bool]] = {shift: [] for shift in shifted}
    with LayerCapture(target, sorted({layer for ids in shifted.values() for layer in ids})) as capture:
        for text in texts:
            choices = target(text[None], use_cache=False).logits[0].argmax(-1)  # [T]
            for shift, ids in shifted.items():
                states = torch.cat([capture.state(layer).to(target.device) for layer in ids], dim=-1)  # [1, T, A * Ht]
                hits[shift] += _hits(head.with_layers(ids), target, text, states, choices)
    accuracies = {shift: sum(found) / len(found) for shift, found in hits.items()}
    check = LayerCheck(head.hidden_layers, accuracies, len(hits[0]))
    if accuracies[0] + _MARGIN < max(accuracies.values()):
        warnings.warn(
            f"the head predicts {max(accuracies.values()):.0%} of {len(hits[0])} tokens from layers "
            f"{check.best_layers}, and {accuracies[0]:.0%} from {head.hidden_layers}; load it with "
            f"aux_layers={list(check.best_layers)}",
            stacklevel=4,
        )
    return check


def _hits(head: "DraftHead", target: PreTrainedModel, text: Tensor, states: Tensor, choices: Tensor) -> list[bool]:
    """Whether the first drafted token was the target's choice, token by token of a text."""
    setup = DrafterSetup(
        target=target,
        batch_size=1,
        num_pads=(0,),
        max_length=len(text) + 1,
        max_draft_tokens=1,
        vocab_size=head.shape.vocab_size,
        eos_token_ids=frozenset(),
        device=target.device,
        processors=BlockLogitsProcessorList(),
        stream=Stream.DRAFT,
    )
    drafter, ids, hits, told = head(setup), text[None], [], 1
    states = drafter.project_states(states)
    for num_read in range(min(_FEWEST_READ, len(text) // 2) + 1, len(text) + 1):
        count = torch.tensor([num_read - told], dtype=torch.int32, device="cpu")
        kept = Kept(ids[:, told:num_read], count, states[:, told - 1 : num_read - 1])
        draft = drafter.draft(DraftRequest(ids[:, :num_read], None, 1, kept=kept))
        hits.append(bool(draft.token_ids[0, 0] == choices[num_read - 1]))
        told = num_read
    return hits
