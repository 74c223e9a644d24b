"""Model plan: the decisions about one model of a call."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.call import Call
from hf_speculate.models.cache_kinds import GROWING, Buffers, CacheRequest, choose_kind, find_kind
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.foreign_code import described
from hf_speculate.models.language_model import device_of
from hf_speculate.models.wrapper_probe import HandedOn


class ModelPlan(NamedTuple):
    """One model of a call.

    It contains the chosen KV cache and the reasons against compiled or captured forwards.
    """

    part: str  # "target" or "draft"
    request: CacheRequest  # requirements for its KV cache
    cache_kind: str  # "dynamic", "preallocated" or "hybrid"
    cache_reason: str  # why a preferred "preallocated" was not chosen, or how "hybrid" rolls back
    inputs: ExtraInputs  # the model's inputs other than tokens
    # why the drafter cannot read hidden states from compiled forwards; empty if it can
    eager_reason: str = ""
    ungraphed: str = ""  # why the call rules out graphs; empty if it does not

    @property
    def model(self) -> PreTrainedModel:
        return self.request.model

    @property
    def device(self) -> torch.device:
        """Device of the model's KV cache."""
        return self.request.device

    @property
    def cache_description(self) -> str:
        """Kind of the model's KV cache, with the reason for the choice."""
        return f"{self.cache_kind} ({self.cache_reason})" if self.cache_reason else self.cache_kind

    def make_cache(self, batch_size: int, buffers: Buffers = GROWING) -> KVCache:
        """Make a KV cache for B rows."""
        return find_kind(self.cache_kind).make(self.request, batch_size, buffers)


def plan_target(
    call: Call,
    config: SpeculationConfig,
    source: DraftSource,
    hidden_layers: tuple[int, ...] | None = None,
) -> ModelPlan:
    """Plan the target; the drafter reads the hidden states of the layers `hidden_layers`."""
    device, model = call.prompts.input_ids.device, call.target
    request = CacheRequest(
        model,
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
        handed_on=HandedOn.of(model),
    )
    kind, reason = choose_kind(request)
    # User code may read or edit the layers of a transformers cache.
    is_free = (
        request.requested == "auto" and not call.is_static and config.speculation_graphs != "on"
    )
    if (
        call.foreign_code
        and kind == "preallocated"
        and is_free
        and not find_kind("dynamic").obstacle(request)
    ):
        kind, reason = "dynamic", f"{described(call.foreign_code)} may read or edit its layers"
    eager_reason = ""
    if hidden_layers and source.reads_outputs:
        eager_reason = source.reads_outputs
    elif model.config.get_text_config(decoder=True).num_hidden_layers in (hidden_layers or ()):
        eager_reason = "whose state before the final norm the drafter reads"
    ungraphed = ""
    if call.row_lists.rows_leave:
        ungraphed = "rows of the batch are refilled"
    elif call.recorded.hidden_states or call.recorded.attentions:
        ungraphed = "hidden states or attentions are returned"
    return ModelPlan("target", request, kind, reason, call.target_inputs, eager_reason, ungraphed)


def plan_draft(
    call: Call,
    config: SpeculationConfig,
    source: DraftSource,
    draft: PreTrainedModel,
    target: ModelPlan,
) -> ModelPlan:
    """Plan the draft model."""
    device = device_of(draft)
    request = CacheRequest(
        draft,
        None,
        _moved(call.prompts.text_mask, device),
        device,
        config.speculation_cache,
        crosses=call.draft_inputs.crosses,
        max_columns=call.max_length,
        num_recurrent_states=target.request.num_recurrent_states,
        handed_on=HandedOn.of(draft),
    )
    kind, reason = choose_kind(request)
    drops_states = kind == "preallocated" and any(request.layers.is_sliding) and not call.is_static
    if drops_states and request.requested == "auto" and config.draft_state is not None:
        kind = "dynamic"
        reason = "growing buffers drop what lies behind a window, and draft_state keeps all states"
    ungraphed = target.ungraphed if source.vocabulary is None else "its vocabulary is another one"
    return ModelPlan("draft", request, kind, reason, call.draft_inputs, ungraphed=ungraphed)


def _moved(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None else mask.to(device)
