"""Measure on a real pair whether a draft head reads the layers it was trained on."""

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

_SHIFTS = (0, 1, -1)  # shifts of the layer ids


class LayerCheck(NamedTuple):
    """The accuracy of a head by layer shift.

    The first draft token is correct if it is the target's greedy choice.
    """

    layers: tuple[int, ...]  # layer ids of the head
    # accuracy by the shift of all ids: 0, and +1 and -1 if these layers exist
    accuracies: dict[int, float]
    num_tokens: int  # number of predictions per shift

    @property
    def best_layers(self) -> tuple[int, ...]:
        """The layer ids with the highest accuracy, for `aux_layers`."""
        best = max(self.accuracies, key=lambda shift: self.accuracies[shift])
        return tuple(layer + best for layer in self.layers)


@torch.no_grad()
def check_layers(
    head: DraftHead,
    target: PreTrainedModel,
    prompts: Tensor | Mapping[str, Tensor],
    num_tokens: int = 200,
) -> LayerCheck:
    """Measure whether a draft head reads the layers it was trained on.

    A layer id that is off by one raises no error, but lowers the acceptance rate. The head predicts
    each next token of the prompts from the target's states, with its layer ids and with the ids
    shifted by one. Each prediction is compared with the target's greedy choice.

    Args:
        head: draft head with auxiliary layers.
        target: the head's target model.
        prompts: [B, T] int64, or a tokenizer's output: `input_ids`, and `attention_mask` for
            padding.
        num_tokens: maximum number of predictions per shift.

    Returns:
        The accuracies by shift. A warning is issued if another shift is clearly better.

    Raises:
        ConfigError: the head reads no layers, or all prompts have fewer than three tokens.
    """
    if not head.hidden_layers or FINAL_STATE in head.hidden_layers:
        raise ConfigError(
            "check_layers needs a head that reads the states of layers, got one that reads "
            f"{head.hidden_layers or 'none'}; there is nothing to shift"
        )
    target = unwrapped(target, "target")
    shifted = {shift: tuple(layer + shift for layer in head.hidden_layers) for shift in _SHIFTS}
    shifted = {
        shift: ids
        for shift, ids in shifted.items()
        if min(ids) >= 0 and max(ids) <= head.shape.num_layers
    }
    texts = texts_of(prompts, device_of(target), num_tokens)
    is_correct: dict[int, list[bool]] = {shift: [] for shift in shifted}
    with LayerCapture(
        target, sorted({layer for ids in shifted.values() for layer in ids})
    ) as capture:
        for text in texts:
            choices = target(text[None], use_cache=False).logits[0].argmax(-1)  # [T]
            for shift, ids in shifted.items():
                states = torch.cat(
                    [capture.state(layer).to(target.device) for layer in ids], dim=-1
                )
                is_correct[shift] += _predictions(
                    head.with_layers(ids), target, text, states, choices
                )
    accuracies = {
        shift: sum(predictions) / len(predictions) for shift, predictions in is_correct.items()
    }
    check = LayerCheck(head.hidden_layers, accuracies, len(is_correct[0]))
    if accuracies[0] + MARGIN < max(accuracies.values()):
        warn_user(
            f"the head predicts {max(accuracies.values()):.0%} of {len(is_correct[0])} tokens from "
            "layers "
            f"{check.best_layers}, and {accuracies[0]:.0%} from {head.hidden_layers}; load it with "
            f"aux_layers={list(check.best_layers)}"
        )
    return check


def _predictions(
    head: DraftHead, target: PreTrainedModel, text: Tensor, states: Tensor, choices: Tensor
) -> list[bool]:
    """Draft one token after each prefix of a text, and compare it with the target's choice.

    Args:
        head: draft head with the layer ids of `states`.
        target: the head's target model.
        text: [T] int64.
        states: [1, T, H], the target's concatenated states for the head's layers.
        choices: [T] int64, the target's greedy choices.

    Returns:
        For each draft token, whether it equals the target's choice.
    """
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
    drafter, ids, is_correct, num_drafter_read = head(setup), text[None], [], 1
    states = drafter.project_states(states)
    for num_read in range(min(FEWEST_READ, len(text) // 2) + 1, len(text) + 1):
        count = torch.tensor([num_read - num_drafter_read], dtype=torch.int32, device="cpu")
        emitted = Kept(
            ids[:, num_drafter_read:num_read], count, states[:, num_drafter_read - 1 : num_read - 1]
        )
        draft = drafter.draft(DraftRequest(ids[:, :num_read], None, 1, kept=emitted))
        is_correct.append(bool(draft.token_ids[0, 0] == choices[num_read - 1]))
        num_drafter_read = num_read
    return is_correct
