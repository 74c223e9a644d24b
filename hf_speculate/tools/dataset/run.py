"""Decodes what is left of a data set, batch by batch."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.files import append_results, spans_of
from hf_speculate.tools.dataset.ranks import Ranks
from hf_speculate.tools.dataset.row_decoder import Decoded, RowDecoder
from hf_speculate.tools.dataset.rows import Row
from hf_speculate.tools.dataset.run_folder import IF_CHANGED, RunFolder

Engine = Callable[[Sequence[Sequence[Row]], int, Callable[[Sequence[Row]], None]], Iterator[Decoded]]


@dataclass(frozen=True)
class DatasetReport:
    """How far a data set is.

    Attributes:
        path: of the output.
        num_rows: rows to decode; while a run of several ranks goes on, this rank's.
        num_resumed: those that were finished before this run.
        num_finished: those that are finished now.
        num_tokens: new tokens of this run.
        num_drafted: tokens drafted in it.
        num_accepted: drafted tokens that were accepted.
        seconds: from the first batch on, loading included.
    """

    path: Path
    num_rows: int
    num_resumed: int = 0
    num_finished: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, in [0, 1]; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second; 0 where there are none."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def results(self) -> Iterator[dict[str, Any]]:
        """The lines of the output, in its order."""
        with self.path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


@dataclass(frozen=True)
class Job:
    """A data set that is to be decoded.

    Args:
        rows: in the order of the prompts.
        output: where results go, one line each.
        settings: what texts follow from besides, as JSON takes it; a run goes on only with the same.
        seed: of all rows; None: drawn once and kept for later runs.
        is_ordered: whether the finished output is brought into the order of the prompts.
        if_changed: "refuse", "keep" or "restart", of what is finished where prompts or settings have changed.

    Raises:
        ConfigError: `if_changed` is none of them.
    """

    rows: Sequence[Row]
    output: Path
    settings: Mapping[str, Any]
    seed: int | None = None
    is_ordered: bool = False
    if_changed: str = "refuse"

    def __post_init__(self) -> None:
        if self.if_changed not in IF_CHANGED:
            raise ConfigError(
                f"if_changed must be one of {', '.join(IF_CHANGED)}, got {self.if_changed!r}; leave it out to refuse"
            )


def in_this_process(make_decoder: Callable[[], RowDecoder]) -> Engine:
    """Decodes one batch after the other.

    Args:
        make_decoder: loads the models; called once, before the first batch.
    """

    def decode(
        batches: Sequence[Sequence[Row]], seed: int, on_begin: Callable[[Sequence[Row]], None]
    ) -> Iterator[Decoded]:
        decoder = make_decoder()
        for batch in batches:
            on_begin(batch)
            yield decoder.decode(batch, seed)

    return decode


def run(
    job: Job,
    make_batches: Callable[[Sequence[Row]], Sequence[Sequence[Row]]],
    engine: Engine,
    ranks: Ranks,
    on_batch: Callable[[DatasetReport], None] | None = None,
) -> DatasetReport:
    """Decode the rows that are not finished.

    Each batch is on the disk before the next begins: a process that is killed loses the batch that runs.

    Args:
        job: the data set.
        make_batches: plans the batches of the rows that are left; all ranks must plan the same.
        engine: yields what became of the batches, in any order.
        ranks: take the batches in turn, each into a file of its own, which the main one moves to the output.
        on_batch: is called after every batch with how far this rank is.

    Returns:
        How it went on all ranks.

    Raises:
        ConfigError: as `RunFolder.begin`, or rows are missing at the end.
    """
    folder = RunFolder(job.output)
    with folder.locked() if ranks.is_main else nullcontext():
        if ranks.is_main:
            folder.begin(job.rows, job.settings, job.seed, job.if_changed)
        ranks.wait()
        seed, finished = folder.seed(), set(spans_of(job.output))
        left = [row for row in job.rows if row.key not in finished]
        own = list(make_batches(left))[ranks.index :: ranks.num] if left else []
        report = _decode(job, folder, own, seed, engine, ranks, on_batch)
        num_tokens, num_drafted, num_accepted = ranks.sums([report.num_tokens, report.num_drafted, report.num_accepted])
        ranks.wait()
        if ranks.is_main:
            _complete(job, folder)
        ranks.wait()
    return DatasetReport(
        job.output,
        len(job.rows),
        num_resumed=len(finished),
        num_finished=len(job.rows),
        num_tokens=num_tokens,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        seconds=report.seconds,
    )


def _decode(
    job: Job,
    folder: RunFolder,
    batches: Sequence[Sequence[Row]],
    seed: int,
    engine: Engine,
    ranks: Ranks,
    on_batch: Callable[[DatasetReport], None] | None,
) -> DatasetReport:
    """Decode this rank's batches."""
    report = DatasetReport(job.output, sum(map(len, batches)))
    if not batches:
        return report
    path = job.output if ranks.num == 1 else folder.part(ranks.index)
    begin = time.perf_counter()

    def note(batch: Sequence[Row]) -> None:
        folder.note_begun(ranks.index, [row.key for row in batch])

    for decoded in engine(batches, seed, note):
        append_results(path, decoded.results)
        report = replace(
            report,
            num_finished=report.num_finished + len(decoded.results),
            num_tokens=report.num_tokens + decoded.num_tokens,
            num_drafted=report.num_drafted + decoded.num_drafted,
            num_accepted=report.num_accepted + decoded.num_accepted,
            seconds=time.perf_counter() - begin,
        )
        if on_batch is not None:
            on_batch(report)
    return report


def _complete(job: Job, folder: RunFolder) -> None:
    """Bring everything together once all ranks have ended."""
    folder.gather_parts()
    spans = spans_of(job.output)
    missing = [row.key for row in job.rows if row.key not in spans]
    if missing:
        raise ConfigError(
            f"every prompt must have a result at the end, got none for {len(missing)} ({', '.join(missing[:3])}); all "
            "ranks must share the folder of the output: choose one on a shared file system"
        )
    if job.is_ordered:
        folder.put_in_order(job.rows)
