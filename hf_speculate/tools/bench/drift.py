"""Says how far texts lie from what the target would write by itself."""

import inspect
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.measuring import Run

_CHUNK = 64  # positions of which log-probabilities are held at once


class Drift(NamedTuple):
    """Sums over texts; two of them are added with `+`.

    Args:
        log_likelihood: of the texts under the target, in nats; neither temperature nor other processors count.
        num_best: tokens that are the target's likeliest after what stands before them in their own text.
        num_tokens: of the texts.
    """

    log_likelihood: float = 0.0
    num_best: int = 0
    num_tokens: int = 0

    def __add__(self, other: object) -> "Drift":
        if not isinstance(other, Drift):
            return NotImplemented
        return Drift(
            self.log_likelihood + other.log_likelihood,
            self.num_best + other.num_best,
            self.num_tokens + other.num_tokens,
        )

    @property
    def log_likelihood_per_token(self) -> float:
        """In nats."""
        return self.log_likelihood / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of tokens that greedy decoding would have taken at their place, in [0, 1]."""
        return self.num_best / self.num_tokens


@torch.no_grad()
def drift_of_text(model: PreTrainedModel, prompt_ids: Tensor, new_ids: list[int]) -> Drift:
    """Read one text with the target, in a forward of its own.

    Args:
        model: the target, any decoder.
        prompt_ids: [T] int64, unpadded.
        new_ids: N ids, at least one.
    """
    text = torch.tensor(new_ids, device=prompt_ids.device)  # [N]
    num = len(new_ids)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": num + 1} if keeps else {}
    ids = torch.cat([prompt_ids, text])[None]  # [1, T+N]
    logits = model(input_ids=ids, use_cache=False, **options).logits[0, -num - 1 : -1]  # [N, V]
    log_likelihood, num_best = 0.0, 0
    for chunk, chosen in zip(logits.split(_CHUNK), text.to(logits.device).split(_CHUNK), strict=True):
        wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        log_probs = wide.log_softmax(-1).gather(-1, chosen[:, None])  # [n, 1]
        log_likelihood += float(log_probs.double().sum())
        num_best += int((wide.argmax(-1) == chosen).sum())
    return Drift(log_likelihood, num_best, num)


def drift_of_runs(model: PreTrainedModel, runs: Iterable[Run], batches: Mapping[int, Batch]) -> Drift:
    """Read all texts of a method with the target.

    Args:
        model: the target.
        runs: of one method.
        batches: by number.
    """
    total = Drift()
    for run in runs:
        for prompt_ids, new_ids in zip(batches[run.batch].rows, run.texts, strict=True):
            total += drift_of_text(model, prompt_ids, new_ids)
    return total
