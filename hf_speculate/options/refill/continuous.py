"""Continuous batching: a finished row is replaced by the next prompt of a source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.no_drafts import CONTINUOUS
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.builder import Prepared
from hf_speculate.engine.observers import Observer
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.errors import BadLogitsError, SpeculateError, UnsupportedGenerationError
from hf_speculate.generation.mixin import prepare
from hf_speculate.models.folded_attention import folded_attention_for
from hf_speculate.models.language_model import device_of
from hf_speculate.options.refill.running_batch import FinishedRow, RunningBatch, join_obstacle
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import RoundRecord, StageSeconds

_MOST_PADDING = 1.25  # padded over real tokens of prompts that are read together


@dataclass(frozen=True)
class RowPrompt:
    """One prompt [T] of a source, without padding."""

    token_ids: Sequence[int]
    seed: int | None = None  # seed of the row when sampling; None to draw one
    # for `generate()`, beside the decoder's; `num_assistant_tokens` may be a list of one number
    arguments: Mapping[str, Any] = field(default_factory=dict)
    key: Any = None  # passed on to the result
    # called in each round with the number of new tokens before it, its N tokens and their logits [N, V], which are the
    # target's before processors and only valid during the call
    on_logits: Callable[[int, Sequence[int], Tensor], object] | None = None


# The next prompt; None if there is none now. It is asked again after each round in which a row is free.
RowSource = Callable[[], RowPrompt | None]


class RowResult(NamedTuple):
    """A finished row; a cancelled one has the tokens that it had."""

    prompt: RowPrompt
    token_ids: list[int]  # new tokens, up to the row's stop
    num_rounds: int
    num_drafted: int
    num_accepted: int
    error: Exception | None = None  # that ended the row


@dataclass
class ContinuousDecoder:
    """Decodes prompts of a source in a batch whose rows are refilled as they finish.

    A row gets the tokens that its prompt gets alone: greedy ones, and with a fixed draft length also those sampled with
    its seed. A row that fails ends alone, with its error in the result. Rows whose arguments choose another verifier,
    such as greedy ones among sampled ones, or another draft length run in a batch of their own; the batches take turns,
    round by round.
    """

    model: PreTrainedModel  # the target, enabled or not
    num_rows: int  # rows that are decoded at once, >= 1
    arguments: Mapping[str, Any]  # arguments of `generate()` for all rows, `assistant_model` for example
    pad_token_id: int = 0  # pads prompts that are read together
    stats: SpeculationStats = field(default_factory=SpeculationStats)  # statistics of all rows; written to
    on_begin: Callable[[Sequence[RowPrompt]], object] | None = None  # called with prompts before they are read
    # called after each round with the prompt of each row that goes on, and all of its new tokens; a row for which it
    # returns False is cancelled. The tokens begin anew if a row is decoded again: after an error in a batch, its rows
    # are decoded one by one, to find the row that fails
    on_tokens: Callable[[RowPrompt, Sequence[int]], bool] | None = None
    ends_rows: bool = False  # whether wrong arguments and a lack of memory end the row, too, instead of the run

    def __post_init__(self) -> None:
        self._clock = StageClock()
        self._running: dict[tuple[Any, ...], RunningBatch] = {}  # by sampling, verifier and draft length
        self._prompts: dict[int, RowPrompt] = {}  # prompts of the rows that are not finished
        self._num_begun = 0
        self._source: DraftSource = CONTINUOUS  # source of the latest rows

    @property
    def num_live(self) -> int:
        return len(self._prompts)

    def obstacle(self, prompt: RowPrompt) -> str:
        """Why rows like this one can only be decoded in static batches; empty if they can join."""
        return join_obstacle(self._prepare([prompt]))

    def decode(self, source: RowSource) -> Iterator[list[RowResult]]:
        """Decode until no row is left and the source has none; the results of each round that finishes rows."""
        models = [model for model in (self.model, *self.arguments.values()) if isinstance(model, PreTrainedModel)]
        with folded_attention_for(models):
            while True:
                finished = self._admit(source)
                if not self._running and not finished:
                    return
                finished += self._step()
                if finished:
                    yield finished

    def _step(self) -> list[RowResult]:
        results: list[RowResult] = []
        for call_type, running in list(self._running.items()):
            try:
                with torch.no_grad(), self._clock:
                    finished = running.decode_round()
            except Exception as error:
                if not self._ends_a_row(error):
                    raise
                del self._running[call_type]
                results += self._isolate(error)
                continue
            if self.on_tokens is not None:
                ids, prompts = running.row_ids, self._prompts
                finished += running.cancel(
                    [row_id for row_id in ids if not self.on_tokens(prompts[row_id], running.new_ids(row_id))]
                )
            if not running.row_ids:
                del self._running[call_type]
            results += [self._result(row) for row in finished]
        return results

    def _admit(self, source: RowSource) -> list[RowResult]:
        """Read the next prompts into free rows; returns the rows that are finished by then."""
        results: list[RowResult] = []
        while not results and len(self._prompts) < self.num_rows:
            waiting: list[RowPrompt] = []
            while len(self._prompts) + len(waiting) < self.num_rows and (prompt := source()) is not None:
                waiting.append(prompt)
            if not waiting:
                break
            if self.on_begin is not None:
                self.on_begin(waiting)
            for group in _alike(waiting):
                results += self._begin(group)
        return results

    def _begin(self, prompts: Sequence[RowPrompt]) -> list[RowResult]:
        """Read prompts together; returns the rows that are finished by then."""
        self._prompts |= dict(enumerate(prompts, self._num_begun))
        try:
            prepared = self._prepare(prompts)
            if obstacle := join_obstacle(prepared):
                raise UnsupportedGenerationError(
                    f"rows must be able to join others, got {obstacle}; use static batches"
                )
            finished = self._read(prepared)
        except Exception as error:
            if not self._ends_a_row(error):
                raise
            return self._isolate(error)
        return [self._result(row) for row in finished]

    def _read(self, prepared: Prepared) -> list[FinishedRow]:
        """Read prompts, and let the rows that are not finished join a running batch."""
        on_logits = _LogitsObserver(self._prompts)
        decoder, batch, call = prepared.decoder, prepared.batch, prepared.plan.call
        with torch.no_grad(), decoder.clock:
            replace(decoder, observers=[*decoder.observers, on_logits]).prefill(batch)
            left = dict(zip(batch.row_ids, batch.is_finished, strict=True))
            ended = [row_id for row_id in call.row_ids if left.get(row_id, True)]
            finished = [FinishedRow(row_id, decoder.output.take(row_id), 0, 0, 0, None) for row_id in ended]
            if len(ended) < len(call.row_ids):
                decoder.clock.enter(Stage.DRAFT)
                decoder.drafts.read_ahead(batch)
                call_type = call.do_sample, call.config.verifier or "", _most_drafted(call.config)
                running = self._running.pop(call_type, None)  # an error leaves it half joined
                if running is None:
                    running = RunningBatch(prepared, self.stats, self._clock, on_logits)
                else:
                    running.join(prepared)
                self._running[call_type] = running
            decoder.clock.enter(None)
        stats, read = self.stats, prepared.stats
        stats.add_seconds(StageSeconds(*read.seconds_by_stage.values()))
        seconds = decoder.clock.lap()
        stats.add_seconds(seconds)
        stats.rounds_s += seconds.draft  # plain decoding reads no prompt a second time
        if not stats.plan:
            stats.plan, stats.verifier, stats.cache = read.plan, read.verifier, read.cache
        for reason in read.fallbacks:
            stats.add_fallback(reason)
        return finished

    def _isolate(self, error: Exception) -> list[RowResult]:
        """Decode the rows of no running batch anew, one by one, after an error; one that fails again has its own."""
        running = {row_id for batch in self._running.values() for row_id in batch.row_ids}
        prompts = [self._prompts.pop(row_id) for row_id in sorted(set(self._prompts) - running)]
        if len(prompts) == 1:
            return [RowResult(prompts[0], [], 0, 0, 0, error)]
        alone, results = replace(self), []
        for prompt in prompts:
            results += alone._begin([prompt])
            while alone._running:
                results += alone._step()
        return results

    def _ends_a_row(self, error: Exception) -> bool:
        """Whether an error is a row's own: not a wrong argument, nor a lack of memory, unless these end rows too."""
        if self.ends_rows:
            return True
        if isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(error, BadLogitsError) or not isinstance(error, SpeculateError)

    def _result(self, row: FinishedRow) -> RowResult:
        if row.error is None:
            self._source.keep(row.token_ids)
        return RowResult(self._prompts.pop(row.row_id), *row[1:])

    def _prepare(self, prompts: Sequence[RowPrompt]) -> Prepared:
        """The prepared call of prompts with equal arguments, left-padded."""
        first_row = self._num_begun
        self._num_begun += len(prompts)
        token_ids = [prompt.token_ids for prompt in prompts]
        input_ids, attention_mask = left_padded(token_ids, self.pad_token_id, device_of(self.model))
        seeds = {} if prompts[0].seed is None else {"seed": [prompt.seed for prompt in prompts]}
        arguments = {"pad_token_id": self.pad_token_id, **self.arguments, **prompts[0].arguments, **seeds}
        if isinstance(arguments.get("num_assistant_tokens"), list):
            arguments["num_assistant_tokens"] = arguments["num_assistant_tokens"] * len(prompts)
        prepared = prepare(self.model, first_row, input_ids=input_ids, attention_mask=attention_mask, **arguments)
        self._source = prepared.plan.call.source
        return prepared


