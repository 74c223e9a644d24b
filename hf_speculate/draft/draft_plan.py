"""Draft plan: what the plan of a call tells the draft source that makes the drafter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.models.context import Context
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.processors import BlockLogitsProcessorList


@dataclass(frozen=True)
class DraftPlan:
    """Parts that a drafter is made from; all but the first two fields concern draft models."""

    setup: DrafterSetup  # what custom drafters are told, too
    config: SpeculationConfig
    inputs: ExtraInputs  # what the model reads besides tokens
    prompt_len: int  # tokens of the longest prompt
    num_query: int  # tokens of a prompt that the target reads in one forward
    max_position: int  # the position id of the last token that the target reads in a row without padding
    processors: BlockLogitsProcessorList  # processors of the drafted logits
    row_processors: Any  # the same, in groups if rows leave the batch one by one
    is_distributed: bool  # whether several processes decode the call
    meet: Callable[[], None] | None  # called before each forward, by synced ranks; None without them
    # makes the drafter of compiled forwards from its largest position, prompt tokens per forward, settings and context;
    # None if forwards are eager
    make_compiled: Callable[[int, int | None, DraftSettings, Context | None], ModelDrafter | None]
