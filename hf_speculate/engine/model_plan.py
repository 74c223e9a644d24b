"""Model plan: one model of a call, as the plan sees it."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_speculate.models.cache_kinds import CachePlan
from hf_speculate.models.extra_inputs import ExtraInputs


class ModelPlan(NamedTuple):
    """One model of a call: its KV cache, and what keeps its forwards from being compiled or captured."""

    part: str  # "target" or "draft"
    model: PreTrainedModel
    device: torch.device  # of its KV cache
    inputs: ExtraInputs  # what it reads besides tokens
    cache: CachePlan
    eager_reason: str = ""  # why the drafter cannot read hidden states of compiled forwards; empty if it can
    ungraphed: str = ""  # why it cannot run from graphs, if the call says so
