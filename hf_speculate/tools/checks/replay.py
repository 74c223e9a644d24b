"""Measures a target that reads more than a text where two texts part, by making the call again."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_speculate.generation.mixin import generate
from hf_speculate.tools.checks.evidence import Measured, measured_by

_SOURCES = ("drafter", "prompt_lookup_num_tokens", "max_matching_ngram_size")


class Replay(NamedTuple):
    """A call, and where one row's two texts part.

    Args:
        options: what both `generate()` calls were given, the encoder's inputs or images among it.
        speculation: the fields of ours that the speculative call was given, and its assistant.
        token_ids: [B, T] int64, what plain decoding had put out before that place, the prompts included.
        row: of the batch.
        position: new tokens before the place.
        plain_id, speculative_id: the tokens that follow.
        gap: the plain token's score over the speculative one's, after all logits processors, in the plain run.
        block_len: tokens that a verification scored at once, K+1.
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

    def measured_on(self, model: PreTrainedModel) -> Measured:
        """See `Parting`: the plain text is decoded again, with drafts and without.

        The noise is between the logits after one token and those of a verification, of the call's rows both times.
        """
        options = {name: _as_wide(value, model.dtype) for name, value in self.options.items()}
        processors = [*(options.get("logits_processor") or []), _Spells(self.token_ids)]
        options |= {"logits_processor": LogitsProcessorList(processors), "return_dict_in_generate": True}
        options |= {"output_logits": True, "max_new_tokens": self.position + 1}
        single = self._logits(model, options)
        speculation = {name: self.speculation[name] for name in _SOURCES if name in self.speculation}
        speculation |= {"assistant_model": self.speculation["assistant_model"], "verifier": "greedy"}
        speculation |= {"num_assistant_tokens": max(self.block_len - 1, 1)}
        options |= {"max_new_tokens": self.position + self.block_len}
        other = self._logits(model, options | speculation)
        return measured_by(single, other[None], (self.plain_id, self.speculative_id))

    def _logits(self, model: PreTrainedModel, options: Mapping[str, Any]) -> Tensor:
        """[V] float64, of the row at the place."""
        output: Any = generate(model, **options)
        logits: Tensor = output.logits[self.position][self.row].double()
        return logits


class _Spells(LogitsProcessor):
    """Lets a given text be decoded, whatever the scores; of no known kind, so that it is called for all rows at once.

    Args:
        token_ids: [B, T] int64, the prompts and the text.
    """

    def __init__(self, token_ids: Tensor):
        self.token_ids = token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See `LogitsProcessor`; `scores` are [B, V]."""
        column = input_ids.shape[1]
        if column >= self.token_ids.shape[1]:
            return scores
        return torch.full_like(scores, -torch.inf).scatter(1, self.token_ids[:, column, None], 0.0)


def _as_wide(value: Any, dtype: torch.dtype) -> Any:
    """Pixels and the like in float64 for a model in float64; anything else as it is."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_real and dtype == torch.float64 else value
