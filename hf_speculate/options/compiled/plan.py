"""Select forwards to run compiled or from graphs, with the reasons for excluding others."""

import pkgutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel

from hf_speculate.cache.ragged_layer import even_capacity
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.engine.model_plan import ModelPlan
from hf_speculate.engine.runners import RunnerRequest, Runners
from hf_speculate.models.cache_kinds import Buffers
from hf_speculate.models.context import Context
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.runner import GRAPH_BACKENDS, CompiledUnits
from hf_speculate.options.compiled.buffer_pool import BufferPool
from hf_speculate.options.compiled.compilation import Compilation, Runner, settings_key, warn_once
from hf_speculate.options.compiled.drafter import STEP_QUERY_LEN, CompiledDrafter
from hf_speculate.options.compiled.language_model import UNREAD_COLUMNS, CompiledLanguageModel

# The length of fixed buffers is a multiple of this, so calls of similar length have buffers of the
# same length.
CAPACITY_UNIT = 128
# Only imported if a call may run from graphs.
_PLAN_GRAPHS, _GRAPHING, _FASTEST_GRAPHING = (
    "hf_speculate.options.compiled.graph_plan:plan_graphs",
    "hf_speculate.options.compiled.graphs:Graphing",
    "hf_speculate.options.compiled.code_graphs:FastestGraphing",
)


class GraphPlan(NamedTuple):
    """The models of a call that run from device graphs."""

    reasons: dict[str, str]  # part -> why it does not run from graphs; empty if it does
    # whether graphs are first compared with eager forwards, and only used if faster
    is_tried: bool = False
    coded: tuple[str, ...] = ()  # parts that earlier calls have compiled for graphs


NO_GRAPHS = GraphPlan({})


@dataclass(frozen=True, kw_only=True)
class CompiledRunners(Runners):
    """The compiled and graphed forwards of a call, with their fixed buffers."""

    is_static: bool = False  # whether buffers never grow
    min_columns: int = 0  # minimum number of columns in the buffers
    is_tried: bool = False  # see `GraphPlan`
    # called with the part and the reason if the part falls back to eager forwards
    on_failure: Callable[[str, str], None]
    # called with the part, and with the reason if it does not run from graphs of compiled code
    on_code: Callable[[str, str], None]
    _at_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def max_query(self) -> int | None:
        return max(self.lens, default=0) + 1 if self.is_static else None

    def buffers(self, model_plan: ModelPlan) -> Buffers:
        # Eager forwards would create inference tensors, to which later calls could not write.
        pool = BufferPool.of(model_plan.model) if model_plan.part in self.parts else None
        return Buffers(self._capacity(model_plan.request.max_columns or 0, model_plan.device), pool)

    def language_model(
        self,
        part: str,
        model: PreTrainedModel,
        inputs: ExtraInputs,
        max_position: int | None,
        capture: Any = None,
    ) -> CompiledLanguageModel | None:
        units, fail = CompiledUnits.of(model), partial(self.on_failure, part)
        if part in self.settings:
            runner: Runner = Compilation(model, self.settings[part], units, fail)
        elif part in self.graphed and self.is_tried:
            num_query = STEP_QUERY_LEN if part == "draft" else max(self.lens, default=0) + 1
            layers = () if capture is None else tuple(capture.layers)
            runner = pkgutil.resolve_name(_FASTEST_GRAPHING)(
                model, units, fail, partial(self.on_code, part), num_query, layers
            )
        elif part in self.graphed:
            runner = pkgutil.resolve_name(_GRAPHING)(model, units, fail, is_tried=False)
        else:
            return None
        varies = runner.varies and model.device.type != "cuda"
        query_lens = (STEP_QUERY_LEN,) if part == "draft" else _query_lens(self.lens, varies)
        return CompiledLanguageModel(model, max_position, runner, query_lens, inputs, capture)

    def model_drafter(
        self,
        model: PreTrainedModel,
        setup: DrafterSetup,
        max_position: int | None,
        chunk_size: int | None,
        settings: DraftSettings,
        context: Context | None,
    ) -> CompiledDrafter | None:
        compiled = self.language_model("draft", model, setup.inputs, max_position)
        if compiled is None:
            return None
        # If K is constant, the last round is rounded up.
        step_lens = self.lens if len(self.lens) == 1 else (1, *self.lens)
        return CompiledDrafter(
            Inferencer(compiled, chunk_size),
            setup.processors,
            settings,
            context,
            step_lens if "draft" in self.graphed else (),
        )

    def shares_code(self, device: torch.device) -> bool:
        config = self.settings.get("target")
        is_dynamic = config is None or (config.dynamic is not False and device.type != "cuda")
        return is_dynamic and not self.graphed

    def head_graphs(self, network: nn.Module, key: Hashable) -> Any | None:
        if "target" not in self.graphed:
            return None
        units, fail = CompiledUnits.of(network), partial(self.on_failure, "draft")
        graphs = pkgutil.resolve_name(_GRAPHING)(network, units, fail, self.is_tried, key)
        failure = units.failures.get(graphs.failure_key)
        if failure is not None:
            graphs.give_up(failure)
        return graphs

    def at_end(self, function: Callable[[], None]) -> None:
        self._at_end.append(function)

    def end(self) -> None:
        while self._at_end:
            self._at_end.pop()()

    def _capacity(self, max_columns: int, device: torch.device) -> int | None:
        """Return the number of columns in fixed buffers for `max_columns` and one more round.

        None if buffers grow.
        """
        if not self.is_static:
            return None
        num_columns = (
            max(max_columns, self.min_columns) + max(self.lens, default=0) + 1 + UNREAD_COLUMNS
        )
        return even_columns(num_columns, device)


