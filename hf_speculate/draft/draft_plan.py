"""Draft plan: what the plan of a call tells the draft source that makes the drafter."""

from collections.abc import Callable
from dataclasses import dataclass

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.models.context import Context
from hf_speculate.models.extra_inputs import ExtraInputs


@dataclass(frozen=True, kw_only=True)
class DraftPlan(DrafterSetup):
    """What a drafter is made from: what every drafter is told, the settings, and what concerns draft models."""

    config: SpeculationConfig
    inputs: ExtraInputs  # what the model reads besides tokens
    prompt_len: int  # tokens of the longest prompt
    num_query: int  # tokens of a prompt that the target reads in one forward
    max_position: int  # the position id of the last token that the target reads in a row without padding
    is_distributed: bool  # whether several processes decode the call
    meet: Callable[[], None] | None  # called before each forward, by synced ranks; None without them
    # makes the drafter of compiled forwards from its largest position, prompt tokens per forward, settings and context;
    # None if forwards are eager
    make_compiled: Callable[[int, int | None, DraftSettings, Context | None], ModelDrafter | None]
