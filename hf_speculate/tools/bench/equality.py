"""Compares greedy outputs with plain decoding's before their speed counts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.bench.methods import OURS, Method
from hf_speculate.tools.checks.near_ties import GapRecorder, TextDifference, classify, float64_copy

_TRANSFORMERS_TOKENS = 20  # default of its assisted generation


class Compared(NamedTuple):
    """Numbers of rows that equal plain decoding's, differ at a near-tie, or differ for another reason."""

    num_equal: int = 0
    num_ties: int = 0
    num_wrong: int = 0

    @property
    def ok(self) -> bool:
        """Whether rounding explains every difference."""
        return self.num_wrong == 0

    def __str__(self) -> str:
        text = f"{self.num_equal} of {sum(self)} rows equal"
        if self.num_ties:
            text += f", {self.num_ties} differ at a near-tie"
        return text + (f", {self.num_wrong} differ" if self.num_wrong else "")


class TextCheck:
    """Compares greedy outputs; at a difference the target is run again, as `check_parity` does."""

    def __init__(self, decoder: Decoder):
        self._target, self._options = decoder.target, decoder.options

    def __call__(self, method: Method, runs: Sequence[Run], plain_runs: Sequence[Run]) -> Compared:
        """Compare the calls of a greedy, lossless method with plain decoding's of the same batches."""
        plain = {run.key: run.texts for run in plain_runs}
        verdicts: Counter[str] = Counter()
        for run in runs:
            verdicts.update(self._verdicts(method, run, plain[run.key]))
        return Compared(verdicts["equal"], verdicts["tie"], verdicts["bug"])

    @cached_property
    def _exact(self) -> PreTrainedModel | None:
        return float64_copy(self._target)

    def _verdicts(self, method: Method, run: Run, plain: Sequence[list[int]]) -> Iterator[str]:
        """Yield "equal", "tie" or "bug" for each row."""
        num_drafted = method.num_assistant_tokens or _TRANSFORMERS_TOKENS
        if run.stats is not None:
            num_drafted = max(run.stats.rounds_by_draft_len, default=0)
        places = [_first_difference(*pair) for pair in zip(plain, run.texts, strict=True)]
        last = max((at for at in places if at is not None), default=None)
        gaps = [] if last is None else self._gaps(run, last + 1)
        for row, (ids, texts, at) in enumerate(zip(plain, run.texts, places, strict=True)):
            if at is None:
                yield "equal" if len(ids) == len(texts) else "bug"
                continue
            before = torch.tensor(texts[:at], dtype=torch.int64, device=run.batch.input_ids.device)
            difference = TextDifference(
                torch.cat([run.batch.rows[row], before]),
                ids[at],
                texts[at],
                float(gaps[at][row]),
                num_drafted + 1,
                len(plain) if method.engine == OURS else 1,
            )
            yield classify(self._target, self._exact, difference).verdict

    def _gaps(self, run: Run, num_steps: int) -> list[Tensor]:
        """Gaps [B] of plain decoding's tokens to those of a run, for each step."""
        ids = [text[:num_steps] + [0] * (num_steps - len(text)) for text in run.texts]
        recorder = GapRecorder(torch.cat([run.batch.input_ids, run.batch.input_ids.new_tensor(ids)], 1))
        options = self._options | {"max_new_tokens": num_steps, "do_sample": False}
        processors = LogitsProcessorList([recorder])
        self._target.generate(**run.batch.inputs, **options, logits_processor=processors)  # type: ignore[operator]
        return recorder.gaps


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position at which two texts differ; None if one begins with the other."""
    return next((at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), None)
