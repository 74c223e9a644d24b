"""Measure on a real pair at which query position a Gemma 4 assistant predicts best."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.errors import ConfigError, warn_user
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.gemma4.assistant import LAST_READ, NEWEST, Context, Gemma4Assistant

FEWEST_READ = 8  # number of tokens before the first prediction if the texts are long enough
MARGIN = 0.05  # gain that triggers a warning, about two standard deviations for 200 tokens


class PositionCheck(NamedTuple):
    """The accuracy of an assistant by query position.

    The first draft token is correct if it is the target's greedy choice.
    """

    accuracies: dict[int, float]  # accuracy for each `position` of a `Gemma4Assistant`
    num_tokens: int  # number of predictions per position

    @property
    def best(self) -> int:
        """The position with the highest accuracy."""
        return max(self.accuracies, key=lambda position: self.accuracies[position])


@torch.no_grad()
def check_positions(
    assistant: Gemma4Assistant,
    target: PreTrainedModel,
    prompts: Tensor | Mapping[str, Tensor],
    num_tokens: int = 200,
) -> PositionCheck:
    """Measure an assistant's accuracy at both query positions.

    The assistant predicts each next token of the prompts, and each prediction is compared with the
    target's greedy choice.

    Args:
        assistant: Gemma 4 assistant with a `position`.
        target: the assistant's target model.
        prompts: [B, T] int64, or a tokenizer's output: `input_ids`, and `attention_mask` for
            padding.
        num_tokens: maximum number of predictions per position.

    Returns:
        The accuracies by position. A warning is issued if the other position is clearly better.

    Raises:
        ConfigError: all prompts have fewer than three tokens.
        UnsupportedModelError: the assistant does not fit the target.
    """
    target = unwrapped(target, "target")
    assistant.check_target(target)
    texts = texts_of(prompts, target.device, num_tokens)
    is_correct: dict[int, list[bool]] = {LAST_READ: [], NEWEST: []}
    for text in texts:
        output: Any = target(
            text[None], use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        # [T, D], [T]
        embeddings, choices = target.get_input_embeddings()(text), output.logits[0].argmax(-1)
        for num_read in range(min(FEWEST_READ, len(text) // 2), len(text)):
            for position, predictions in is_correct.items():
                context = _context_of(assistant, output.shared_kv_states, num_read, position)
                state = output.hidden_states[-1][:, num_read - 1]  # [1, D]
                logits, _ = assistant.step(embeddings[num_read][None], state, context)
                predictions.append(bool(logits.argmax(-1)[0] == choices[num_read]))
    accuracies = {
        position: sum(predictions) / len(predictions)
        for position, predictions in is_correct.items()
    }
    check = PositionCheck(accuracies, len(is_correct[NEWEST]))
    if check.accuracies[assistant.position] + MARGIN < check.accuracies[check.best]:
        warn_user(
            f"the assistant predicts {check.accuracies[check.best]:.0%} of {check.num_tokens} "
            "tokens at position "
            f"{check.best}, and {check.accuracies[assistant.position]:.0%} at "
            f"{assistant.position}; pass "
            f"Gemma4Assistant(model, position={check.best})"
        )
    return check


def texts_of(
    prompts: Tensor | Mapping[str, Tensor], device: torch.device, num_tokens: int
) -> list[Tensor]:
    """Remove padding, and cut the prompts to `num_tokens` predictions in total.

    Returns:
        The texts, each [T] int64.

    Raises:
        ConfigError: no prompt has three tokens.
    """
    batch = {"input_ids": prompts} if isinstance(prompts, Tensor) else prompts
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    texts = [
        row[mask.bool()].to(device) for row, mask in zip(batch["input_ids"], masks, strict=True)
    ]
    max_len = FEWEST_READ + -(-num_tokens // max(len(texts), 1))
    texts = [text[:max_len] for text in texts if len(text) > 2]
    if not texts:
        raise ConfigError(
            "prompts must hold a text of at least three tokens, got none; pass some lines of text"
        )
    return texts


def _context_of(
    assistant: Gemma4Assistant, shared: Mapping[str, Any], num_read: int, position: int
) -> Context:
    """Return the target KV states that a query attends to after `num_read` tokens."""
    states: dict[str, tuple[Tensor, Tensor]] = {}
    for layer_type, window in assistant.windows.items():
        in_window = slice(0 if window is None else max(num_read - window, 0), num_read)
        keys, values = shared[layer_type]
        states[layer_type] = keys[:, :, in_window], values[:, :, in_window]
    positions = torch.tensor([[num_read + position]], device=assistant.model.device)
    return Context(states, dict.fromkeys(states), positions)
