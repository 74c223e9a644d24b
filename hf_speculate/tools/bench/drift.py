"""Drift of lossy outputs: how likely the target finds them, and how often it agrees with them."""

import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.checks.near_ties import keep_logits


class Drift(NamedTuple):
    """Sums over outputs, which `+` adds."""

    log_likelihood: float = 0.0  # under the target in nats, without temperature and other processors
    num_best: int = 0  # tokens that are the target's most likely ones after the text before them
    num_tokens: int = 0  # of the outputs

    def __add__(self, other: "Drift") -> "Drift":  # type: ignore[override]  # tuples are joined
        return Drift(*map(operator.add, self, other))

    @property
    def log_likelihood_per_token(self) -> float:
        """In nats."""
        return self.log_likelihood / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of tokens that greedy decoding would have chosen, in [0, 1]."""
        return self.num_best / self.num_tokens


@torch.no_grad()
def drift_of_text(model: PreTrainedModel, prompt_ids: Tensor, new_ids: list[int]) -> Drift:
    """Drift of one output of N >= 1 ids; the prompt [T] int64 is unpadded."""
    text = torch.tensor(new_ids, device=prompt_ids.device)  # [N]
    ids = torch.cat([prompt_ids, text])[None]  # [1, T+N]
    num = len(new_ids)
    logits = model(input_ids=ids, use_cache=False, **keep_logits(model, num + 1)).logits[0, -num - 1 : -1]  # [N, V]
    wide, text = logits.to(torch.promote_types(logits.dtype, torch.float32)), text.to(logits.device)
    log_likelihood = -float(cross_entropy(wide, text, reduction="none").double().sum())
    return Drift(log_likelihood, int((wide.argmax(-1) == text).sum()), num)


def drift_of_runs(model: PreTrainedModel, runs: Iterable[Run]) -> Drift:
    texts = (pair for run in runs for pair in zip(run.batch.rows, run.texts, strict=True))
    return sum((drift_of_text(model, *pair) for pair in texts), Drift())
