"""Measures at which position a Gemma 4 assistant predicts best, on texts of a real pair."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.errors import ConfigError, warn_user
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.gemma4.assistant import LAST_READ, NEWEST, Context, Gemma4Assistant

FEWEST_READ = 8  # tokens before the first that it predicts, if the texts are that long
MARGIN = 0.05  # by which the other position must be better, about two standard deviations of 200 tokens


class PositionCheck(NamedTuple):
    """How often an assistant's first token was the target's own choice, by the position of its query."""

    accuracies: dict[int, float]  # by the `position` of a `Gemma4Assistant`
    num_tokens: int  # predicted with each

    @property
    def best(self) -> int:
        """The position with the highest accuracy."""
        return max(self.accuracies, key=lambda position: self.accuracies[position])


@torch.no_grad()
def check_positions(
    assistant: Gemma4Assistant, target: PreTrainedModel, prompts: Tensor | Mapping[str, Tensor], num_tokens: int = 200
) -> PositionCheck:
    """Let an assistant predict each next token of the prompts at both positions, and count the target's own choices.

    Args:
        assistant: whose `position` is compared with the other one.
        target: that it drafts for.
        prompts: [B, T] int64, or what a tokenizer returns: `input_ids`, and `attention_mask` for padding.
        num_tokens: that are predicted, at most.

    Returns:
        The accuracies by position; a warning is given if the other one is clearly better.

    Raises:
        ConfigError: the prompts hold fewer than three tokens.
        UnsupportedModelError: the assistant does not fit the target.
    """
    target = unwrapped(target, "target")
    assistant.check_target(target)
    texts = texts_of(prompts, target.device, num_tokens)
    hits: dict[int, list[bool]] = {LAST_READ: [], NEWEST: []}
    for text in texts:
        output: Any = target(text[None], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        embeddings, choices = target.get_input_embeddings()(text), output.logits[0].argmax(-1)  # [T, D], [T]
        for num_read in range(min(FEWEST_READ, len(text) // 2), len(text)):
            for position, hits_there in hits.items():
                context = _context_of(assistant, output.shared_kv_states, num_read, position)
                state = output.hidden_states[-1][:, num_read - 1]  # [1, D]
                logits, _ = assistant.step(embeddings[num_read][None], state, context)
                hits_there.append(bool(logits.argmax(-1)[0] == choices[num_read]))
    check = PositionCheck({position: sum(there) / len(there) for position, there in hits.items()}, len(hits[NEWEST]))
    if check.accuracies[assistant.position] + MARGIN < check.accuracies[check.best]:
        warn_user(
            f"the assistant predicts {check.accuracies[check.best]:.0%} of {check.num_tokens} tokens at position "
            f"{check.best}, and {check.accuracies[assistant.position]:.0%} at {assistant.position}; pass "
            f"Gemma4Assistant(model, position={check.best})"
        )
    return check


def texts_of(prompts: Tensor | Mapping[str, Tensor], device: torch.device, num_tokens: int) -> list[Tensor]:
    """Return the texts [T] int64 of prompts without padding, cut so that `num_tokens` tokens are predicted in all."""
    batch = {"input_ids": prompts} if isinstance(prompts, Tensor) else prompts
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    texts = [row[mask.bool()].to(device) for row, mask in zip(batch["input_ids"], masks, strict=True)]
    longest = FEWEST_READ + -(-num_tokens // max(len(texts), 1))
    texts = [text[:longest] for text in texts if len(text) > 2]
    if not texts:
        raise ConfigError("prompts must hold a text of at least three tokens, got none; pass some lines of text")
    return texts


def _context_of(assistant: Gemma4Assistant, shared: Mapping[str, Any], num_read: int, position: int) -> Context:
    """What a query sees of one row of which the target has read so many tokens."""
    states: dict[str, tuple[Tensor, Tensor]] = {}
    for layer_type, window in assistant.windows.items():
        seen = slice(0 if window is None else max(num_read - window, 0), num_read)
        keys, values = shared[layer_type]
        states[layer_type] = keys[:, :, seen], values[:, :, seen]
    positions = torch.tensor([[num_read + position]], device=assistant.model.device)
    return Context(states, dict.fromkeys(states), positions)
