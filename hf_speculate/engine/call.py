"""A prepared call: what one `generate()` call hands to the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import num_cached
from hf_speculate.compat import pad_token_id
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import DraftSource
from hf_speculate.draft.vocab_mapping import VocabMapping
from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.engine.row_lists import ONE_CALL, RowLists
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.foreign_code import ForeignCode
from hf_speculate.models.module_walk import adapters_by_row
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria


class Recorded(NamedTuple):
    """The outputs that the call asked for besides tokens."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False


@dataclass(frozen=True)
class RunnerRequest:
    """The fixed buffers and compiled forwards that a call asks for."""

    is_static: bool = False  # whether buffers never grow
    settings: Mapping[str, CompileConfig] = field(default_factory=dict)  # by model, "target" and "draft"
    min_columns: int = 0  # columns that buffers have at least
    reasons: tuple[str, ...] = ()  # why what was to be compiled runs eagerly


@dataclass(frozen=True)
class Prompts:
    """The prompts of B rows."""

    input_ids: Tensor  # [B, T] int64, left-padded
    query_ids: Tensor  # [B, Q] int64, their tokens that the cache does not hold
    attention_mask: Tensor | None  # [B, P] int64 over the cache's states and the query; None if nothing is padded

    @property
    def num_ahead(self) -> int:
        """Columns of the query less those of the ids: tokens of embeddings have no ids, those in the cache no query."""
        return self.query_ids.shape[1] - self.input_ids.shape[1]

    @property
    def text_mask(self) -> Tensor | None:
        """[B, T] int64, 1 for real tokens among the ids; None if all are, or if embeddings have no ids."""
        num_ids = self.input_ids.shape[1]
        if self.attention_mask is None or not 0 < num_ids <= self.attention_mask.shape[1]:
            return None
        return self.attention_mask[:, -num_ids:]

    def real_ids(self, row: int) -> list[int]:
        """Return the ids of a row without its padding."""
        ids: list[int] = self.input_ids[row, self.num_pads[row] :].tolist()
        return ids

    @property
    def num_pads(self) -> list[int]:
        """[B] columns of padding before each row."""
        mask = self.text_mask
        if mask is None:
            return [0] * self.input_ids.shape[0]
        pads: list[int] = mask.argmax(dim=1).tolist()
        return pads


@dataclass(frozen=True)
class Call:
    """A prepared call: what is asked for."""

    target: PreTrainedModel
    source: DraftSource  # what drafts
    config: SpeculationConfig  # resolved settings
    generation_config: GenerationConfig  # as transformers has prepared it
    prompts: Prompts
    cache: Cache  # the target's, empty or prefilled
    is_cache_passed: bool  # whether the user passed this cache
    is_cache_kept: bool  # whether the cache, or the static one that it is copied to, outlives the call
    processors: BlockLogitsProcessorList  # the target's logits processors
    criteria: BlockStoppingCriteria  # the stopping criteria
    streamer: Any  # is handed every new token of the row; or None
    static: RunnerRequest = field(default_factory=RunnerRequest)  # the fixed buffers and compiled forwards asked for
    target_inputs: ExtraInputs = field(default_factory=ExtraInputs)  # what the target reads besides tokens
    draft_inputs: ExtraInputs = field(default_factory=ExtraInputs)  # the same of the draft model
    ranks: Ranks = ONE_PROCESS  # the processes that decode the call together
    row_lists: RowLists = ONE_CALL  # whether rows leave, so that others may join
    foreign_code: tuple[ForeignCode, ...] = ()  # the target's hooks of others, which may know rows by their index

    @property
    def do_sample(self) -> bool:
        """Whether the call samples."""
        return bool(self.generation_config.do_sample)

    @property
    def max_length(self) -> int:
        """Columns of the output at most."""
        return int(self.generation_config.max_length)

    @cached_property
    def pad_token_id(self) -> int | None:
        """Fills finished rows; None if the call has none. It may be read from a device, so once only."""
        return pad_token_id(self.generation_config)

    @property
    def prefill_chunk_size(self) -> int | None:
        """Prompt tokens per forward; None for all at once."""
        size: int | None = self.generation_config.prefill_chunk_size
        return size

    @property
    def recorded(self) -> Recorded:
        """The outputs that the call asks for."""
        if not self.generation_config.return_dict_in_generate:
            return Recorded()
        return Recorded(*(bool(getattr(self.generation_config, f"output_{name}")) for name in Recorded._fields))

    @property
    def draft(self) -> PreTrainedModel | None:
        """The model that drafts, or None."""
        return self.source.model

    @property
    def vocabulary(self) -> VocabMapping | None:
        """Maps the target's ids to the draft's; None if they are the same."""
        return self.source.vocabulary

    @property
    def models(self) -> list[PreTrainedModel]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @cached_property
    def binds_rows(self) -> bool:
        """Whether code in the target may hold an adapter or a vector for each row, by its index in the batch."""
        return bool(self.foreign_code) or adapters_by_row(self.target)

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
        """Tokens that the target reads but the output does not show: of a passed cache, or embeddings without ids."""
        return num_cached(self.cache) + self.prompts.num_ahead

    @property
    def max_columns(self) -> int:
        return self.max_length + self.num_hidden

    @property
    def max_position(self) -> int:
        """The position id of the last token that the target reads in a row without padding."""
        return max(self.max_columns - 2, 0)

    @property
    def num_prompt_tokens(self) -> list[int]:
        """[B] real tokens that the target has read of each prompt, those of a passed cache included."""
        if self.prompts.attention_mask is None:
            return [self.prompts.input_ids.shape[1] + self.num_hidden] * self.batch_size
        counts: list[int] = self.prompts.attention_mask.sum(1).tolist()
        return counts
