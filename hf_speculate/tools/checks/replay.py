"""Repeats a call to measure logit noise where two sequences differ, for targets that read more than token ids."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_speculate.generation.mixin import generate
from hf_speculate.tools.checks.near_ties import LogitNoise, noise_between

_SOURCES = ("drafter", "prompt_lookup_num_tokens", "max_matching_ngram_size")


class ReplayedDifference(NamedTuple):
    """Difference between two sequences of a call with an encoder's inputs, images or the like.

    Args:
        options: arguments of both `generate()` calls.
        speculation: the speculative call's own fields and its assistant.
        token_ids: [B, T] int64, plain decoding's output before the difference, prompts included.
        row: of the batch.
        position: number of new tokens before the difference.
        plain_id, speculative_id: the tokens that follow.
        gap: see `Difference`.
        block_len: K+1, the tokens that one verification scored.
    """

    options: Mapping[str, Any]
    speculation: Mapping[str, Any]
    token_ids: Tensor
    row: int
    position: int
    plain_id: int
    speculative_id: int
    gap: float
    block_len: int

    def measured_on(self, model: PreTrainedModel) -> LogitNoise:
        """See `Difference`: the plain sequence is decoded again, token by token and with drafts."""
        options = {name: _in_dtype(value, model.dtype) for name, value in self.options.items()}
        processors = [*(options.get("logits_processor") or []), _ForcedTokens(self.token_ids)]
        options |= {"logits_processor": LogitsProcessorList(processors), "return_dict_in_generate": True}
        options |= {"output_logits": True, "max_new_tokens": self.position + 1}
        single = self._logits(model, options)
        speculation = {name: self.speculation[name] for name in _SOURCES if name in self.speculation}
        speculation |= {"assistant_model": self.speculation["assistant_model"], "verifier": "greedy"}
        speculation |= {"num_assistant_tokens": max(self.block_len - 1, 1)}
        options |= {"max_new_tokens": self.position + self.block_len}
        other = self._logits(model, options | speculation)
        return noise_between(single, other[None], (self.plain_id, self.speculative_id))

    def _logits(self, model: PreTrainedModel, options: Mapping[str, Any]) -> Tensor:
        """[V] float64, the row's logits at the difference."""
        output: Any = generate(model, **options)
        logits: Tensor = output.logits[self.position][self.row].double()
        return logits


class _ForcedTokens(LogitsProcessor):
    """Forces the tokens of `token_ids` [B, T]; not registered as row-wise, so it is called for all rows at once."""

    def __init__(self, token_ids: Tensor):
        self.token_ids = token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        column = input_ids.shape[1]
        if column >= self.token_ids.shape[1]:
            return scores  # [B, V]
        return torch.full_like(scores, -torch.inf).scatter(1, self.token_ids[:, column, None], 0.0)


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Pixels and the like in float64 if the model is; any other value unchanged."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_real and dtype == torch.float64 else value
