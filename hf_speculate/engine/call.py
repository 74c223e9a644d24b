"""Prepared call: the inputs of the engine from one `generate()` call."""

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

# imported if new rows may replace finished ones
_REFILLED_ROWS = "hf_speculate.options.refill.row_groups"


class RowLists:
    """Processors and criteria per row.

    Rows of one call share the same lists. Continuous batching joins rows of several calls.
    """

    rows_leave = False  # whether a finished row leaves, to make room for another prompt
    first_row = 0  # number of the first output row

    def processors(self, processors: BlockLogitsProcessorList, num_rows: int) -> RowProcessors:
        """Return the logits processors of `num_rows` rows."""
        return processors

    def criteria(
        self, criteria: BlockStoppingCriteria, num_rows: int, max_length: int
    ) -> RowCriteria:
        """Return the stopping criteria of `num_rows` rows with at most `max_length` columns."""
        return criteria


ONE_CALL = RowLists()


def refilled_rows(first_row: int) -> RowLists:
    """Return the row lists for continuous batching; `first_row` is the number of the first row."""
    lists: RowLists = importlib.import_module(_REFILLED_ROWS).RefilledRows(first_row)
    return lists


class Recorded(NamedTuple):
    """The requested outputs besides tokens."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False


@dataclass(frozen=True)
class Prompts:
    """The prompts of B rows."""

    input_ids: Tensor  # [B, T] int64, left-padded
    query_ids: Tensor  # [B, Q] int64, the prompt tokens missing in the cache
    # [B, P] int64 over the cache's states and the query; None if nothing is padded
    attention_mask: Tensor | None

    @property
    def num_ahead(self) -> int:
        """Columns of the query minus columns of the ids.

        Embeddings have no ids, and cached tokens are not in the query.
        """
        return self.query_ids.shape[1] - self.input_ids.shape[1]

    @property
    def text_mask(self) -> Tensor | None:
        """Mask [B, T] int64 of the ids, 1 for real tokens; None without padding or without ids."""
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
        """[B] columns of padding before each row."""
        mask = self.text_mask
        if mask is None:
            return [0] * self.input_ids.shape[0]
        pads: list[int] = mask.argmax(dim=1).tolist()
        return pads


@dataclass(frozen=True)
class Call:
    """A prepared call with its requests.

    The decisions are in its `Plan`, including the source and the settings.
    """

    target: PreTrainedModel
    source: DraftSource  # the drafts' source
    config: SpeculationConfig  # resolved settings
    generation_config: GenerationConfig  # as transformers has prepared it
    prompts: Prompts
    cache: Cache  # the target's, empty or prefilled
    # the static cache passed by the user; `cache` is a dynamic copy of it
    static_cache: Cache | None
    is_cache_passed: bool  # whether the user passed this cache
    is_cache_kept: bool  # whether the cache, or its static original, outlives the call
    processors: BlockLogitsProcessorList  # the target's logits processors
    criteria: BlockStoppingCriteria  # the stopping criteria
    streamer: Any  # receives every new token of the row; or None
    # further arguments of the target's forwards, as transformers has prepared them
    model_kwargs: Mapping[str, Any]
    inputs_tensor: Tensor | None  # the main input, an encoder's for example
    is_static_named: bool  # whether the call names or passes a static cache
    target_inputs: ExtraInputs  # read by the target besides tokens
    draft_inputs: ExtraInputs  # the same of the draft model
    ranks: Ranks  # the processes decoding the call together
    row_lists: RowLists  # processors and criteria per row
    foreign_code: tuple[ForeignCode, ...]  # user code in the target; it may address rows by index

    @property
    def do_sample(self) -> bool:
        """Whether the call samples."""
        return bool(self.generation_config.do_sample)

    @property
    def max_length(self) -> int:
        """Maximum columns of the output."""
        return int(self.generation_config.max_length)

    @cached_property
    def pad_token_id(self) -> int | None:
        """Padding id for finished rows; None if the call has none.

        Cached, because reading it may wait for a device.
        """
        return pad_token_id(self.generation_config)

    @property
    def prefill_chunk_size(self) -> int | None:
        """Prompt tokens per forward; None for all at once."""
        size: int | None = self.generation_config.prefill_chunk_size
        return size

    @property
    def recorded(self) -> Recorded:
        """Requested outputs besides tokens."""
        if not self.generation_config.return_dict_in_generate:
            return Recorded()
        return Recorded(
            *(bool(getattr(self.generation_config, f"output_{name}")) for name in Recorded._fields)
        )

    @property
    def is_static(self) -> bool:
        """Whether the call requests buffers of fixed size."""
        return self.is_static_named or self.generation_config.compile_config is not None

    @cached_property
    def binds_rows(self) -> bool:
        """Whether code in the target may hold an adapter or a vector per row, by batch index."""
        return bool(self.foreign_code) or adapters_by_row(self.target)

    @property
    def for_generators(self) -> dict[str, Any]:
        """Arguments of transformers' candidate generators, with a copy of the generation config."""
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
        """Tokens read by the target but not in the output: cached ones, embeddings without ids."""
        return num_cached(self.cache) + self.prompts.num_ahead

    @property
    def max_columns(self) -> int:
        return self.max_length + self.num_hidden

    @property
    def max_position(self) -> int:
        """Position id of the last token read by the target in a row without padding."""
        return max(self.max_columns - 2, 0)

    @property
    def num_prompt_tokens(self) -> list[int]:
        """[B] real tokens of each prompt, those of a passed cache included."""
        if self.prompts.attention_mask is None:
            return [self.prompts.input_ids.shape[1] + self.num_hidden] * self.batch_size
        counts: list[int] = self.prompts.attention_mask.sum(1).tolist()
        return counts
