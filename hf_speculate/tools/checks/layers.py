"""Measures whether a draft head reads the layers that it was trained on, on texts of a real pair."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.draft.base import DrafterSetup, DraftRequest
from hf_speculate.errors import ConfigError, warn_user
from hf_speculate.models.language_model import device_of, vocab_size_of
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.layer_capture import FINAL_STATE, LayerCapture
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.tools.checks.positions import FEWEST_READ, MARGIN, texts_of
from hf_speculate.types import Kept, Stream

_SHIFTS = (0, 1, -1)  # shifts of layers' ids that are compared


class LayerCheck(NamedTuple):
    """How often a head's first token was the target's own choice, by what it read."""

    layers: tuple[int, ...]  # read by the head
    accuracies: dict[int, float]  # by shift of all ids: 0, and +1 and -1 where there are such layers
    num_tokens: int  # predicted with each

    @property
    def best_layers(self) -> tuple[int, ...]:
        """The ids with the highest accuracy, pass them as `aux_layers`."""
        best = max(self.accuracies, key=lambda shift: self.accuracies[shift])
        return tuple(layer + best for layer in self.layers)


@torch.no_grad()
def check_layers(
    head: DraftHead, target: PreTrainedModel, prompts: Tensor | Mapping[str, Tensor], num_tokens: int = 200
) -> LayerCheck:
    """Measure whether the head reads the layers that it was trained on: an id that is off by one is silent.

    The head predicts each next token of the prompts from the target's states, with its ids as they are and shifted
    by one, and each prediction is compared with the target's own choice.

    Args:
        head: whose layers are checked.
        target: that it was loaded for.
        prompts: [B, T] int64, or what a tokenizer returns: `input_ids`, and `attention_mask` for padding.
        num_tokens: that are predicted, at most.

    Returns:
        The accuracies by shift; a warning is given if a shift is clearly better.

    Raises:
        ConfigError: the head reads no layers, or the prompts hold fewer than three tokens.
    """
    if not head.hidden_layers or FINAL_STATE in head.hidden_layers:
        raise ConfigError(
            "check_layers needs a head that reads the states of layers, got one that reads "
            f"{head.hidden_layers or 'none'}; there is nothing to shift"
        )
    target = unwrapped(target, "target")
    shifted = {shift: tuple(layer + shift for layer in head.hidden_layers) for shift in _SHIFTS}
    shifted = {shift: ids for shift, ids in shifted.items() if min(ids) >= 0 and max(ids) <= head.shape.num_layers}
    texts = texts_of(prompts, device_of(target), num_tokens)
    hits: dict[int, list[bool]] = {shift: [] for shift in shifted}
    with LayerCapture(target, sorted({layer for ids in shifted.values() for layer in ids})) as capture:
        for text in texts:
            choices = target(text[None], use_cache=False).logits[0].argmax(-1)  # [T]
            for shift, ids in shifted.items():
                states = torch.cat([capture.state(layer).to(target.device) for layer in ids], dim=-1)
                hits[shift] += _hits(head.with_layers(ids), target, text, states, choices)
    accuracies = {shift: sum(shifted_hits) / len(shifted_hits) for shift, shifted_hits in hits.items()}
    check = LayerCheck(head.hidden_layers, accuracies, len(hits[0]))
    if accuracies[0] + MARGIN < max(accuracies.values()):
        warn_user(
            f"the head predicts {max(accuracies.values()):.0%} of {len(hits[0])} tokens from layers "
            f"{check.best_layers}, and {accuracies[0]:.0%} from {head.hidden_layers}; load it with "
            f"aux_layers={list(check.best_layers)}"
        )
    return check


def _hits(head: DraftHead, target: PreTrainedModel, text: Tensor, states: Tensor, choices: Tensor) -> list[bool]:
    """Whether the first drafted token was the target's choice, token by token of a text."""
    setup = DrafterSetup(
        target=target,
        batch_size=1,
        num_pads=(0,),
        max_length=len(text) + 1,
        max_draft_tokens=1,
        vocab_size=vocab_size_of(target),
        eos_token_ids=frozenset(),
        device=target.device,
        processors=BlockLogitsProcessorList(),
        stream=Stream.DRAFT,
    )
    drafter, ids, hits, told = head(setup), text[None], [], 1
    states = drafter.project_states(states)
    for num_read in range(min(FEWEST_READ, len(text) // 2) + 1, len(text) + 1):
        count = torch.tensor([num_read - told], dtype=torch.int32, device="cpu")
        kept = Kept(ids[:, told:num_read], count, states[:, told - 1 : num_read - 1])
        draft = drafter.draft(DraftRequest(ids[:, :num_read], None, 1, kept=kept))
        hits.append(bool(draft.token_ids[0, 0] == choices[num_read - 1]))
        told = num_read
    return hits
