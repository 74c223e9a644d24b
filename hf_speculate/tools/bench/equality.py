"""Compares greedy texts with plain decoding's, before their speed counts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.bench.methods import OURS, Method
from hf_speculate.tools.checks.near_ties import TextDifference, classify, float64_copy

_TRANSFORMERS_TOKENS = 20  # that its assisted generation drafts at most by default


class Compared(NamedTuple):
    """How rows compare with plain decoding's: equal, parted where rounding chose, or parted for another reason."""

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
            text += f", {self.num_ties} part at a near tie"
        return text + (f", {self.num_wrong} differ" if self.num_wrong else "")


class _Parting(NamedTuple):
    """Where a row's text leaves plain decoding's."""

    row: int
    position: int
    plain_id: int
    other_id: int


class TextCheck:
    """Compares greedy texts; where one parts, the target is run again, as `check_parity` does.

    Args:
        target: as it decoded plainly.
    """

    def __init__(self, target: PreTrainedModel):
        self._target = target
        self._exact: list[PreTrainedModel | None] = []  # made at the first difference

    def __call__(
        self, method: Method, runs: Sequence[Run], plain_runs: Sequence[Run], batches: Mapping[int, Batch]
    ) -> Compared:
        """Compare what a method wrote with what plain decoding wrote of the same batches.

        Args:
            method: greedy, and not lossy.
            runs: its calls.
            plain_runs: of plain greedy decoding, on the same batches at least.
            batches: by number.
        """
        plain = {(run.batch, run.repeat): run for run in plain_runs}
        counts = {"equal": 0, "tie": 0, "bug": 0}
        for run in runs:
            partings, num_cut = _partings(plain[run.batch, run.repeat].texts, run.texts)
            counts["equal"] += len(run.texts) - len(partings) - num_cut
            counts["bug"] += num_cut
            for verdict in self._judge(method, run, partings, batches[run.batch]):
                counts[verdict] += 1
        return Compared(counts["equal"], counts["tie"], counts["bug"])

    def _judge(self, method: Method, run: Run, partings: Sequence[_Parting], batch: Batch) -> list[str]:
        """A verdict for every parting: "tie" or "bug"."""
        if not partings:
            return []
        if not self._exact:
            self._exact.append(float64_copy(self._target))
        recorder = _Gaps(partings)
        self._target.generate(  # type: ignore[operator]
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            do_sample=False,
            max_new_tokens=max(one.position for one in partings) + 1,
            logits_processor=LogitsProcessorList([recorder]),
        )
        rows, verdicts = batch.rows, []
        for one in partings:
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
    """Notes the score of plain decoding's token over another's where texts part; changes nothing."""

    def __init__(self, partings: Sequence[_Parting]):
        self._partings = partings
        self._step = 0
        self.gaps: dict[_Parting, float] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See `LogitsProcessor`; `scores` are [B, V]."""
        for one in self._partings:
            if one.position == self._step:
                self.gaps[one] = float(scores[one.row, one.plain_id].double() - scores[one.row, one.other_id].double())
        self._step += 1
        return scores


def _partings(plain: Sequence[list[int]], others: Sequence[list[int]]) -> tuple[list[_Parting], int]:
    """Where rows part, and how many rows only end elsewhere."""
    partings, num_cut = [], 0
    for row, (theirs, ours) in enumerate(zip(plain, others, strict=True)):
        pairs = enumerate(zip(theirs, ours, strict=False))
        first = next((_Parting(row, place, one, other) for place, (one, other) in pairs if one != other), None)
        if first is not None:
            partings.append(first)
        elif len(theirs) != len(ours):
            num_cut += 1
    return partings, num_cut


def _block_len(method: Method, run: Run) -> int:
    """Tokens that a verification scored at once."""
    if run.stats is not None:
        return max(run.stats.rounds_by_draft_len, default=0) + 1
    return (method.num_assistant_tokens or _TRANSFORMERS_TOKENS) + 1
