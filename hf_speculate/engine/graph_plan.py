"""Graph plan: which models of a call run from device graphs, and why the others do not."""

from collections.abc import Collection, Sequence

from hf_speculate.engine.model_plan import ModelPlan
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.models.compilation import CompiledUnits
from hf_speculate.models.graphs import FAILURE_KEY, GRAPH_BACKENDS
from hf_speculate.models.kv_size import kv_values_per_token
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.models.memory import memory_bytes
from hf_speculate.models.module_walk import has_hooks_of_others, modules_of, parameters_of
from hf_speculate.models.quirks import growing_rope

# Graphs need KV buffers of the greatest length from the start. Beyond this share of the device's memory they have to be
# asked for, or a call that allows many more tokens than it generates would run out of memory.
MAX_SHARE = 0.125


def ungraphed_reasons(
    models: Sequence[ModelPlan], graphs: str, compiled: Collection[str], batch_size: int, lens: Sequence[int]
) -> dict[str, str]:
    """Why the models that are to run from graphs cannot, empty for those that can, by part."""
    if graphs == "off":
        return {}
    if graphs == "on":
        return {one.part: _ungraphed_reason(one, one.part in compiled) for one in models}
    models = [one for one in models if one.model.device.type in GRAPH_BACKENDS and one.part not in compiled]
    reasons = {one.part: _ungraphed_reason(one) or _hook_reason(one) for one in models}
    able = [one for one in models if not reasons[one.part]]
    num_bytes = sum(_num_bytes(one, batch_size, lens) for one in able)
    if able and num_bytes > MAX_SHARE * memory_bytes(able[0].model.device):
        size, share = f"{num_bytes / 2**30:.3g} GiB", f"{MAX_SHARE:.0%}"
        reason = f"no graphs: with KV buffers of full length they may take {size}, over {share} of the device's memory"
        reasons |= {one.part: reason for one in able}
    return reasons


def _num_bytes(one: ModelPlan, batch_size: int, lens: Sequence[int]) -> int:
    """Of a model's KV buffers of full length, and of the logits that its graphs of two widths keep."""
    num_kv_values = (one.cache.max_columns or 0) * kv_values_per_token(one.model.config.get_text_config(decoder=True))
    num_logits = 2 * vocab_size_of(one.model) * (sum(num + 1 for num in lens) if one.part == "target" else 1)
    return batch_size * (num_kv_values + num_logits) * one.model.dtype.itemsize


def _hook_reason(one: ModelPlan) -> str:
    if not has_hooks_of_others(one.model):
        return ""
    return f'no graphs of the {one.part}: its hooks would run in a capture only; "on" allows that'


def _ungraphed_reason(one: ModelPlan, is_compiled: bool = False) -> str:
    model = one.model
    failure = CompiledUnits.of(model).failures.get(FAILURE_KEY)
    if failure is not None:
        return f"{one.part}: {failure}"
    name = f"no graphs of the {one.part} {type(model).__name__}"
    if one.eager_reason:
        return f"{name}, {one.eager_reason}"
    obstacles = {
        one.ungraphed: bool(one.ungraphed),
        "it runs compiled": is_compiled,
        f"graphs need a CUDA device, and it is on {model.device.type}": model.device.type not in GRAPH_BACKENDS,
        "its weights lie on several devices": len({weight.device for weight in parameters_of(model)}) > 1,
        "its states are not preallocated": one.cache.kind != "preallocated",
        "it reads more than its text": not one.inputs.is_empty,
        "it is split over processes": tensor_parallel_size(model) > 1,
        "its rotary embedding changes with the length": growing_rope(model) is not None,
        "PEFT can switch its adapters": any(type(part).__module__.startswith("peft.") for part in modules_of(model)),
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    return f"{name}: {reason}" if reason else ""
