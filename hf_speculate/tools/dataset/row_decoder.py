"""Decodes one batch of rows."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import MaxTimeCriteria, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from hf_speculate.config import FIELD_NAMES
from hf_speculate.errors import ConfigError
from hf_speculate.generation.config_sources import fields_of, read_config
from hf_speculate.generation.draft_source import find_draft_source
from hf_speculate.generation.enable import is_enabled
from hf_speculate.generation.mixin import generate
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.dataset.encoding import padded, token_ids_of
from hf_speculate.tools.dataset.row_ends import RowEnds
from hf_speculate.tools.dataset.rows import Row

# What a data set decides itself, or what would make a row's text depend on the batch that it lands in.
OWN_ARGUMENTS = (
    "attention_mask",
    "generator",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "max_length",
    "max_new_tokens",
    "num_return_sequences",
    "past_key_values",
    "return_dict_in_generate",
    "seed",
    "speculation_stats",
    "streamer",
)


class Decoded(NamedTuple):
    """What became of a batch.

    Args:
        results: a JSON object for each row, in the batch's order.
        num_tokens: new tokens of all rows.
        num_drafted: tokens drafted for it.
        num_accepted: drafted tokens that were accepted.
    """

    results: list[dict[str, Any]]
    num_tokens: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class RowDecoder:
    """Decodes batches with one model.

    Where tokens are drawn, each row has a seed of its own. Without a source of drafts it is `verifier="coupled"` that
    draws so.

    Args:
        model: the target, enabled or not.
        tokenizer: the target's; left as it is.
        max_new_tokens: of every row.
        arguments: of `generate()`, none of `OWN_ARGUMENTS` among them.
        is_chat: whether texts go through the chat template too.

    Raises:
        ConfigError: there is an argument of `OWN_ARGUMENTS`, or tokens would be drawn without seeds of the rows.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False

    def __post_init__(self) -> None:
        taken = sorted(set(self.arguments) & set(OWN_ARGUMENTS))
        if taken:
            raise ConfigError(
                f"the arguments must not be among {', '.join(OWN_ARGUMENTS)}, which a data set decides itself, got "
                f"{taken[0]}; leave it out"
            )
        self._verifier()

    def decode(self, rows: Sequence[Row], seed: int) -> Decoded:
        """Decode rows in one left-padded batch.

        Args:
            rows: B of them.
            seed: of the data set.

        Raises:
            ConfigError: the batch does not fit into memory, or as `token_ids_of`.
        """
        prompts = token_ids_of(rows, self.tokenizer, self.is_chat)
        input_ids, attention_mask = padded(prompts, self._pad_token_id(), self.model.device)
        stats = SpeculationStats()
        own = {"pad_token_id": self._pad_token_id(), "tokenizer": self.tokenizer}
        ends = RowEnds(self._eos_token_ids(), self._stop_strings, self.arguments.get("stopping_criteria"))
        decode: Any = self.model.generate if is_enabled(self.model) else _once(self.model)
        try:
            output = decode(
                input_ids=input_ids,
                attention_mask=attention_mask,
                max_new_tokens=self.max_new_tokens,
                num_return_sequences=1,
                return_dict_in_generate=False,
                seed=[row_seed(seed, row.key) for row in rows],
                speculation_stats=stats,
                **{**own, **self.arguments, **self._verifier(), "stopping_criteria": ends.criteria},
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a batch must fit into memory, got {len(rows)} rows of {input_ids.shape[1]} and {self.max_new_tokens} "
                "tokens; choose a smaller batch size: what is finished is kept"
            ) from error
        prompt_len = input_ids.shape[1]
        return self._decoded(rows, output[:, prompt_len:].tolist(), ends.find(output, prompt_len), stats)

    def _decoded(
        self,
        rows: Sequence[Row],
        token_ids: Sequence[list[int]],
        num_new: Sequence[int | None],
        stats: SpeculationStats,
    ) -> Decoded:
        results, num_tokens = [], 0
        for row, new_ids, num in zip(rows, token_ids, num_new, strict=True):
            ids, finish_reason = self._ended(new_ids, num)
            num_tokens += len(ids)
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            results.append(
                {"id": row.id, "text": text, "num_tokens": len(ids), "finish_reason": finish_reason, **row.others}
            )
        return Decoded(results, num_tokens, stats.num_drafted, stats.num_accepted)

    def _ended(self, ids: list[int], num_new: int | None) -> tuple[list[int], str]:
        """A row's tokens up to its end, and why it ended: "stop" or "length"."""
        if num_new is not None:
            return ids[:num_new], "stop"
        if self._has_time_limit():
            pad_id, num_tokens = self._pad_token_id(), len(ids)
            while num_tokens and ids[num_tokens - 1] == pad_id:
                num_tokens -= 1
            ids = ids[:num_tokens]
        return ids, "length" if len(ids) >= self.max_new_tokens else "stop"

    def _has_time_limit(self) -> bool:
        """Whether a clock may end rows, which are padded then."""
        criteria = self.arguments.get("stopping_criteria") or ()
        return self._setting("max_time") is not None or any(isinstance(one, MaxTimeCriteria) for one in criteria)

    @functools.cached_property
    def _stop_strings(self) -> StopStringCriteria | None:
        """The criterion of the stop strings; None without any."""
        stop_strings = self._setting("stop_strings")
        tokenizer = self.arguments.get("tokenizer") or self.tokenizer
        return None if stop_strings is None else StopStringCriteria(tokenizer, stop_strings)

    def _eos_token_ids(self) -> set[int]:
        eos = self._setting("eos_token_id")
        if eos is None:
            return set()
        return {int(eos)} if isinstance(eos, int) else {int(one) for one in eos}

    def _pad_token_id(self) -> int:
        given = self._setting("pad_token_id")
        for token_id in (given, self.tokenizer.pad_token_id, *self._eos_token_ids()):
            if token_id is not None:
                return int(token_id)
        return 0

    def _setting(self, name: str) -> Any:
        """A field by the argument, even if it is None, the passed config, the model's; None where nobody set it."""
        if name in self.arguments:
            return self.arguments[name]
        value = None
        for config in (self.arguments.get("generation_config"), self.model.generation_config):
            if value is None and config is not None:
                value = getattr(config, name, None)
        return value

    def _verifier(self) -> dict[str, str]:
        """The verifier that draws with a seed for each row, where nothing drafts and none is set."""
        if not self._setting("do_sample"):
            return {}
        given = {name: value for name, value in self.arguments.items() if name in FIELD_NAMES}
        passed = fields_of(self.arguments.get("generation_config"))
        config = read_config([given, passed, fields_of(self.model.generation_config)])
        assistant, early_exit = self.arguments.get("assistant_model"), self._setting("assistant_early_exit")
        if find_draft_source(assistant, early_exit, config, samples=True) is not None:
            return {}
        if config.verifier is not None:
            raise ConfigError(
                f"verifier must be 'coupled' where tokens are drawn and nothing drafts, got {config.verifier!r}; leave "
                "it out: rows draw with seeds of their own then"
            )
        return {"verifier": "coupled"}


def row_seed(seed: int, key: str) -> int:
    """The seed of one row, in [0, 2**63): it follows from the data set's and from the row's id alone."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _once(model: PreTrainedModel) -> Any:
    """`generate()` of a model that is not enabled."""

    def decode(**arguments: Any) -> Any:
        return generate(model, **arguments)

    return decode
