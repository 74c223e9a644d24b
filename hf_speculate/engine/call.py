"""Prepared call: the engine's inputs for one `generate()` call."""

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import num_cached
from hf_speculate.compat import pad_token_id
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.ranks import Ranks
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.foreign_code import ForeignCode
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.models.module_walk import adapters_by_row
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.of_rows import RowCriteria, RowProcessors
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria

# imported only if new rows may replace finished ones
_REFILLED_ROWS = "hf_speculate.options.refill.row_groups"


class RowLists:
    """Logits processors and stopping criteria per row.

    The rows of one call share the same lists. Continuous batching joins rows from several calls.
    """

    rows_leave = False  # whether a finished row leaves the batch to make room for another prompt
    first_row = 0  # index of the first output row

    def processors(self, processors: BlockLogitsProcessorList, num_rows: int) -> RowProcessors:
        """Return the logits processors for `num_rows` rows."""
        return processors

    def criteria(
        self, criteria: BlockStoppingCriteria, num_rows: int, max_length: int
    ) -> RowCriteria:
        """Return the stopping criteria for `num_rows` rows of at most `max_length` columns."""
        return criteria


ONE_CALL = RowLists()


def refilled_rows(first_row: int) -> RowLists:
    """Return the row lists for continuous batching; `first_row` is the index of the first row."""
    lists: RowLists = importlib.import_module(_REFILLED_ROWS).RefilledRows(first_row)
    return lists


class Recorded(NamedTuple):
    """The requested outputs other than tokens."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False


@dataclass(frozen=True)
class Prompts:
    """Prompts for B rows."""

    input_ids: Tensor  # [B, T] int64, left-padded
    query_ids: Tensor  # [B, Q] int64, the prompt tokens that are not cached yet
    # [B, P] int64 over the cached states and the query; None without padding
    attention_mask: Tensor | None

    @property
    def num_ahead(self) -> int:
        """Number of query columns minus number of id columns.

        Embeddings have no ids, and cached tokens are not part of the query.
        """
        return self.query_ids.shape[1] - self.input_ids.shape[1]

    @property
    def text_mask(self) -> Tensor | None:
        """Mask [B, T] int64 over the ids, 1 for real tokens; None without padding or ids."""
        num_ids = self.input_ids.shape[1]
        if self.attention_mask is None or not 0 < num_ids <= self.attention_mask.shape[1]:
            return None
        return self.attention_mask[:, -num_ids:]

    def real_ids(self, row: int) -> list[int]:
        """Return the ids of a row without its padding."""
        ids: list[int] = self.input_ids[row, self.num_pads[row] :].tolist()
        return ids

    @cached_property
    def num_pads(self) -> list[int]:
        """[B] number of padding columns before each row."""
        mask = self.text_mask
        if mask is None:
            return [0] * self.input_ids.shape[0]
        pads: list[int] = mask.argmax(dim=1).tolist()
        return pads


@dataclass(frozen=True)
class Call:
    """A prepared call with everything that the user requested.

    The decisions about it, including the draft source and the settings, are in its `Plan`.
    """

    target: PreTrainedModel
    source: DraftSource
    config: SpeculationConfig  # resolved settings
    generation_config: GenerationConfig  # as prepared by transformers
    prompts: Prompts
    cache: Cache  # the target's, empty or prefilled
    # the static cache passed by the user, with `cache` as its dynamic copy; None without one
    static_cache: Cache | None
    is_cache_passed: bool  # whether the user passed a cache
    is_cache_kept: bool  # whether the cache or its static original outlives the call
    processors: BlockLogitsProcessorList  # the target's logits processors
    criteria: BlockStoppingCriteria  # the stopping criteria
    streamer: Any  # receives every new token of the single row; None without streaming
    # further arguments for the target's forwards, as prepared by transformers
    model_kwargs: Mapping[str, Any]
    inputs_tensor: Tensor | None  # the main input, for example of an encoder
    is_static_named: bool  # whether the call names or passes a static cache
    target_inputs: ExtraInputs  # the target's inputs other than tokens
    draft_inputs: ExtraInputs  # the draft model's inputs other than tokens
    ranks: Ranks  # the processes that decode the call together
    row_lists: RowLists  # processors and criteria per row
    foreign_code: tuple[ForeignCode, ...]  # user code in the target; it may address rows by index

    @property
    def do_sample(self) -> bool:
        """Whether the call samples."""
        return bool(self.generation_config.do_sample)

    @property
    def max_length(self) -> int:
        """Maximum number of output columns."""
        return int(self.generation_config.max_length)

    @cached_property
    def pad_token_id(self) -> int | None:
        """Padding id for finished rows; None if the call has none.

        The id is cached because reading it may wait for the device.
        """
        return pad_token_id(self.generation_config)

    @property
    def prefill_chunk_size(self) -> int | None:
        """Number of prompt tokens per forward; None for all at once."""
        size: int | None = self.generation_config.prefill_chunk_size
        return size

    @property
    def recorded(self) -> Recorded:
        """The requested outputs other than tokens."""
        if not self.generation_config.return_dict_in_generate:
            return Recorded()
        return Recorded(
            *(bool(getattr(self.generation_config, f"output_{name}")) for name in Recorded._fields)
        )

    @property
    def is_static(self) -> bool:
        """Whether the call requests fixed-size buffers."""
        return self.is_static_named or self.generation_config.compile_config is not None

    @cached_property
    def binds_rows(self) -> bool:
        """Whether code in the target may hold one adapter or vector per batch index."""
        return bool(self.foreign_code) or adapters_by_row(self.target)

    @property
    def for_generators(self) -> dict[str, Any]:
        """Arguments for transformers' candidate generators, with a copied generation config."""
        input_ids, inputs_tensor = self.prompts.input_ids, self.inputs_tensor
        return {
            "input_ids": input_ids,
            "generation_config": copy.copy(self.generation_config),
            "model_kwargs": self.model_kwargs,
            "inputs_tensor": input_ids if inputs_tensor is None else inputs_tensor,
            "logits_processor": self.processors,
            "vocab_size": vocab_size_of(self.target),
        }

    @property
    def row_ids(self) -> range:
        return range(self.row_lists.first_row, self.row_lists.first_row + self.batch_size)

    @property
    def batch_size(self) -> int:
        return self.prompts.input_ids.shape[0]

    @property
    def max_new_tokens(self) -> int:
        return self.max_length - self.prompts.input_ids.shape[1]

    @property
    def num_hidden(self) -> int:
        """Number of tokens that the target reads but the output lacks.

        They are cached tokens and embeddings without ids.
        """
        return num_cached(self.cache) + self.prompts.num_ahead

    @property
    def max_columns(self) -> int:
        return self.max_length + self.num_hidden

    @property
    def max_position(self) -> int:
        """Position id of the last token that the target reads in a row without padding."""
        return max(self.max_columns - 2, 0)

    @property
    def num_prompt_tokens(self) -> list[int]:
        """[B] number of real tokens in each prompt, including the tokens in a passed cache."""
        if self.prompts.attention_mask is None:
            return [self.prompts.input_ids.shape[1] + self.num_hidden] * self.batch_size
        counts: list[int] = self.prompts.attention_mask.sum(1).tolist()
        return counts