def even_columns(num_columns: int, device: torch.device) -> int:
    """Round a number of columns up, so that calls of similar length share their buffers."""
    if device.type == "cuda":
        return even_capacity(num_columns)
    return -(-num_columns // CAPACITY_UNIT) * CAPACITY_UNIT


def make_runners(
    request: RunnerRequest,
    lens: tuple[int, ...],
    models: Sequence[ModelPlan],
    graphs: str,
    batch_size: int,
    on_failure: Callable[[str, str], None],
    on_code: Callable[[str, str], None],
) -> CompiledRunners:
    """Select the forwards that can run compiled or from graphs; see `find_runners`."""
    wanted = [model_plan for model_plan in models if model_plan.part in request.settings]
    uncompiled = {
        model_plan.part: _eager_reason(model_plan, request.settings[model_plan.part])
        for model_plan in wanted
    }
    settings = {part: request.settings[part] for part, reason in uncompiled.items() if not reason}
    plan = NO_GRAPHS
    if graphs == "on" or (
        graphs == "auto"
        and any(model_plan.model.device.type in GRAPH_BACKENDS for model_plan in models)
    ):
        plan = pkgutil.resolve_name(_PLAN_GRAPHS)(models, graphs, settings, batch_size, lens)
    ungraphed = plan.reasons
    graphed = tuple(part for part, reason in ungraphed.items() if not reason)
    reasons = tuple(filter(None, (*request.reasons, *uncompiled.values(), *ungraphed.values())))
    for reason in reasons:
        if graphs == "on" or reason not in ungraphed.values():  # no warning about "auto" graphs
            warn_once(reason)
    is_static = request.is_static or bool(graphed)
    return CompiledRunners(
        settings=settings,
        graphed=graphed,
        reasons=reasons,
        is_static=is_static,
        lens=lens if is_static else (),
        min_columns=request.min_columns,
        is_tried=plan.is_tried,
        coded=plan.coded,
        on_failure=on_failure,
        on_code=on_code,
    )


def _query_lens(lens: Sequence[int], varies: bool) -> tuple[int, ...]:
    """Return the lengths Q of the target's queries; other lengths are rounded up to one of these.

    A CUDA graph is recorded for each length.
    """
    if not lens:
        return (1,)
    if varies:  # one compilation works for every Q from 2 on; a single token would recompile
        return tuple(range(2, max(lens) + 2))
    # If K varies, plain steps run at length 2. If K is constant, the last round is rounded up.
    return (*(() if len(lens) == 1 else (2,)), *(length + 1 for length in lens))


def _eager_reason(model_plan: ModelPlan, config: CompileConfig) -> str:
    reason = model_plan.eager_reason
    if model_plan.cache_kind != "preallocated":
        reason = "whose states are not preallocated"
    elif not model_plan.inputs.is_empty:
        reason = "which reads more than its text"
    if reason:
        return (
            f"eager forwards of the {model_plan.part} {type(model_plan.model).__name__}, {reason}"
        )
    failure = CompiledUnits.of(model_plan.model).failures.get(settings_key(config))
    return "" if failure is None else f"{model_plan.part}: {failure}"
