"""Compares greedy outputs with plain decoding's before their speed counts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.bench.methods import OURS, Method
from hf_speculate.tools.checks.near_ties import TextDifference, classify, float64_copy

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


class _Difference(NamedTuple):
    """First difference of a row from plain decoding's."""

    row: int
    position: int
    plain_id: int
    other_id: int


class TextCheck:
    """Compares greedy outputs; at a difference the target is run again, as `check_parity` does."""

    def __init__(self, decoder: Decoder):
        self._target, self._options = decoder.target, decoder.options
        self._exact: list[PreTrainedModel | None] = []  # made at the first difference

    def __call__(
        self, method: Method, runs: Sequence[Run], plain_runs: Sequence[Run], batches: Mapping[int, Batch]
    ) -> Compared:
        """Compare the calls of a greedy, lossless method with plain decoding's of the same batches."""
        plain = {(run.batch, run.repeat): run for run in plain_runs}
        counts = {"equal": 0, "tie": 0, "bug": 0}
        for run in runs:
            differences, num_cut = _differences(plain[run.batch, run.repeat].texts, run.texts)
            counts["equal"] += len(run.texts) - len(differences) - num_cut
            counts["bug"] += num_cut
            for verdict in self._verdicts(method, run, differences, batches[run.batch]):
                counts[verdict] += 1
        return Compared(counts["equal"], counts["tie"], counts["bug"])

    def _verdicts(self, method: Method, run: Run, differences: Sequence[_Difference], batch: Batch) -> list[str]:
        """Either "tie" or "bug" for each difference."""
        if not differences:
            return []
        if not self._exact:
            self._exact.append(float64_copy(self._target))
        recorder = _Gaps(differences)
        options = self._options | {"max_new_tokens": max(one.position for one in differences) + 1, "do_sample": False}
        self._target.generate(  # type: ignore[operator]
            **batch.inputs, **options, logits_processor=LogitsProcessorList([recorder])
        )
        rows, verdicts = batch.rows, []
        for one in differences:
            before = torch.tensor(run.texts[one.row][: one.position], dtype=torch.int64, device=batch.input_ids.device)
            difference = TextDifference(
                torch.cat([rows[one.row], before]),
                one.plain_id,
                one.other_id,
                recorder.gaps[one],
                _block_len(method, run),
                len(rows) if method.engine == OURS else 1,
            )
            verdicts.append(classify(self._target, self._exact[0], difference).verdict)
        return verdicts


class _Gaps(LogitsProcessor):
    """Records the score of plain decoding's token minus the other's at each difference."""

    def __init__(self, differences: Sequence[_Difference]):
        self._differences = differences
        self._step = 0
        self.gaps: dict[_Difference, float] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for one in self._differences:
            if one.position == self._step:
                self.gaps[one] = float(scores[one.row, one.plain_id].double() - scores[one.row, one.other_id].double())
        self._step += 1
        return scores  # [B, V]


def _differences(plain: Sequence[list[int]], others: Sequence[list[int]]) -> tuple[list[_Difference], int]:
    """First differences, and the number of rows that differ in their length alone."""
    differences, num_cut = [], 0
    for row, (theirs, ours) in enumerate(zip(plain, others, strict=True)):
        pairs = enumerate(zip(theirs, ours, strict=False))
        first = next((_Difference(row, at, one, other) for at, (one, other) in pairs if one != other), None)
        if first is not None:
            differences.append(first)
        elif len(theirs) != len(ours):
            num_cut += 1
    return differences, num_cut


def _block_len(method: Method, run: Run) -> int:
    """Tokens that one verification scored."""
    if run.stats is not None:
        return max(run.stats.rounds_by_draft_len, default=0) + 1
    return (method.num_assistant_tokens or _TRANSFORMERS_TOKENS) + 1
