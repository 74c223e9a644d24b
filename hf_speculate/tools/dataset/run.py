"""Decodes the unfinished rows of a data set, batch by batch."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hf_speculate.tools.dataset.files import Job, append_json, ids_in
from hf_speculate.tools.dataset.ranks import Ranks
from hf_speculate.tools.dataset.row_decoder import Decoded, RowDecoder
from hf_speculate.tools.dataset.rows import Row

_COUNTS = ("num_tokens", "num_drafted", "num_accepted", "num_rounds", "num_failed")
# Decodes batches with a seed, and calls a function with rows before they are decoded.
Engine = Callable[[Sequence[Sequence[Row]], int, Callable[[Sequence[Row]], None]], Iterator[Decoded]]


@dataclass(frozen=True)
class DatasetReport:
    """Progress of a data set."""

    path: Path  #: of the output
    num_rows: int  #: rows of the data set; during a run of several ranks, this rank's unfinished rows
    num_resumed: int = 0  #: rows that were finished before this run
    num_finished: int = 0  #: rows that are finished now
    num_tokens: int = 0  #: new tokens of this run
    num_drafted: int = 0  #: drafted tokens of this run
    num_accepted: int = 0  #: accepted tokens of this run
    num_rounds: int = 0  #: rounds of this run, summed over rows
    num_failed: int = 0  #: rows of this run that ended with an error
    num_in_flight: int = 0  #: rows that are being decoded, if rows are refilled
    fallback: str = ""  #: why rows were decoded in static batches though they were to be refilled, or an empty string
    seconds: float = 0.0  #: since the first batch, loading included

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, in [0, 1]; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per row and round, the bonus token included; 0 before the first round."""
        return (self.num_accepted + self.num_rounds) / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of this run; 0 before the first batch."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def results(self) -> Iterator[dict[str, Any]]:
        """Lines of the output, in its order."""
        with self.path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def in_this_process(make_decoder: Callable[[], RowDecoder], num_refilled: int = 0) -> Engine:
    """Engine of this process, which loads the models before the first row.

    `num_refilled` rows are decoded at once, whose places are given to the next rows as they finish; 0 decodes one batch
    after another.
    """

    def decode(
        batches: Sequence[Sequence[Row]], seed: int, on_begin: Callable[[Sequence[Row]], None]
    ) -> Iterator[Decoded]:
        decoder, fallback = make_decoder(), ""
        if num_refilled:
            refilled = decoder.refilled(chain.from_iterable(batches), seed, num_refilled, on_begin)
            if not isinstance(refilled, str):
                yield from refilled
                return
            fallback = refilled
        for batch in batches:
            on_begin(batch)
            yield decoder.decode(batch, seed)._replace(fallback=fallback)

    return decode


def run(
    job: Job,
    make_batches: Callable[[Sequence[Row]], Sequence[Sequence[Row]]],
    engine: Engine,
    ranks: Ranks,
    on_batch: Callable[[DatasetReport], None] | None = None,
) -> DatasetReport:
    """Decode the rows that are not finished; the progress of all ranks.

    Results are on the disk before further rows start: a killed process loses the rows in flight.
    """
    with job.locked() if ranks.is_main else nullcontext():
        if ranks.is_main:
            job.begin()
        ranks.wait()
        seed, finished = job.begun_seed(), ids_in(job.output)
        left = [row for row in job.rows if row.key not in finished]
        batches = list(make_batches(left))[ranks.index :: ranks.num] if left else []
        num_before = len(finished) if ranks.num == 1 else 0  # a rank knows its own share only
        report = DatasetReport(job.output, num_before + sum(map(len, batches)), num_before, num_finished=num_before)
        path = job.output if ranks.num == 1 else job.part(ranks.index)
        begin = time.perf_counter()
        for decoded in engine(batches, seed, partial(job.record_begun, ranks.index)) if batches else ():
            append_json(path, decoded.results)
            report = replace(
                report,
                num_finished=report.num_finished + len(decoded.results),
                num_in_flight=decoded.num_in_flight,
                fallback=decoded.fallback,
                seconds=time.perf_counter() - begin,
                **{name: getattr(report, name) + getattr(decoded, name) for name in _COUNTS},
            )
            if on_batch is not None:
                on_batch(report)
        sums: dict[str, Any] = dict(zip(_COUNTS, ranks.sums([getattr(report, name) for name in _COUNTS]), strict=True))
        ranks.wait()
        if ranks.is_main:
            job.complete()
        ranks.wait()
    num = len(job.rows)
    return replace(report, num_rows=num, num_resumed=len(finished), num_finished=num, num_in_flight=0, **sums)
