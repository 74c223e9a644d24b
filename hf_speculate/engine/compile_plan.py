"""Compile plan: which forwards of a call run compiled, and why the others do not."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from hf_speculate.cache.buffer_pool import BufferPool
from hf_speculate.cache.ragged_layer import even_capacity
from hf_speculate.compat import compile_config_of
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.model import STEP_QUERY_LEN
from hf_speculate.engine.model_plan import ModelPlan
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.models.compilation import GRAPH_BACKENDS, LOGGER, Compilation, CompiledUnits, Runner, settings_key
from hf_speculate.models.compiled import UNREAD_COLUMNS, CompiledLanguageModel
from hf_speculate.models.layer_capture import LayerCapture

# Fixed buffers are a multiple of this long, so that calls of about one length have buffers of one length.
CAPACITY_UNIT = 128
# Imported where a call may run from graphs.
_PLAN_GRAPHS, _GRAPHING = "hf_speculate.engine.graph_plan:plan_graphs", "hf_speculate.models.graphs:Graphing"
_warn_once = cache(LOGGER.warning)


class GraphPlan(NamedTuple):
    """The models of a call that may run from device graphs."""

    reasons: dict[str, str]  # part -> why it does not run from graphs, empty if it does
    off: str = ""  # why "auto" uses none on the device
    is_tried: bool = False  # whether graphs are compared with eager forwards first, and used only where faster


NO_GRAPHS = GraphPlan({})


@dataclass(frozen=True)
class CompilePlan:
    """The forwards of a call that run compiled or from device graphs: those requested, then those that can be."""

    is_static: bool = False  # whether buffers never grow
    settings: dict[str, CompileConfig] = field(default_factory=dict)  # of the compiled models, "target" and "draft"
    # draft lengths K, ascending, the largest last; where a length is fixed, others are rounded up to these
    lens: tuple[int, ...] = ()
    min_columns: int = 0  # columns that buffers have at least
    reasons: tuple[str, ...] = ()  # why what was to be compiled or captured runs eagerly
    graphed: tuple[str, ...] = ()  # the models whose forwards run from device graphs, "target" and "draft"
    graphs: GraphPlan = NO_GRAPHS

    @property
    def keeps_buffers(self) -> bool:
        """Whether buffers outlive the call, and rows must stay where they are in them."""
        return bool(self.settings or self.graphed)

    def capacity(self, max_columns: int, device: torch.device) -> int | None:
        """Columns of fixed buffers for rows of `max_columns` and what a round writes after them; None if they grow."""
        if not self.is_static:
            return None
        num_columns = max(max_columns, self.min_columns) + max(self.lens, default=0) + 1 + UNREAD_COLUMNS
        if device.type == "cuda":
            return even_capacity(num_columns)
        return -(-num_columns // CAPACITY_UNIT) * CAPACITY_UNIT

    def pool(self, one: ModelPlan) -> BufferPool | None:
        """Where a model's buffers outlive the call; None if its forwards are eager, which make inference tensors."""
        return BufferPool.of(one.model) if one.part in (*self.settings, *self.graphed) else None

    @property
    def max_query(self) -> int | None:
        """Tokens of each row that a forward may write after the longest row; None for any number."""
        return max(self.lens, default=0) + 1 if self.is_static else None


def static_request(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    config: GenerationConfig,
    is_static: bool,
    eager_draft: str,  # why the assistant is not compiled; empty if it may be
) -> CompilePlan:
    """The fixed buffers and compiled forwards that a call asks for: no more than plain `generate` would compile."""
    if not is_static and config.compile_config is None:
        return CompilePlan()
    models = {"target": model} if assistant is None else {"target": model, "draft": assistant}
    found = {part: compile_config_of(one, config) for part, one in models.items()}
    settings = {part: one for part, one in found.items() if one is not None}
    reason = ""
    if config.compile_config is not None and "target" not in settings:
        reason = f"eager forwards: plain generate() would not compile with this compile_config on {model.device}"
    if config.output_hidden_states or config.output_attentions:
        if "target" in settings or reason:
            reason = "eager forwards, because hidden states or attentions are returned"
        settings = {}
    for part in [part for part in settings if tensor_parallel_size(models[part]) > 1]:
        del settings[part]
        reason = f"eager forwards of the {part}, which is split over processes"
    if eager_draft and settings.pop("draft", None) is not None:
        reason = f"eager forwards of the draft: {eager_draft}"
    min_columns = getattr(config, "max_cache_len", None) or 0
    return CompilePlan(True, settings, min_columns=min_columns, reasons=(reason,) if reason else ())


