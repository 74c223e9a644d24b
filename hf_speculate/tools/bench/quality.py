"""Check the outputs of methods before comparing their speed.

Greedy outputs of lossless methods are compared with those of plain decoding. Outputs of lossy
methods drift from the target's outputs; quality rules bound the drift.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LogitsProcessorList, PreTrainedModel

from hf_speculate.errors import ConfigError, counted
from hf_speculate.field_checks import real
from hf_speculate.generation.defaults import plain as without_drafts
from hf_speculate.models.recurrent_layers import reads_prompts_in_chunks
from hf_speculate.tools.bench.decoding import Decoder, Run
from hf_speculate.tools.bench.methods import OURS, Method, split
from hf_speculate.tools.checks.near_ties import (
    DifferenceCheck,
    GapRecorder,
    ParityRow,
    keep_logits,
    logits_after_text,
)

_TRANSFORMERS_TOKENS = 20  # default draft length of transformers' assisted generation
_NUM_WIDE = 64  # number of rows of logits converted to float32 at once
_EXACT = "exact"
_BOUNDS = {
    "agreement": real(
        "in [0, 1]", lambda share: 0 <= share <= 1, "write agreement=0.95, for example"
    ),
    "drop": real(
        "at least 0 nats per token and finite",
        lambda drop: 0 <= drop < math.inf,
        "write drop=0.05, for example",
    ),
}


class Compared(NamedTuple):
    """Numbers of rows by the result of their comparison with plain decoding."""

    num_equal: int = 0
    num_ties: int = 0  # rows with a near-tie at the first difference
    num_wrong: int = 0  # other rows that differ

    def __str__(self) -> str:
        text = f"{self.num_equal} of {counted(sum(self), 'row')} equal"
        if self.num_ties:
            text += f", {self.num_ties} differ at a near-tie"
        return text + (f", {self.num_wrong} differ" if self.num_wrong else "")


class TextCheck:
    """Comparison of greedy outputs with those of plain decoding.

    At a difference, it runs the target again, like `check_parity`.
    """

    def __init__(self, decoder: Decoder):
        self._target, self._options = decoder.target, decoder.options(do_sample=False)
        self._check = DifferenceCheck(decoder.target)

    def __call__(self, method: Method, runs: Sequence[Run], plain_runs: Sequence[Run]) -> Compared:
        """Compare the runs of a greedy, lossless method with plain runs on the same batches."""
        plain = {run.key: run.texts for run in plain_runs}
        verdicts: Counter[str] = Counter()
        for run in runs:
            verdicts.update(row.verdict for row in self.rows(method, run, plain[run.key]))
        return Compared(verdicts["equal"], verdicts["tie"], verdicts["bug"])

    def rows(self, method: Method, run: Run, plain: Sequence[list[int]]) -> Iterator[ParityRow]:
        """Compare each row of a call with the texts that plain decoding gives for the batch."""
        num_drafted = method.num_assistant_tokens or _TRANSFORMERS_TOKENS
        if run.stats is not None:
            num_drafted = max(run.stats.rounds_by_draft_len, default=0)
        if not reads_prompts_in_chunks(self._target):
            num_drafted = 0  # a forward over several tokens would lose states of the target
        num_rows = len(plain) if method.engine == OURS else 1
        positions = [_first_difference(*pair) for pair in zip(plain, run.texts, strict=True)]
        last = max((position for position in positions if position is not None), default=None)
        gaps = [] if last is None else self._gaps(run, last + 1)
        for row, (ids, others, position) in enumerate(
            zip(plain, run.texts, positions, strict=True)
        ):
            if position is None:
                reason = (
                    f"a text ends after {len(others)} tokens, plain decoding's after {len(ids)}"
                )
                yield (
                    ParityRow()
                    if len(ids) == len(others)
                    else ParityRow(verdict="bug", reason=reason)
                )
                continue
            prompt = run.batch.rows[row]
            text = torch.cat([prompt, prompt.new_tensor(others[:position])])
            logits_of = partial(
                logits_after_text, token_ids=text, block_len=num_drafted + 1, num_rows=num_rows
            )
            yield self._check(
                (ids[position], others[position]), float(gaps[position][row]), position, logits_of
            )

    def _gaps(self, run: Run, num_steps: int) -> list[Tensor]:
        """Decode without drafts; return each step's score gaps [B] float64 to the run's tokens."""
        ids = [text[:num_steps] + [0] * (num_steps - len(text)) for text in run.texts]
        recorder = GapRecorder(
            torch.cat([run.batch.input_ids, run.batch.input_ids.new_tensor(ids)], 1)
        )
        options = self._options | {
            "max_new_tokens": num_steps,
            "logits_processor": LogitsProcessorList([recorder]),
        }
        with without_drafts(self._target):
            self._target.generate(**run.batch.inputs, **options)  # type: ignore[operator]
        return recorder.gaps


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Find the first position where tokens differ; None if one text is a prefix of the other."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next(
        (position for position, (token_id, other_id) in pairs if token_id != other_id), None
    )


class Drift(NamedTuple):
    """The drift of outputs from what the target would choose.

    The fields are sums over tokens; `+` adds them.
    """

    # log-likelihood under the target in nats, without temperature and other processors
    log_likelihood: float = 0.0
    num_best: int = 0  # number of tokens equal to the target's greedy choice
    num_tokens: int = 0  # number of tokens in the outputs

    # `+` would concatenate tuples.
    def __add__(self, other: "Drift") -> "Drift":  # type: ignore[override]
        return Drift(*map(operator.add, self, other))

    @property
    def log_likelihood_per_token(self) -> float:
        return self.log_likelihood / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of tokens equal to the target's greedy choice, in [0, 1]."""
        return self.num_best / self.num_tokens


