"""Decode the unfinished rows of a data set, split among the ranks of a launcher."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.field_checks import integer
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.tools.dataset.files import Job, append_json, ids_in
from hf_speculate.tools.dataset.ranks import Ranks, check_model, find_ranks
from hf_speculate.tools.dataset.row_decoder import Decoded, OnBegin, RowDecoder
from hf_speculate.tools.dataset.rows import Row, batches_of, check_settings, read_rows

_COUNTS = ("num_tokens", "num_drafted", "num_accepted", "num_rounds", "num_failed")
# (batches, seed, on_begin)
Engine = Callable[[Sequence[Sequence[Row]], int, OnBegin], Iterator[Decoded]]


@dataclass(frozen=True)
class DatasetReport:
    """The progress of decoding a data set."""

    path: Path  #: file of the results
    #: number of rows in the data set; during a run with several ranks, this rank's unfinished rows
    num_rows: int
    num_resumed: int = 0  #: rows finished before this run
    num_finished: int = 0  #: rows finished so far
    num_tokens: int = 0  #: new tokens in this run
    num_drafted: int = 0  #: drafted tokens in this run
    num_accepted: int = 0  #: accepted tokens in this run
    num_rounds: int = 0  #: rounds in this run, summed over rows
    num_failed: int = 0  #: rows in this run with an error
    num_in_flight: int = 0  #: rows in progress, if rows are refilled
    #: why batches were static although refilling was requested; empty otherwise
    fallback: str = ""
    seconds: float = 0.0  #: seconds since the first batch, including loading

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, in [0, 1]; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per row and round, including the bonus token; 0 before the first round."""
        return (self.num_accepted + self.num_rounds) / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second in this run; 0 before the first batch."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield the results in the order of the output."""
        with self.path.open(encoding="utf-8-sig") as file:
            yield from map(json.loads, file)


def decode_job(
    job: Job,
    make_batches: Callable[[Sequence[Row]], Sequence[Sequence[Row]]],
    engine: Engine,
    ranks: Ranks,
    on_batch: Callable[[DatasetReport], None] | None = None,
) -> DatasetReport:
    """Decode the unfinished rows of a job.

    Args:
        job: rows and files.
        make_batches: groups unfinished rows into batches.
        engine: decodes batches, given a seed and a callback for rows that are started.
        ranks: this process and its launcher.
        on_batch: called with this rank's progress after each result of the engine.

    Returns:
        The progress of all ranks.
    """
    with job.locked() if ranks.is_main else nullcontext():
        if ranks.is_main:
            job.begin()
        ranks.wait()
        seed, finished = job.begun_seed(), ids_in(job.output)
        unfinished = [row for row in job.rows if row.key not in finished]
        batches = list(make_batches(unfinished))[ranks.index :: ranks.num] if unfinished else []
        num_before = len(finished) if ranks.num == 1 else 0  # each rank reports only its own rows
        report = DatasetReport(
            job.output, num_before + sum(map(len, batches)), num_before, num_finished=num_before
        )
        path = job.output if ranks.num == 1 else job.part(ranks.index)
        begin = time.perf_counter()
        for decoded in (
            engine(batches, seed, partial(job.record_begun, ranks.index)) if batches else ()
        ):
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
        sums: dict[str, Any] = dict(
            zip(_COUNTS, ranks.sums([getattr(report, name) for name in _COUNTS]), strict=True)
        )
        ranks.wait()
        if ranks.is_main:
            job.complete()
        ranks.wait()
    num_rows = len(job.rows)
    return replace(
        report,
        num_rows=num_rows,
        num_resumed=len(finished),
        num_finished=num_rows,
        num_in_flight=0,
        **sums,
    )


def decode_dataset(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Path | Iterable[str | Mapping[str, Any]],
    output: str | Path,
    *,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    static_batches: bool = False,
    seed: int | None = None,
    is_chat: bool = False,
    is_ordered: bool = False,
    if_changed: str = "refuse",
    on_batch: Callable[[DatasetReport], None] | None = None,
    **arguments: Any,
) -> DatasetReport:
    """Decode prompts into a file with one JSON object per line; an interrupted run resumes.

    A finished row is refilled with the next prompt, longest prompts first. Each result is on disk
    before further rows start, so a killed process only loses the rows in flight. A line has "id",
    "text" (the new text), "num_tokens", "finish_reason" ("stop", "length" or "error") and the
    prompt's extra fields. An error only ends its own row, and the row's line has an "error". The
    folder `<output>.run` holds the state for a later run.

    Fields of a prompt named "max_new_tokens", "stop_strings", "seed", "temperature", "top_k",
    "top_p", "min_p", "typical_p", "repetition_penalty" or "no_repeat_ngram_size" override the
    arguments for its row.

    If rows cannot be refilled, for example with a custom drafter, static batches of prompts of
    similar length are decoded. If `accelerate launch` or `torchrun` started several processes, each
    decodes its share with its own model. All processes must call this function with the same
    arguments and share the output folder.

    Args:
        model: the target, enabled or not, with or without a PEFT wrapper.
        tokenizer: tokenizer of the target; it is not modified.
        prompts: a file with one JSON value per line, or an iterable of such values: strings, or
            objects with "prompt", "text", "messages" or "turns" (the first entry is used), and
            optionally "id" (default: the line's number).
        output: file for the results; created if it does not exist, and otherwise appended to.
        max_new_tokens: maximum number of new tokens per row, >= 1.
        batch_size: rows decoded at once, >= 1.
        static_batches: whether to decode one batch after another, each until its slowest row ends.
        seed: seed of the data set for sampling; each row's seed is derived from it and the row's
            id. None draws a seed and stores it for later runs.
        is_chat: whether to apply the chat template to texts as well as to messages.
        is_ordered: whether to sort the finished output in the order of the prompts.
        if_changed: what to do with finished rows if prompts or settings differ from the earlier
            run: "refuse", "keep" or "restart".
        on_batch: called with this process's progress after each batch or finished row.
        **arguments: arguments of `generate()`, such as `assistant_model`.

    Returns:
        The progress of all processes; `.results()` reads the output.

    Raises:
        ConfigError: a prompt is invalid, ids repeat, the output belongs to another run, or a
            setting is invalid.
        UnsupportedModelError: the model is distributed over several processes.
    """
    model, rows = unwrapped(model), read_rows(prompts)
    integer("at least 1", 1, math.inf, "leave it out for 8")("batch_size", batch_size)
    decoder = RowDecoder(model, tokenizer, {"max_new_tokens": max_new_tokens, **arguments}, is_chat)
    check_settings(rows, decoder.samples, "pass do_sample=True")
    ranks = find_ranks(is_cpu=model.device.type == "cpu")
    check_model(model, ranks)
    settings = {"target": _described(model), "is_chat": is_chat, **_described(decoder.arguments)}
    job = Job(rows, Path(output), settings, seed, is_ordered, if_changed)
    make_batches = partial(batches_of, batch_size=batch_size, tokenizer=tokenizer, is_chat=is_chat)
    engine = partial(decoder.decode_all, num_refilled=0 if static_batches else batch_size)
    return decode_job(job, make_batches, engine, ranks, on_batch)


def _described(value: Any) -> Any:
    """Convert an argument to a JSON value for the manifest."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _described(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_described(inner) for inner in value]
    if isinstance(value, GenerationConfig):
        return value.to_diff_dict()
    return getattr(getattr(value, "config", None), "name_or_path", None) or type(value).__name__