def make_compile_plan(
    requested: CompilePlan,
    lens: tuple[int, ...],
    models: Sequence[ModelPlan],
    graphs: str,  # `speculation_graphs`
    batch_size: int,
) -> CompilePlan:
    """What can run compiled or from graphs."""
    wanted = [one for one in models if one.part in requested.settings]
    uncompiled = {one.part: _eager_reason(one, requested.settings[one.part]) for one in wanted}
    settings = {part: requested.settings[part] for part, reason in uncompiled.items() if not reason}
    plan = NO_GRAPHS
    if graphs == "on" or (graphs == "auto" and any(one.model.device.type in GRAPH_BACKENDS for one in models)):
        plan = pkgutil.resolve_name(_PLAN_GRAPHS)(models, graphs, settings, batch_size, lens)
    ungraphed = plan.reasons
    graphed = tuple(part for part, reason in ungraphed.items() if not reason)
    reasons = tuple(filter(None, (*requested.reasons, *uncompiled.values(), *ungraphed.values())))
    for reason in reasons:
        if graphs == "on" or reason not in ungraphed.values():  # nobody asked for what "auto" cannot do
            _warn_once(reason)
    is_static = requested.is_static or bool(graphed)
    return CompilePlan(is_static, settings, lens if is_static else (), requested.min_columns, reasons, graphed, plan)


def draft_lens(config: SpeculationConfig, varies: bool) -> tuple[int, ...]:
    """The draft lengths K of compiled forwards, ascending; other lengths are rounded up to these.

    `varies` says that rounds may have any number of tokens with a constant draft length too.
    """
    num = config.max_draft_tokens
    if config.schedule == "constant" and not varies:
        return (num,)
    return (*(1 << power for power in range(1, 8) if 1 << power < num), num)  # at most half of a draft is unused


def make_compiled_model(
    one: ModelPlan,
    plan: CompilePlan,
    max_position: int | None,
    on_failure: Callable[[str, str], None],  # called with the part and the reason if it cannot be compiled or captured
    capture: LayerCapture | None = None,
) -> CompiledLanguageModel | None:
    """A model of the call whose forwards are compiled or run from graphs; None if the plan lets them run eagerly."""
    units, fail = CompiledUnits.of(one.model), partial(on_failure, one.part)
    if one.part in plan.settings:
        runner: Runner = Compilation(one.model, plan.settings[one.part], units, fail)
    elif one.part in plan.graphed:
        runner = pkgutil.resolve_name(_GRAPHING)(one.model, units, fail, plan.graphs.is_tried)
    else:
        return None
    varies = runner.varies and one.model.device.type != "cuda"
    query_lens = (STEP_QUERY_LEN,) if one.part == "draft" else _query_lens(plan.lens, varies)
    return CompiledLanguageModel(one.model, max_position, runner, query_lens, one.inputs, capture)


def _query_lens(lens: Sequence[int], varies: bool) -> tuple[int, ...]:
    """The lengths Q of the target's queries, to which others are rounded up; CUDA graphs are recorded for each."""
    if not lens:
        return (1,)
    if varies:  # one compilation serves every Q from 2 on; a single token would be compiled anew
        return tuple(range(2, max(lens) + 2))
    # If K varies, plain steps are rounds of their own; after a constant K the last one is rounded up.
    return (*(() if len(lens) == 1 else (2,)), *(num + 1 for num in lens))


def _eager_reason(one: ModelPlan, config: CompileConfig) -> str:
    reason = one.eager_reason
    if one.cache.kind != "preallocated":
        reason = "whose states are not preallocated"
    elif not one.inputs.is_empty:
        reason = "which reads more than its text"
    if reason:
        return f"eager forwards of the {one.part} {type(one.model).__name__}, {reason}"
    failure = CompiledUnits.of(one.model).failures.get(settings_key(config))
    return "" if failure is None else f"{one.part}: {failure}"
