"""Drift of lossy outputs from the target's, and the quality rules that bound it."""

import math
import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import real
from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.bench.methods import split
from hf_speculate.tools.checks.near_ties import keep_logits

_EXACT = "exact"
_AGREEMENT = real("in [0, 1]", lambda share: 0 <= share <= 1, "write agreement=0.95, for example")
_DROP = real("at least 0 nats per token and finite", lambda drop: 0 <= drop < math.inf, "write drop=0.05, for example")
_NUM_WIDE = 64  # rows of logits that are held in float32 at once
_NAMES = {"agreement": "agreement", "agreement>": "agreement", "drop": "drop", "drop<": "drop"}  # by what precedes "="


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
def drift_of_runs(model: PreTrainedModel, runs: Iterable[Run]) -> Drift:
    """Drift of all outputs, each of which has at least one token."""
    total = Drift()
    for prompt_ids, new_ids in (pair for run in runs for pair in zip(run.batch.rows, run.texts, strict=True)):
        text, num = torch.tensor(new_ids, device=prompt_ids.device), len(new_ids)  # [N]
        ids = torch.cat([prompt_ids, text])[None]  # [1, T+N]
        logits = model(input_ids=ids, use_cache=False, **keep_logits(model, num + 1)).logits[0, -num - 1 : -1]  # [N, V]
        for rows, chosen in zip(logits.split(_NUM_WIDE), text.to(logits.device).split(_NUM_WIDE), strict=True):
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
            log_likelihood = -float(cross_entropy(wide, chosen, reduction="none").double().sum())
            total += Drift(log_likelihood, int((wide.argmax(-1) == chosen).sum()), len(chosen))
    return total


class Rule(NamedTuple):
    """Bounds for lossy methods; without bounds only lossless ones are allowed."""

    min_agreement: float | None = None  # smallest share of tokens that greedy decoding would have chosen, in [0, 1]
    # largest drop of the log-likelihood below plain decoding's in nats per token; when sampling also the largest rise
    # above it
    max_drop: float | None = None

    @property
    def is_exact(self) -> bool:
        return self.min_agreement is None and self.max_drop is None

    def complaint(self, drift: Drift, plain: Drift, do_sample: bool) -> str:
        """The broken bound, or an empty string; `plain` is plain decoding's drift on the same prompts."""
        drop = drop_of(drift, plain, do_sample)
        if self.min_agreement is not None and drift.agreement < self.min_agreement:
            return f"agreement {drift.agreement:.3f} < {self.min_agreement:g}"
        if self.max_drop is not None and not drop <= self.max_drop:  # NaN and infinity are not allowed
            return f"drop {drop:.3f} > {self.max_drop:g}"
        return ""

    def __str__(self) -> str:
        bounds = [("agreement >= ", self.min_agreement), ("drop <= ", self.max_drop)]
        return ", ".join(f"{name}{value:g}" for name, value in bounds if value is not None) or _EXACT


def drop_of(drift: Drift, plain: Drift, do_sample: bool) -> float:
    """Drop of the log-likelihood below plain decoding's in nats per token; when sampling its absolute value."""
    drop = plain.log_likelihood_per_token - drift.log_likelihood_per_token
    return abs(drop) if do_sample else drop


def parse_rule(text: str) -> Rule:
    """Parse `exact`, or bounds such as `agreement>=0.95` and `drop<=0.05` separated by commas.

    `=` means the same and needs no quotes in a shell.
    """
    words = split(text)
    if words == [_EXACT]:
        return Rule()
    bounds: dict[str, float] = {}
    for word in words or [text]:
        name, _, bound = word.replace(" ", "").partition("=")
        try:
            bounds[_NAMES[name]] = float(bound)
        except (KeyError, ValueError):
            raise ConfigError(
                f"--quality must be exact, or bounds such as agreement=0.95, got {word!r}; quote > and <, or write ="
            ) from None
    for name, check in (("agreement", _AGREEMENT), ("drop", _DROP)):
        if name in bounds:
            check(name, bounds[name])
    return Rule(bounds.get("agreement"), bounds.get("drop"))
