"""Graph plan: which forwards of a call run from device graphs, and why the others do not."""

from dataclasses import replace

from hf_speculate.engine.compile_plan import CompileCandidate, CompilePlan, warn_once
from hf_speculate.engine.distributed import tensor_parallel_size
from hf_speculate.engine.model_state import model_state
from hf_speculate.models.graphs import FAILURE_KEY, GRAPH_BACKENDS
from hf_speculate.models.quirks import growing_rope


def with_graphs(
    plan: CompilePlan, lens: tuple[int, ...], candidates: list[CompileCandidate], graphs: str
) -> CompilePlan:
    """The plan of a call, in which eager forwards run from graphs if they can; "auto" is "off" until tested."""
    if graphs != "on":
        return plan
    found = {candidate.part: _eager_reason(candidate, plan) for candidate in candidates}
    graphed, reasons = tuple(part for part in found if not found[part]), tuple(filter(None, found.values()))
    for reason in reasons:
        warn_once(reason)
    is_static = plan.is_static or bool(graphed)
    return replace(
        plan, is_static=is_static, lens=lens if graphed else plan.lens, reasons=plan.reasons + reasons, graphed=graphed
    )


def _eager_reason(candidate: CompileCandidate, plan: CompilePlan) -> str:
    """Why a model cannot run from device graphs; empty if it can."""
    part, model = candidate.part, candidate.model
    devices = {parameter.device for parameter in model.parameters()}
    obstacles = {
        candidate.ungraphed: bool(candidate.ungraphed),
        "it runs compiled": part in plan.compiled,
        f"graphs need a CUDA device, and it is on {model.device.type}": model.device.type not in GRAPH_BACKENDS,
        "its weights lie on several devices": len(devices) > 1,
        "its states are not preallocated": candidate.cache_kind != "preallocated",
        "it reads more than its text": not candidate.extra_inputs.is_empty,
        "it is split over processes": tensor_parallel_size(model) > 1,
        "its rotary embedding changes with the length": growing_rope(model) is not None,
        "PEFT can switch its adapters": any(type(one).__module__.startswith("peft.") for one in model.modules()),
    }
    failure = model_state(model).units.failure(FAILURE_KEY)
    if failure is not None:
        return f"{part}: {failure}"
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    name = f"no graphs of the {part} {type(model).__name__}"
    if candidate.eager_reason:
        return f"{name}, {candidate.eager_reason}"
    return f"{name}: {reason}" if reason else ""