@torch.no_grad()
def drift_of_runs(model: PreTrainedModel, runs: Iterable[Run]) -> Drift:
    """Measure the drift of all outputs, each of which has at least one token."""
    total = Drift()
    for prompt_ids, new_ids in (
        pair for run in runs for pair in zip(run.batch.rows, run.texts, strict=True)
    ):
        text, num_new = prompt_ids.new_tensor(new_ids), len(new_ids)  # [N]
        ids = torch.cat([prompt_ids, text])[None]  # [1, T+N]
        output = model(input_ids=ids, use_cache=False, **keep_logits(model, num_new + 1))
        logits = output.logits[0, -num_new - 1 : -1]  # [N, V]
        for rows, chosen in zip(
            logits.split(_NUM_WIDE), text.to(logits.device).split(_NUM_WIDE), strict=True
        ):
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
            log_likelihood = -float(cross_entropy(wide, chosen, reduction="none").double().sum())
            total += Drift(log_likelihood, int((wide.argmax(-1) == chosen).sum()), len(chosen))
    return total


class Rule(NamedTuple):
    """Bounds on the drift of lossy methods.

    Without bounds, only lossless methods are allowed.
    """

    min_agreement: float | None = None  # smallest `Drift.agreement`, in [0, 1]
    # largest drop of the log-likelihood below that of plain decoding, in nats per token; when
    # sampling, also the largest rise above it
    max_drop: float | None = None

    @property
    def is_exact(self) -> bool:
        return self.min_agreement is None and self.max_drop is None

    def complaint(self, drift: Drift, plain: Drift, do_sample: bool) -> str:
        """Return a description of the violated bound; empty if there is none.

        Args:
            drift: drift of a lossy method.
            plain: drift of plain decoding on the same prompts.
            do_sample: whether tokens were sampled.
        """
        drop = drop_of(drift, plain, do_sample)
        if self.min_agreement is not None and drift.agreement < self.min_agreement:
            return f"agreement {drift.agreement:.3f} < {self.min_agreement:g}"
        if self.max_drop is not None and not drop <= self.max_drop:  # NaN also violates the bound
            return f"drop {drop:.3f} > {self.max_drop:g}"
        return ""

    def __str__(self) -> str:
        bounds = [("agreement >= ", self.min_agreement), ("drop <= ", self.max_drop)]
        return (
            ", ".join(f"{name}{value:g}" for name, value in bounds if value is not None) or _EXACT
        )


def drop_of(drift: Drift, plain: Drift, do_sample: bool) -> float:
    """Return how far the log-likelihood drops below that of plain decoding, in nats per token.

    When sampling, return the absolute value.
    """
    drop = plain.log_likelihood_per_token - drift.log_likelihood_per_token
    return abs(drop) if do_sample else drop


def parse_rule(text: str) -> Rule:
    """Parse `exact`, or bounds separated by commas: `agreement>=0.95`, `drop<=0.05`.

    `=` is also accepted, because it needs no quotes in a shell.
    """
    words = split(text)
    if words == [_EXACT]:
        return Rule()
    bounds: dict[str, float] = {}
    for word in words or [text]:
        name, _, bound = word.replace(" ", "").partition("=")
        name = {"agreement>": "agreement", "drop<": "drop"}.get(name, name)
        try:
            check, bounds[name] = _BOUNDS[name], float(bound)
        except (KeyError, ValueError):
            raise ConfigError(
                f"--quality must be exact, or bounds such as agreement=0.95, got {word!r}; quote > "
                "and <, or write ="
            ) from None
        check(name, bounds[name])
    return Rule(bounds.get("agreement"), bounds.get("drop"))
