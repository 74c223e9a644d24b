"""Continuous batching: replace finished rows with the next prompts from a source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.no_drafts import CONTINUOUS
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.errors import BadLogitsError, SpeculateError, UnsupportedGenerationError
from hf_speculate.generation.generate import prepare
from hf_speculate.models.attention_names import folded_attention_for
from hf_speculate.models.language_model import device_of
from hf_speculate.models.recurrent_layers import reads_prompts_in_chunks
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.refill.reading import Reading, RowsObserver
from hf_speculate.options.refill.row_prompts import (
    RowPrompt,
    RowResult,
    RowSource,
    alike,
    left_padded,
)
from hf_speculate.options.refill.running_batch import FinishedRow, RunningBatch, join_obstacle
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import StageSeconds

# number of prompt tokens, over all rows, to read between two rounds of the running rows
PREFILL_CHUNK_TOKENS = 512


@dataclass
class ContinuousDecoder:
    """Decoder for continuous batching.

    It decodes prompts from a source and refills finished rows. With greedy decoding, a row gets the
    same tokens as its prompt would get on its own. With a fixed draft length, this also holds for
    seeded sampling. If a row fails, only this row ends, and its result holds the error. Rows with
    another verifier (such as greedy rows among sampled rows) or another draft length run in a
    separate batch. The batches take turns, one round each.
    """

    model: PreTrainedModel  # the target, enabled or not
    num_rows: int  # rows decoded at once, >= 1
    # arguments of `generate()` for all rows, such as `assistant_model`
    arguments: Mapping[str, Any]
    pad_token_id: int = 0  # id that pads prompts read together
    # statistics of all rows; updated in place
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    # called with prompts before their prefill
    on_begin: Callable[[Sequence[RowPrompt]], object] | None = None
    # Called after each round with the prompt and all new tokens of each unfinished row; returning
    # False cancels the row. After an error in a batch, its rows are decoded again one by one to
    # find the failing row, and their tokens start over.
    on_tokens: Callable[[RowPrompt, Sequence[int]], bool] | None = None
    # whether even invalid arguments and out-of-memory errors end only the row, not the run
    ends_rows: bool = False

    def __post_init__(self) -> None:
        self.model = unwrapped(self.model)
        self._clock = StageClock()
        self._readings: list[Reading] = []  # in order of arrival; short prompts may overtake
        # whether the oldest reading has read a chunk since others overtook it
        self._may_overtake = False
        # by sampling, verifier, draft length and source
        self._running: dict[tuple[Any, ...], RunningBatch] = {}
        self._prompts: dict[int, RowPrompt] = {}  # prompts of unfinished rows
        self._observer = RowsObserver(self._prompts)
        self._num_begun = 0
        self._sources: dict[int, DraftSource] = {}  # draft source of each row, by row id
        self._folded: list[PreTrainedModel] = []  # models whose configs name our attention
        self._names = ExitStack()  # restores these names

    @property
    def num_live(self) -> int:
        return len(self._prompts)

    def obstacle(self, prompt: RowPrompt) -> str:
        """Return why rows like this one cannot be batched continuously; empty if they can."""
        return join_obstacle(self._prepare([prompt]))

    def decode(self, source: RowSource) -> Iterator[list[RowResult]]:
        """Decode until no rows are left and the source is empty; yield each round's results."""
        with ExitStack() as self._names:
            self._folded = []
            while True:
                finished = self._admit(source)
                if not (self._readings or self._running or finished):
                    return
                finished += self._read()
                finished += self._step()
                if finished:
                    yield finished

    def _step(self) -> list[RowResult]:
        results: list[RowResult] = []
        for batch_key, running in list(self._running.items()):
            try:
                with torch.no_grad(), self._clock:
                    finished = running.decode_round()
            except Exception as error:
                if not self._ends_a_row(error):
                    raise
                del self._running[batch_key]
                results += self._isolate(error)
                continue
            if self.on_tokens is not None:
                ids, prompts = running.row_ids, self._prompts
                finished += running.cancel(
                    [
                        row_id
                        for row_id in ids
                        if not self.on_tokens(prompts[row_id], running.new_ids(row_id))
                    ]
                )
            if not running.row_ids:
                del self._running[batch_key]
            results += [self._result(row) for row in finished]
        return results

    def _admit(self, source: RowSource) -> list[RowResult]:
        """Begin to read the next prompts into free rows; return failed rows."""
        waiting: list[RowPrompt] = []
        while (
            len(self._prompts) + len(waiting) < self.num_rows and (prompt := source()) is not None
        ):
            waiting.append(prompt)
        if waiting and self.on_begin is not None:
            self.on_begin(waiting)
        results: list[RowResult] = []
        for group in alike(waiting):
            for prompts in (
                [group] if self._can_be_padded(group[0]) else [[prompt] for prompt in group]
            ):
                results += self._begin(prompts)
        return results

    def _can_be_padded(self, prompt: RowPrompt) -> bool:
        """Return whether prompts may be padded; padding would shift the call's own chunks."""
        arguments = {**self.arguments, **prompt.arguments}
        config = arguments.get("generation_config") or self.model.generation_config
        chunk_size = arguments.get("prefill_chunk_size") or config.prefill_chunk_size
        return chunk_size is None or reads_prompts_in_chunks(self.model)

    def _begin(self, prompts: Sequence[RowPrompt]) -> list[RowResult]:
        """Begin to read prompts together; return failed rows."""
        self._prompts |= dict(enumerate(prompts, self._num_begun))
        try:
            decoder = self._prepare(prompts, is_chunked=True)
            if obstacle := join_obstacle(decoder):
                raise UnsupportedGenerationError(
                    f"rows must be able to join others, got {obstacle}; use static batches"
                )
        except Exception as error:
            if not self._ends_a_row(error):
                raise
            return self._isolate(error)
        if unfolded := [model for model in decoder.plan.models if model not in self._folded]:
            self._names.enter_context(folded_attention_for(unfolded))
            self._folded += unfolded
        self._sources |= dict.fromkeys(decoder.plan.call.row_ids, decoder.plan.source)
        self._readings.append(Reading(decoder, self._observer))
        return []

    def _read(self) -> list[RowResult]:
        """Read one chunk or some short prompts between two rounds; return finished rows.

        Short prompts overtake a long one after each of its chunks.
        """
        results: list[RowResult] = []
        num_left, has_read, may_overtake = PREFILL_CHUNK_TOKENS, False, self._may_overtake
        while self._readings and not results:
            reading = self._next_reading(may_overtake)
            num_tokens = reading.chunk_tokens
            if has_read and (num_tokens > num_left or not _is_short(reading)):
                break
            num_left, has_read = num_left - num_tokens, True
            self._may_overtake = reading is self._readings[0]
            queue_index = self._readings.index(reading)
            del self._readings[queue_index]
            try:
                is_unread = reading.read_chunk()
                while is_unread and _is_short(reading) and self._is_wanted(reading):
                    is_unread = reading.read_chunk()  # by the draft model
                if not is_unread:
                    finished = self._join(reading)
                elif self._is_wanted(reading):
                    finished, num_left = [], 0
                    self._readings.insert(queue_index, reading)
                else:
                    finished = [
                        FinishedRow(row_id, [], 0, 0, 0, None) for row_id in reading.row_ids
                    ]
            except Exception as error:
                if not self._ends_a_row(error):
                    raise
                results += self._isolate(error)
            else:
                results += [self._result(row) for row in finished]
        return results

    def _next_reading(self, may_overtake: bool) -> Reading:
        """Return the oldest reading, or the oldest short reading if it may overtake."""
        short = filter(_is_short, self._readings) if may_overtake else ()
        return next(iter(short), self._readings[0])

    def _is_wanted(self, reading: Reading) -> bool:
        """Return whether a reading has a row that is not cancelled."""
        if self.on_tokens is None:
            return True
        return any(self.on_tokens(self._prompts[row_id], ()) for row_id in reading.row_ids)

    def _join(self, reading: Reading) -> list[FinishedRow]:
        """Let unfinished rows join a running batch; return finished rows."""
        decoder, plan, finished = reading.decoder, reading.plan, reading.finished()
        if len(finished) < len(plan.call.row_ids):
            kind = type(plan.source)  # only drafters of the same kind can join
            batch_key = (
                plan.call.do_sample,
                plan.config.verifier or "",
                _most_drafted(plan.config),
                kind,
            )
            running = self._running.pop(batch_key, None)  # after an error, it would be half joined
            with torch.no_grad(), self._clock:
                self._clock.enter(Stage.DRAFT)
                if running is None:
                    running = RunningBatch(
                        decoder, reading.batch, self.stats, self._clock, self._observer
                    )
                else:
                    running.join(decoder, reading.batch)
                self._clock.enter(None)
            self._running[batch_key] = running
        given = plan.config.speculation_stats
        stats, prefill_stats = (
            self.stats,
            given if isinstance(given, SpeculationStats) else SpeculationStats(),
        )
        stats.add_seconds(StageSeconds(*prefill_stats.seconds_by_stage.values()))
        seconds = decoder.clock.lap()
        stats.add_seconds(seconds)
        stats.status |= prefill_stats.status
        stats.rounds_s += seconds.draft  # plain decoding has no prefill of a draft model
        if not stats.plan:
            stats.plan, stats.verifier, stats.cache = (
                prefill_stats.plan,
                prefill_stats.verifier,
                prefill_stats.cache,
            )
        for reason in prefill_stats.fallbacks:
            stats.add_fallback(reason)
        return finished

    def _isolate(self, error: Exception) -> list[RowResult]:
        """Decode rows again one by one after an error in their batch or prefill.

        A row that fails again ends with its own error.
        """
        running = {row_id for batch in self._running.values() for row_id in batch.row_ids}
        running |= {row_id for reading in self._readings for row_id in reading.row_ids}
        failed = sorted(set(self._prompts) - running)
        prompts = [self._prompts.pop(row_id) for row_id in failed]
        self._sources = {
            row_id: source for row_id, source in self._sources.items() if row_id not in failed
        }
        if len(prompts) == 1:
            return [RowResult(prompts[0], [], 0, 0, 0, error)]
        alone, results = replace(self), []
        alone._folded, alone._names = self._folded, self._names
        for prompt in prompts:
            results += alone._begin([prompt])
            while alone._readings or alone._running:
                results += alone._read()
                results += alone._step()
        return results

    def _ends_a_row(self, error: Exception) -> bool:
        """Return whether an error ends only its row.

        Invalid arguments and out-of-memory errors do so only with `ends_rows`.
        """
        if self.ends_rows:
            return True
        if isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(error, BadLogitsError) or not isinstance(error, SpeculateError)

    def _result(self, row: FinishedRow) -> RowResult:
        source, prompt = self._sources.pop(row.row_id, CONTINUOUS), self._prompts.pop(row.row_id)
        if row.error is None:
            source.keep_row(row.token_ids, lambda: prompt.token_ids)
        return RowResult(prompt, *row[1:])

    def _prepare(
        self, prompts: Sequence[RowPrompt], is_chunked: bool = False
    ) -> SpeculativeDecoder:
        """Return the decoder for prompts with equal arguments: left-padded, and chunked if long."""
        first_row = self._num_begun
        self._num_begun += len(prompts)
        token_ids = [prompt.token_ids for prompt in prompts]
        input_ids, attention_mask = left_padded(token_ids, self.pad_token_id, device_of(self.model))
        seeds = {} if prompts[0].seed is None else {"seed": [prompt.seed for prompt in prompts]}
        arguments = {
            "pad_token_id": self.pad_token_id,
            **self.arguments,
            **prompts[0].arguments,
            **seeds,
        }
        if isinstance(arguments.get("num_assistant_tokens"), list):
            arguments["num_assistant_tokens"] = arguments["num_assistant_tokens"] * len(prompts)
        config = arguments.get("generation_config") or self.model.generation_config
        is_long = is_chunked and input_ids.numel() > PREFILL_CHUNK_TOKENS
        if is_long and config.prefill_chunk_size is None and reads_prompts_in_chunks(self.model):
            arguments = {
                "prefill_chunk_size": max(PREFILL_CHUNK_TOKENS // len(prompts), 1),
                **arguments,
            }
        return prepare(
            self.model, first_row, input_ids=input_ids, attention_mask=attention_mask, **arguments
        )


def _is_short(reading: Reading) -> bool:
    return reading.is_whole and reading.chunk_tokens <= PREFILL_CHUNK_TOKENS


def _most_drafted(config: SpeculationConfig) -> int | None:
    """Return a call's `num_assistant_tokens`; rows read together have equal entries in a list."""
    num_tokens = config.num_assistant_tokens
    return num_tokens if num_tokens is None or isinstance(num_tokens, int) else max(num_tokens)
