"""Plan device graphs: select the models of a call, with the reasons for excluding others."""

from collections.abc import Collection, Sequence

import torch

from hf_speculate.engine.model_plan import ModelPlan
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.models.kv_size import kv_values_per_token
from hf_speculate.models.language_model import dtype_of, vocab_size_of
from hf_speculate.models.memory import memory_bytes
from hf_speculate.models.module_walk import (
    has_hooks_of_others,
    is_compiled,
    modules_of,
    parameters_of,
)
from hf_speculate.models.quirks import growing_rope
from hf_speculate.models.runner import GRAPH_BACKENDS, CompiledUnits
from hf_speculate.options.compiled.code_graphs import has_code
from hf_speculate.options.compiled.graphs import FAILURE_KEY
from hf_speculate.options.compiled.plan import GraphPlan

# Graphs need KV buffers of maximum length from the start. A call may allow many more tokens than it
# generates and would run out of memory, so "auto" stops at this share of the device's memory.
MAX_SHARE = 0.125


def plan_graphs(
    models: Sequence[ModelPlan],
    graphs: str,
    compiled: Collection[str],
    batch_size: int,
    lens: Sequence[int],
) -> GraphPlan:
    """Plan which models run from graphs, if `graphs` is "on" or "auto"."""
    if graphs == "on":
        return GraphPlan(
            {plan.part: _ungraphed_reason(plan, plan.part in compiled) for plan in models}
        )
    models = [
        plan
        for plan in models
        if plan.model.device.type in GRAPH_BACKENDS and plan.part not in compiled
    ]
    reasons = {plan.part: _ungraphed_reason(plan) or _hook_reason(plan) for plan in models}
    able = [plan for plan in models if not reasons[plan.part]]
    num_bytes = sum(_num_bytes(plan, batch_size, lens) for plan in able)
    if able and num_bytes > MAX_SHARE * memory_bytes(able[0].model.device):
        size, share = f"{num_bytes / 2**30:.3g} GiB", f"{MAX_SHARE:.0%}"
        reason = (
            f"no graphs: with KV buffers of full length they may take {size}, over {share} of the "
            "device's memory"
        )
        reasons |= {plan.part: reason for plan in able}
    coded = tuple(plan.part for plan in able if not reasons[plan.part] and has_code(plan.model))
    return GraphPlan(reasons, is_tried=True, coded=coded)


def _num_bytes(plan: ModelPlan, batch_size: int, lens: Sequence[int]) -> int:
    """Return the bytes of full-length KV buffers and of the logits in graphs of two widths.

    Warpers in the graphs need the logits in float32 as well.
    """
    config, num_columns = (
        plan.model.config.get_text_config(decoder=True),
        plan.request.max_columns or 0,
    )
    num_kv_values = num_columns * kv_values_per_token(config)
    num_logits = 2 * vocab_size_of(plan.model) * sum(length + 1 for length in lens)
    itemsize = dtype_of(plan.model).itemsize
    num_bytes = num_kv_values * itemsize + num_logits * (itemsize + torch.float32.itemsize)
    return batch_size * num_bytes


def _hook_reason(plan: ModelPlan) -> str:
    if not has_hooks_of_others(plan.model):
        return ""
    return f'no graphs of the {plan.part}: its hooks would run in a capture only; "on" allows that'


def _ungraphed_reason(plan: ModelPlan, runs_compiled: bool = False) -> str:
    failure = CompiledUnits.of(plan.model).failures.get(FAILURE_KEY)
    if failure is not None:
        return f"{plan.part}: {failure}"
    name = f"no graphs of the {plan.part} {type(plan.model).__name__}"
    if plan.eager_reason:
        return f"{name}, {plan.eager_reason}"
    obstacle = plan.ungraphed or _obstacle(plan, runs_compiled)
    return f"{name}: {obstacle}" if obstacle else ""


def _obstacle(plan: ModelPlan, runs_compiled: bool) -> str:
    """Return why a model cannot run from graphs; empty if it can."""
    model = plan.model
    if runs_compiled:
        return "it runs compiled"
    if model.device.type not in GRAPH_BACKENDS:
        return f"graphs need a CUDA device, and it is on {model.device.type}"
    if len({weight.device for weight in parameters_of(model)}) > 1:
        return "its weights lie on several devices"
    if plan.cache_kind != "preallocated":
        return "its states are not preallocated"
    if not plan.inputs.is_empty:
        return "it reads more than its text"
    if is_compiled(model):
        return "its forward was compiled by the caller"
    if tensor_parallel_size(model) > 1:
        return "it is split over processes"
    if growing_rope(model) is not None:
        return "its rotary embedding changes with the length"
    if any(type(part).__module__.startswith("peft.") for part in modules_of(model)):
        return "PEFT can switch its adapters"
    return ""
