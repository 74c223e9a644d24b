"""Model plan: what a call decides for one of its models."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.call import Call
from hf_speculate.models.cache_kinds import CachePlan, CacheRequest, find_kind, plan_cache
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.foreign_code import described
from hf_speculate.models.language_model import device_of
from hf_speculate.models.wrapper_probe import HandedOn


class ModelPlan(NamedTuple):
    """One model of a call: its KV cache, and what keeps its forwards from being compiled or captured."""

    part: str  # "target" or "draft"
    cache: CachePlan
    inputs: ExtraInputs  # what the model reads besides tokens
    eager_reason: str = ""  # why the drafter cannot read hidden states of compiled forwards; empty if it can
    ungraphed: str = ""  # why it cannot run from graphs, if the call says so

    @property
    def model(self) -> PreTrainedModel:
        return self.cache.request.model

    @property
    def device(self) -> torch.device:
        """Where its KV cache is."""
        return self.cache.request.device


def plan_target(
    call: Call, config: SpeculationConfig, source: DraftSource, hidden_layers: tuple[int, ...] | None
) -> ModelPlan:
    """The plan of the target; the drafter reads the states of some of its layers."""
    eager_reason = ""
    if hidden_layers and source.reads_outputs:
        eager_reason = source.reads_outputs
    elif call.target.config.get_text_config(decoder=True).num_hidden_layers in (hidden_layers or ()):
        eager_reason = "whose state before the final norm the drafter reads"
    ungraphed = ""
    if call.row_lists.rows_leave:
        ungraphed = "rows of the batch are refilled"
    elif call.recorded.hidden_states or call.recorded.attentions:
        ungraphed = "hidden states or attentions are returned"
    return ModelPlan("target", plan_target_cache(call, config), call.target_inputs, eager_reason, ungraphed)


def plan_draft(
    call: Call, config: SpeculationConfig, source: DraftSource, draft: PreTrainedModel, target: ModelPlan
) -> ModelPlan:
    """The plan of the model that drafts."""
    device = device_of(draft)
    request = CacheRequest(
        draft,
        None,
        _moved(call.prompts.text_mask, device),
        device,
        config.speculation_cache,
        crosses=call.draft_inputs.crosses,
        max_columns=call.max_length,
        num_recurrent_states=target.cache.request.num_recurrent_states,
        handed_on=HandedOn.of(draft),
    )
    cache = plan_cache(request)
    drops_states = cache.kind == "preallocated" and any(request.layers.is_sliding) and not call.is_static
    if drops_states and request.requested == "auto" and config.draft_state is not None:
        reason = "growing buffers drop what lies behind a window, and draft_state keeps all states"
        cache = CachePlan(request, "dynamic", reason)
    ungraphed = target.ungraphed if source.vocabulary is None else "its vocabulary is another one"
    return ModelPlan("draft", cache, call.draft_inputs, ungraphed=ungraphed)


def plan_target_cache(call: Call, config: SpeculationConfig) -> CachePlan:
    """The target's KV cache."""
    device = call.prompts.input_ids.device
    request = CacheRequest(
        call.target,
        call.cache,
        _moved(call.prompts.attention_mask, device),
        device,
        config.speculation_cache,
        call.is_cache_passed,
        call.is_cache_kept,
        call.recorded.attentions,
        call.target_inputs.crosses,
        max_columns=call.max_columns,
        num_recurrent_states=call.batch_size * (config.max_draft_tokens + 1),
        handed_on=HandedOn.of(call.target),
    )
    plan = plan_cache(request)
    if not call.foreign_code or plan.kind != "preallocated" or request.requested != "auto":
        return plan
    if call.is_static or config.speculation_graphs == "on" or find_kind("dynamic").obstacle(request):
        return plan
    return CachePlan(request, "dynamic", f"{described(call.foreign_code)} may read or edit its layers")


def _moved(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None else mask.to(device)