@dataclass
class _LogitsObserver(Observer):
    """Hands the target's logits of new tokens to the rows that ask for them."""

    stage = Stage.REPORT
    prompts: Mapping[int, RowPrompt]  # by row

    def on_round(self, record: RoundRecord) -> None:
        for row in record.live_rows:
            on_logits, num = self.prompts[record.row_ids[row]].on_logits, record.trimmed.num_emitted[row]
            if on_logits is not None and num:
                token_ids = record.verified.new_ids[row][:num]
                on_logits(record.trimmed.num_new[row] - num, token_ids, record.scored.logits[row, :num])


def left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad B prompts; returns `input_ids` and `attention_mask`, both [B, T] int64."""
    rows = [torch.tensor(ids, dtype=torch.int64, device="cpu") for ids in prompts]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id, padding_side="left")
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return input_ids.to(device), attention_mask.to(device)


def _most_drafted(config: SpeculationConfig) -> int | None:
    """The number of tokens to draft that a call names; it may be a list, of equal numbers for rows read together."""
    num = config.num_assistant_tokens
    return num if num is None or isinstance(num, int) else max(num)


def _alike(prompts: Sequence[RowPrompt]) -> list[list[RowPrompt]]:
    """Groups of prompts that are read together: of equal arguments and like length."""
    groups = [[prompts[0]]]
    for prompt in prompts[1:]:
        first, lens = groups[-1][0], [len(member.token_ids) for member in (*groups[-1], prompt)]
        is_like = dict(first.arguments) == dict(prompt.arguments) and (first.seed is None) == (prompt.seed is None)
        if is_like and max(lens) * len(lens) <= _MOST_PADDING * sum(lens):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    return groups
