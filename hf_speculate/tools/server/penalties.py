"""OpenAI's frequency and presence penalties, as a logits processor."""

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_speculate.processors.registry import register_row_wise


@register_row_wise
class PenaltiesProcessor(LogitsProcessor):
    """Frequency and presence penalties.

    The logit of a token with c > 0 occurrences in the answer is lowered by `frequency * c +
    presence`. Prompt tokens do not count. Negative penalties raise logits.
    """

    def __init__(self, prompt_len: int, frequency: float, presence: float):
        self.prompt_len, self.frequency, self.presence = prompt_len, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply the penalties.

        Args:
            input_ids: [N, T] int64, the prompt and the answer so far.
            scores: [N, V].

        Returns:
            Scores [N, V].
        """
        answer_ids = input_ids[:, self.prompt_len :].clamp(max=scores.shape[1] - 1)
        ones = torch.ones_like(answer_ids, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, answer_ids, ones)  # [N, V]
        return scores - self.frequency * counts - self.presence * (counts > 0)
