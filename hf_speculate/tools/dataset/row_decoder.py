"""Decode rows of a data set, each with its own seed."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_speculate.config import FIELD_NAMES
from hf_speculate.draft.source import source_key, source_values
from hf_speculate.errors import ConfigError, counted
from hf_speculate.generation.config_sources import fields_of, read_config, setting
from hf_speculate.generation.enable import is_enabled
from hf_speculate.generation.generate import generate
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt, RowResult, left_padded
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria, as_flags
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.dataset.rows import Row, token_ids_of


class RowEnds:
    """The end of each row, determined after decoding.

    The output does not mark the ends, since rows without an EOS token go on until the last row has
    stopped. Row-wise criteria run again on the output. Calls to other criteria are recorded during
    decoding.
    """

    def __init__(self, own: Iterable[StoppingCriteria], users: Iterable[Any]):
        criteria = [
            criterion if BlockStoppingCriteria([criterion]).is_row_wise else _Watched(criterion)
            for criterion in users
        ]
        row_wise = [
            criterion
            for criterion in criteria
            if not isinstance(criterion, _Watched | MaxTimeCriteria)
        ]
        self.criteria = StoppingCriteriaList(criteria)
        self._row_wise = BlockStoppingCriteria([*own, *row_wise])

    def find(self, token_ids: Tensor, prompt_len: int) -> list[int | None]:
        """Count the new tokens of each row up to and including its last token.

        Args:
            token_ids: [B, T] int64, prompts and new tokens.
            prompt_len: length of the padded prompts.

        Returns:
            A number per row; None if no criterion ended the row.
        """
        on_host = token_ids.cpu()
        verdict = self._row_wise(
            TokenBuffer(on_host[:, :prompt_len]), on_host[:, prompt_len:].tolist()
        )
        pairs = zip(verdict.num_emitted, verdict.is_done, strict=True)
        ends: list[int | None] = [num_new if is_done else None for num_new, is_done in pairs]
        for watched in (
            criterion for criterion in self.criteria if isinstance(criterion, _Watched)
        ):
            for row, length in watched.first_lens.items():
                num_new, earlier = length - prompt_len, ends[row]
                ends[row] = num_new if earlier is None else min(earlier, num_new)
        return ends


class _Watched(StoppingCriteria):
    """Wrapper that records when a user criterion first ends each row.

    `first_lens` maps each finished row to its length at the first verdict.
    """

    def __init__(self, criterion: Any):
        self._criterion = criterion
        self.first_lens: dict[int, int] = {}
        if hasattr(criterion, "eos_token_id"):
            self.eos_token_id = criterion.eos_token_id  # lets plain generate() pad finished rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        answer = self._criterion(input_ids, scores, **kwargs)
        flags = as_flags(
            answer if isinstance(answer, Tensor) else torch.tensor(answer, device="cpu")
        )
        flags = flags.expand(input_ids.shape[0])
        for row in flags.nonzero().flatten().tolist():
            self.first_lens.setdefault(row, input_ids.shape[1])
        return answer


OnBegin = Callable[[Sequence[Row]], None]  # called with rows before they are decoded
# Arguments that the data set sets, or that let the batch affect a row's text.
RESERVED_ARGUMENTS = [
    "attention_mask",
    "cache",
    "generator",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "max_length",
    "num_return_sequences",
    "past_key_values",
    "return_dict_in_generate",
    "seed",
    "speculation_stats",
    "streamer",
]


class Decoded(NamedTuple):
    """The results of a batch, and its counts."""

    results: list[dict[str, Any]]  # a JSON object per row
    num_drafted: int
    num_accepted: int
    num_rounds: int
    num_failed: int = 0
    num_in_flight: int = 0  # rows in progress
    # why batches are static although refilling was requested; empty otherwise
    fallback: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(result["num_tokens"] for result in self.results)


@dataclass(frozen=True)
class RowDecoder:
    """Decoder for batches with one model.

    For sampling, each row has its own seed.
    """

    model: PreTrainedModel  # the target, enabled or not
    tokenizer: PreTrainedTokenizerBase  # tokenizer of the target; not modified
    # arguments of `generate()`, including `max_new_tokens` but no `RESERVED_ARGUMENTS`
    arguments: Mapping[str, Any]
    is_chat: bool = False  # whether to apply the chat template even to texts

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", unwrapped(self.model))
        if taken := [name for name in RESERVED_ARGUMENTS if name in self.arguments]:
            raise ConfigError(
                f"arguments must not include {', '.join(RESERVED_ARGUMENTS)}, which the data set "
                "controls, got "
                f"{taken[0]}; leave it out"
            )
        self._verifier()

    @property
    def samples(self) -> bool:
        """Whether rows are sampled, from the arguments or the model's generation config."""
        return bool(self._setting("do_sample"))

    def decode_all(
        self, batches: Sequence[Sequence[Row]], seed: int, on_begin: OnBegin, num_refilled: int
    ) -> Iterator[Decoded]:
        """Decode all batches, refilling rows if possible, otherwise batch by batch.

        Args:
            batches: batches of rows with equal settings.
            seed: seed of the data set.
            on_begin: called with rows before they are decoded.
            num_refilled: number of rows decoded at once with refilling; 0 for static batches.
        """
        fallback = ""
        if num_refilled:
            decoder = ContinuousDecoder(
                self.model,
                num_refilled,
                {**self._all_arguments(), "return_dict_in_generate": False},
                self._pad_token_id,
                on_begin=lambda prompts: on_begin([prompt.key for prompt in prompts]),
            )
            prompts = (
                RowPrompt(self._token_ids(row), row_seed(seed, row), row.settings, key=row)
                for row in chain.from_iterable(batches)
            )
            first = next(prompts)
            fallback = decoder.obstacle(first)
            if not fallback:
                yield from self._decode_refilled(decoder, chain([first], prompts))
                return
        for batch in batches:
            on_begin(batch)
            yield self.decode(batch, seed)._replace(fallback=fallback)

    def _decode_refilled(
        self, decoder: ContinuousDecoder, prompts: Iterator[RowPrompt]
    ) -> Iterator[Decoded]:
        try:
            for results in decoder.decode(lambda: next(prompts, None)):
                yield Decoded(
                    [self._for_row(result.prompt.key)._line_of(result) for result in results],
                    sum(result.num_drafted for result in results),
                    sum(result.num_accepted for result in results),
                    sum(result.num_rounds for result in results),
                    sum(result.error is not None for result in results),
                    decoder.num_live,
                )
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(decoder.num_rows, "at once") from error

    def decode(self, rows: Sequence[Row], seed: int) -> Decoded:
        """Decode B rows with equal settings in one left-padded batch."""
        return self._for_row(rows[0])._decode(rows, seed)

    def _decode(self, rows: Sequence[Row], seed: int) -> Decoded:
        prompts = [self._token_ids(row) for row in rows]
        input_ids, attention_mask = left_padded(prompts, self._pad_token_id, self.model.device)
        stats, ends, prompt_len = SpeculationStats(), self._ends(), input_ids.shape[1]
        decode: Any = (
            self.model.generate if is_enabled(self.model) else partial(generate, self.model)
        )
        try:
            output = decode(
                input_ids=input_ids,
                attention_mask=attention_mask,
                num_return_sequences=1,
                return_dict_in_generate=False,
                seed=[row_seed(seed, row) for row in rows],
                speculation_stats=stats,
                **{**self._all_arguments(), "stopping_criteria": ends.criteria},
            )
        except torch.OutOfMemoryError as error:
            sizes = f"of {prompt_len} and {counted(self.arguments['max_new_tokens'], 'token')}"
            raise _out_of_memory(len(rows), sizes) from error
        finished = zip(
            rows, output[:, prompt_len:].tolist(), ends.find(output, prompt_len), strict=True
        )
        lines = [self._line(row, ids, num_new) for row, ids, num_new in finished]
        return Decoded(lines, stats.num_drafted, stats.num_accepted, stats.num_rounds)

    def _for_row(self, row: Row) -> "RowDecoder":
        return replace(self, arguments={**self.arguments, **row.settings}) if row.settings else self

    def _token_ids(self, row: Row) -> list[int]:
        return token_ids_of(row, self.tokenizer, self.is_chat)

    def _all_arguments(self) -> dict[str, Any]:
        defaults = {"pad_token_id": self._pad_token_id, "tokenizer": self.tokenizer}
        return {**defaults, **self.arguments, **self._verifier()}

    def _line_of(self, result: RowResult) -> dict[str, Any]:
        row, prompt, ids = result.prompt.key, list(result.prompt.token_ids), result.token_ids
        if result.error is not None:
            line = self._line(row, ids, len(ids))
            return line | {
                "finish_reason": "error",
                "error": f"{type(result.error).__name__}: {result.error}",
            }
        (num_new,) = self._ends().find(torch.tensor([prompt + ids], device="cpu"), len(prompt))
        return self._line(row, ids, num_new)

    def _line(self, row: Row, ids: list[int], num_new: int | None) -> dict[str, Any]:
        """Make a row's result.

        Args:
            row: the row.
            ids: the row's new tokens, possibly padded.
            num_new: number of new tokens up to the end.
                None if no criterion ended the row.
        """
        reason, criteria = "stop", self.arguments.get("stopping_criteria") or ()
        if num_new is None:
            if self._setting("max_time") is not None or any(
                isinstance(criterion, MaxTimeCriteria) for criterion in criteria
            ):
                num_pads = len(
                    list(takewhile(lambda token_id: token_id == self._pad_token_id, reversed(ids)))
                )
                ids = ids[: len(ids) - num_pads]  # a time limit leaves padding at the end
            reason = "length" if len(ids) >= self.arguments["max_new_tokens"] else "stop"
        ids = ids[:num_new]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return {
            "id": row.id,
            "text": text,
            "num_tokens": len(ids),
            "finish_reason": reason,
            **row.extras,
        }

    def _ends(self) -> RowEnds:
        return RowEnds(self._own_criteria, self.arguments.get("stopping_criteria") or ())

    @cached_property
    def _own_criteria(self) -> list[StoppingCriteria]:
        """The criteria that `generate()` makes from EOS tokens and stop strings."""
        eos, stop_strings = self._eos_token_ids, self._setting("stop_strings")
        criteria: list[StoppingCriteria] = [EosTokenCriteria(eos)] if eos else []
        if stop_strings is not None:
            criteria.append(
                StopStringCriteria(self.arguments.get("tokenizer") or self.tokenizer, stop_strings)
            )
        return criteria

    @property
    def _eos_token_ids(self) -> list[int]:
        eos = self._setting("eos_token_id")
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    @property
    def _pad_token_id(self) -> int:
        candidates = (
            self._setting("pad_token_id"),
            self.tokenizer.pad_token_id,
            *self._eos_token_ids,
            0,
        )
        return int(
            next(token_id for token_id in candidates if token_id is not None and token_id >= 0)
        )

    def _setting(self, name: str) -> Any:
        return setting(self.model, self.arguments, name)

    def _verifier(self) -> dict[str, str]:
        """Return the verifier for sampling without a draft source but with a seed per row."""
        if not self.samples:
            return {}
        set_fields = {name: value for name, value in self.arguments.items() if name in FIELD_NAMES}
        passed = fields_of(self.arguments.get("generation_config"))
        config = read_config([set_fields, passed, fields_of(self.model.generation_config)])
        names = ("assistant_model", "assistant_early_exit")
        values = source_values({name: self._setting(name) for name in names}, config)
        if source_key(values) or config.verifier == "coupled":
            return {}
        if config.verifier is not None:
            raise ConfigError(
                f"verifier must be 'coupled' if nothing is drafted, got {config.verifier!r}; leave "
                "it out"
            )
        return {"verifier": "coupled"}


def _out_of_memory(num_rows: int, what: str) -> ConfigError:
    rows = counted(num_rows, "row")
    return ConfigError(
        f"the batch must fit into memory, got {rows} {what}; choose fewer rows, results are kept"
    )


def row_seed(seed: int, row: Row) -> int:
    """Return the row's "seed", or derive one in [0, 2**63) from the data set's seed and its id."""
    extra_seed: int | None = row.extras.get("seed")
    if extra_seed is not None:
        return extra_seed
    digest = hashlib.sha256(f"{seed}:{row.key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
