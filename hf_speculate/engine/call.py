"""A prepared call: what one `generate()` call hands to the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import num_held
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import DraftSource
from hf_speculate.draft.vocab_mapping import VocabMapping
from hf_speculate.engine.ranks import ONE_PROCESS, Ranks
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria


class Recorded(NamedTuple):
    """The outputs that the call asked for besides tokens."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False


def recorded_of(generation_config: GenerationConfig) -> Recorded:
    """The outputs that a call asks for."""
    if not generation_config.return_dict_in_generate:
        return Recorded()
    return Recorded(*(bool(getattr(generation_config, f"output_{name}")) for name in Recorded._fields))


@dataclass(frozen=True)
class RunnerRequest:
    """The fixed buffers and compiled forwards that a call asks for."""

    is_static: bool = False  # whether buffers never grow
    settings: Mapping[str, CompileConfig] = field(default_factory=dict)  # of the models, "target" and "draft"
    min_columns: int = 0  # columns that buffers have at least
    reasons: tuple[str, ...] = ()  # why what was to be compiled runs eagerly


@dataclass(frozen=True)
class Call:
    """A prepared call: what is asked for."""

    target: PreTrainedModel
    source: DraftSource  # what drafts
    config: SpeculationConfig  # resolved settings
    input_ids: Tensor  # [B, T] int64, the left-padded prompts
    query_ids: Tensor  # [B, Q] int64, the prompt tokens that the cache does not hold
    attention_mask: Tensor | None  # [B, P] int64 over the cache's states and the query; None if nothing is padded
    cache: Cache  # the target's, empty or prefilled
    is_cache_passed: bool  # whether the user passed this cache
    is_cache_kept: bool  # whether the cache, or the static one that it is copied to, outlives the call
    processors: BlockLogitsProcessorList  # the target's logits processors
    criteria: BlockStoppingCriteria  # the stopping criteria
    do_sample: bool  # whether the call samples
    max_length: int  # columns of the output at most
    pad_token_id: int | None  # fills finished rows
    prefill_chunk_size: int | None  # prompt tokens per forward; None for all at once
    recorded: Recorded  # the outputs that the call asked for
    streamer: Any  # is handed every new token of the row; or None
    static: RunnerRequest = field(default_factory=RunnerRequest)  # the fixed buffers and compiled forwards asked for
    target_inputs: ExtraInputs = field(default_factory=ExtraInputs)  # what the target reads besides tokens
    draft_inputs: ExtraInputs = field(default_factory=ExtraInputs)  # the same of the draft model
    self_test: str = ""  # how the target compares with plain decoding; empty if its type is known to agree
    ranks: Ranks = ONE_PROCESS  # the processes that decode the call together
    first_row: int = 0  # number of the first output row
    rows_leave: bool = False  # whether each row ends by itself, to make room for another prompt

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

    @property
    def row_ids(self) -> range:
        return range(self.first_row, self.first_row + self.batch_size)

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def max_new_tokens(self) -> int:
        return self.max_length - self.input_ids.shape[1]

    @property
    def num_hidden(self) -> int:
        """Tokens that the target reads but the output does not show: of a passed cache, or embeddings without ids."""
        return num_held(self.cache) + self.query_ids.shape[1] - self.input_ids.shape[1]

    @property
    def max_columns(self) -> int:
        return self.max_length + self.num_hidden

    @property
    def max_position(self) -> int:
        """The position id of the last token that the target reads in a row without padding."""
        return max(self.max_columns - 2, 0)

    @property
    def text_mask(self) -> Tensor | None:
        """[B, T] int64, 1 for real tokens among the prompt's ids; None if all are, or if embeddings have no ids."""
        num_ids = self.input_ids.shape[1]
        if self.attention_mask is None or not 0 < num_ids <= self.attention_mask.shape[1]:
            return None
        return self.attention_mask[:, -num_ids:]

    @property
    def num_pads(self) -> list[int]:
        mask = self.text_mask
        if mask is None:
            return [0] * self.batch_size
        pads: list[int] = mask.argmax(dim=1).tolist()
        return pads

    @property
    def num_prompt_tokens(self) -> list[int]:
        """[B] real tokens that the target has read of each prompt, those of a passed cache included."""
        if self.attention_mask is None:
            return [self.input_ids.shape[1] + self.num_hidden] * self.batch_size
        counts: list[int] = self.attention_mask.sum(1).tolist()
        return counts
