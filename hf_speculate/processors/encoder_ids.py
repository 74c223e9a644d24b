"""Logits processors that depend on the encoder's ids, with one entry per row of the batch.

transformers' own processors hold one entry per prompt, in the order of the prompts, and are called
with all rows at once. Here, the N rows of scores are N / B positions for each of the B rows, one
row after the other.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
)

from hf_speculate.processors.registry import OwnProcessor, Reads
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import upload


class EncoderNoRepeatNGramByRow(PerRow, OwnProcessor):
    """Bans the n-grams of the row's prompt."""

    BY_ROW = ("_followers",)
    reads = Reads.ROW

    def __init__(self, ngram_size: int, followers: Sequence[dict[tuple[int, ...], list[int]]]):
        self.num_ids_read = ngram_size - 1  # number of last ids to read per prefix
        self._followers = list(followers)  # by row: n-1 ids of the prompt -> ids that follow them

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the banned tokens in scores [N, V] after ids [N, n]."""
        num_ids, vocab_size = min(self.num_ids_read, input_ids.shape[1]), scores.shape[1]
        tails = input_ids[:, input_ids.shape[1] - num_ids :].tolist()
        num_positions = len(scores) // len(self._followers)
        banned = [
            (score_index, token_id)
            for score_index, tail in enumerate(tails)
            for token_id in self._followers[score_index // num_positions].get(tuple(tail), ())
            if token_id < vocab_size  # a draft model may have a smaller vocabulary
        ]
        scores = scores.clone()
        if banned:
            score_indices, token_ids = upload(banned, scores.device).unbind(dim=1)
            scores[score_indices, token_ids] = -torch.inf
        return scores


class EncoderRepetitionPenaltyByRow(PerRow, OwnProcessor):
    """Penalises the ids of the row's prompt."""

    TENSORS = ("_encoder_ids",)
    reads = Reads.ROW
    num_ids_read = 0

    def __init__(self, penalty: float, encoder_ids: Tensor, num_ids: int):
        self._penalty = penalty  # the inverse of the argument, as in transformers' processor
        self._encoder_ids = encoder_ids  # [B, L] int64
        self._num_ids = num_ids  # largest prompt id + 1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scale the scores [N, V] of the prompt's ids, without reading `input_ids`."""
        encoder_ids = self._encoder_ids.to(scores.device)
        # [N, L]
        encoder_ids = encoder_ids.repeat_interleave(len(scores) // len(encoder_ids), dim=0)
        vocab_size = scores.shape[1]
        if self._num_ids > vocab_size:  # a draft model may have a smaller vocabulary
            scores = pad(scores, (0, self._num_ids - vocab_size))
        prompt_scores = scores.gather(1, encoder_ids)
        prompt_scores = torch.where(
            prompt_scores < 0, prompt_scores * self._penalty, prompt_scores / self._penalty
        )
        return scores.scatter(1, encoder_ids, prompt_scores)[:, :vocab_size]


@cache
def _repeats_prompts() -> bool:
    """Return whether transformers' penalty applies to all rows of a prompt.

    In old versions, it applies only to the first row.
    """
    prompt: Any = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    scores = torch.ones(2, 1, device="cpu")
    return bool(EncoderRepetitionPenaltyLogitsProcessor(2.0, prompt)(prompt, scores)[1] != 1)


def by_row(processor: Any, num_rows: int) -> Any:
    """Replace transformers' processor with ours if all prompts have the same number of rows.

    Other processors are returned unchanged.
    """
    if (
        type(processor) is EncoderNoRepeatNGramLogitsProcessor
        and num_rows % processor.batch_size == 0
    ):
        num_copies = num_rows // processor.batch_size
        followers = [ngrams for ngrams in processor.generated_ngrams for _ in range(num_copies)]
        return EncoderNoRepeatNGramByRow(processor.ngram_size, followers)
    if type(processor) is EncoderRepetitionPenaltyLogitsProcessor:
        encoder_ids: Tensor = processor.encoder_input_ids
        is_filled = encoder_ids.dim() == 2 and encoder_ids.numel() > 0
        if is_filled and (
            num_rows == len(encoder_ids)
            or (_repeats_prompts() and num_rows % len(encoder_ids) == 0)
        ):
            encoder_ids = encoder_ids.repeat_interleave(num_rows // len(encoder_ids), dim=0)
            return EncoderRepetitionPenaltyByRow(
                processor.penalty, encoder_ids, int(encoder_ids.max()) + 1
            )
    return processor
