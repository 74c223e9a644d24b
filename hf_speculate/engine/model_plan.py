"""Model plan: what a call decides for one of its models."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_speculate.cache.base import KVCache
from hf_speculate.engine.call import Call
from hf_speculate.models.cache_kinds import Buffers, CachePlan
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import device_of
from hf_speculate.models.wrapper_probe import HandedOn


class ModelPlan(NamedTuple):
    """One model of a call: its KV cache, and what keeps its forwards from being compiled or captured."""

    part: str  # "target" or "draft"
    model: PreTrainedModel
    device: torch.device  # device of its KV cache
    inputs: ExtraInputs  # what it reads besides tokens
    cache: CachePlan
    first_states: Cache | None  # the states that the call begins with; None for none
    mask: Tensor | None  # [B, P] int64 over these and the prompt, on the device; None if nothing is padded
    eager_reason: str = ""  # why the drafter cannot read hidden states of compiled forwards; empty if it can
    ungraphed: str = ""  # why it cannot run from graphs, if the call says so

    def make_cache(self, batch_size: int, buffers: Buffers) -> KVCache:
        """The planned KV cache of B rows."""
        return self.cache.make(self.model, self.first_states, batch_size, self.mask, self.device, buffers)


def plan_target(call: Call, hidden_layers: tuple[int, ...] | None) -> ModelPlan:
    """The plan of the target; the drafter reads the states of some of its layers."""
    eager_reason = ""
    if hidden_layers and call.source.reads_outputs:
        eager_reason = call.source.reads_outputs
    elif call.target.config.get_text_config(decoder=True).num_hidden_layers in (hidden_layers or ()):
        eager_reason = "whose state before the final norm the drafter reads"
    ungraphed = ""
    if call.row_lists.rows_leave:
        ungraphed = "rows of the batch are refilled"
    elif call.recorded.hidden_states or call.recorded.attentions:
        ungraphed = "hidden states or attentions are returned"
    device, cache = call.prompts.input_ids.device, target_cache_plan(call)
    rest = call.cache, _moved(call.prompts.attention_mask, device), eager_reason, ungraphed
    return ModelPlan("target", call.target, device, call.target_inputs, cache, *rest)


def plan_draft(call: Call, draft: PreTrainedModel, target: ModelPlan) -> ModelPlan:
    """The plan of the model that drafts."""
    device = device_of(draft)
    mask = _moved(call.prompts.text_mask, device)
    cache = CachePlan(
        call.config.speculation_cache,
        crosses=call.draft_inputs.crosses,
        max_columns=call.max_length,
        num_recurrent_states=target.cache.num_recurrent_states,
        handed_on=HandedOn.of(draft),
    ).choose(draft, None, mask, device)
    if cache.kind == "preallocated" and cache.requested == "auto" and call.config.draft_state is not None:
        layers = DynamicCache(config=draft.config.get_text_config(decoder=True))
        if any(layers.is_sliding) and not call.static.is_static:
            reason = "growing buffers drop what lies behind a window, and draft_state keeps all states"
            cache = replace(cache, kind="dynamic", reason=reason)
    ungraphed = target.ungraphed if call.vocabulary is None else "its vocabulary is another one"
    return ModelPlan("draft", draft, device, call.draft_inputs, cache, None, mask, ungraphed=ungraphed)


def target_cache_plan(call: Call) -> CachePlan:
    """The target's KV cache, with buffers that grow."""
    plan = CachePlan(
        call.config.speculation_cache,
        call.is_cache_passed,
        call.is_cache_kept,
        call.recorded.attentions,
        call.target_inputs.crosses,
        max_columns=call.max_columns,
        num_recurrent_states=call.batch_size * (call.config.max_draft_tokens + 1),
        handed_on=HandedOn.of(call.target),
    )
    return plan.choose(call.target, call.cache, call.prompts.attention_mask, call.prompts.input_ids.device)


def _moved(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None else mask.to(device)
