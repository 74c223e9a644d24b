"""Compile plan: which forwards of a call run compiled, and why the others do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from hf_speculate.cache.ragged_layer import even_capacity
from hf_speculate.compat import compile_config_of
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.compiled import STEP_QUERY_LEN
from hf_speculate.engine.distributed import tensor_parallel_size
from hf_speculate.engine.model_state import model_state
from hf_speculate.models.compilation import LOGGER, Compilation, CompileSettings
from hf_speculate.models.compiled import UNREAD_COLUMNS, CompiledLanguageModel, Runner
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.graphs import Graphing
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.models.layer_capture import LayerCapture

# Fixed buffers are a multiple of this long, so that calls of about one length have buffers of one length.
CAPACITY_UNIT = 128


class StaticRequest(NamedTuple):
    """A call's request for buffers that never grow, and for compiled forwards over them."""

    settings: dict[str, CompileSettings]  # of the models to compile, "target" and "draft"
    eager_reason: str  # what stays eager though it was to be compiled, and why; empty if nothing does
    min_columns: int  # columns that buffers have at least


def static_request(
    model: PreTrainedModel, assistant: PreTrainedModel | None, config: GenerationConfig, is_static: bool
) -> StaticRequest | None:
    """The request of a call; None if it asks for neither. What plain `generate` would not compile is not compiled."""
    if not is_static and config.compile_config is None:
        return None
    models = {"target": model} if assistant is None else {"target": model, "draft": assistant}
    found = {part: compile_config_of(one, config) for part, one in models.items()}
    settings = {part: _settings(one) for part, one in found.items() if one is not None}
    reason = ""
    if config.compile_config is not None and "target" not in settings:
        reason = (
            f"eager forwards, because plain generate() would not compile with this compile_config on {model.device}"
        )
    if config.output_hidden_states or config.output_attentions:
        if "target" in settings or reason:
            reason = "eager forwards, because hidden states or attentions are returned"
        settings = {}
    for part in [part for part in settings if tensor_parallel_size(models[part]) > 1]:
        del settings[part]
        reason = f"eager forwards of the {part}, which is split over processes"
    return StaticRequest(settings, reason, getattr(config, "max_cache_len", None) or 0)


def with_eager_draft(request: StaticRequest | None, reason: str) -> StaticRequest | None:
    """The same request without compiled forwards of the draft; an empty reason leaves it as it is."""
    if request is None or "draft" not in request.settings or not reason:
        return request
    settings = {part: one for part, one in request.settings.items() if part != "draft"}
    return request._replace(settings=settings, eager_reason=f"eager forwards of the draft: {reason}")


@dataclass(frozen=True)
class CompilePlan:
    """The forwards of a call that run compiled or from device graphs."""

    is_static: bool = False  # whether buffers never grow
    settings: dict[str, CompileSettings] = field(default_factory=dict)  # of the compiled models, "target" and "draft"
    # draft lengths K, ascending, the largest last; where a length is fixed, others are rounded up to these
    lens: tuple[int, ...] = ()
    min_columns: int = 0  # columns that buffers have at least
    reasons: tuple[str, ...] = ()  # why what was to be compiled or captured runs eagerly
    graphed: tuple[str, ...] = ()  # the models whose forwards run from device graphs, "target" and "draft"

    @property
    def keeps_buffers(self) -> bool:
        """Whether buffers outlive the call, and rows must stay where they are in them."""
        return bool(self.compiled or self.graphed)

    @property
    def compiled(self) -> list[str]:
        return list(self.settings)

    def capacity(self, max_columns: int, device: torch.device) -> int | None:
        """Columns of fixed buffers for rows of `max_columns` and what a round writes after them; None if they grow."""
        if not self.is_static:
            return None
        num_columns = max(max_columns, self.min_columns) + max(self.lens, default=0) + 1 + UNREAD_COLUMNS
        if device.type == "cuda":
            return even_capacity(num_columns)
        return -(-num_columns // CAPACITY_UNIT) * CAPACITY_UNIT

    @property
    def max_query(self) -> int | None:
        """Tokens of each row that a forward may write after the longest row; None for any number."""
        return max(self.lens, default=0) + 1 if self.is_static else None


class CompileCandidate(NamedTuple):
    """One model that may run compiled."""

    part: str  # "target" or "draft"
    model: PreTrainedModel
    cache_kind: str
    extra_inputs: ExtraInputs
    eager_reason: str = ""  # why the drafter cannot read hidden states of compiled forwards; empty if it can
    ungraphed: str = ""  # why it cannot run from graphs, if the call says so


def make_compile_plan(
    request: StaticRequest | None, lens: tuple[int, ...], candidates: list[CompileCandidate]
) -> CompilePlan:
    """The plan of a call, without graphs; `candidates` are the target and, if there is one, the draft model."""
    if request is None:
        return CompilePlan()
    reasons = [request.eager_reason] if request.eager_reason else []
    wanted = [candidate for candidate in candidates if candidate.part in request.settings]
    eager = {one.part: _eager_reason(one, request.settings[one.part]) for one in wanted}
    reasons += filter(None, eager.values())
    for reason in reasons:
        warn_once(reason)
    settings = {part: request.settings[part] for part, reason in eager.items() if not reason}
    return CompilePlan(True, settings, lens, request.min_columns, tuple(reasons))


def draft_lens(config: SpeculationConfig) -> tuple[int, ...]:
    """The draft lengths K of compiled forwards, ascending; other lengths are rounded up to these."""
    num = config.max_draft_tokens
    if config.schedule == "constant" and config.prompt_lookup_num_tokens is None:
        return (num,)
    return (*(1 << power for power in range(1, 8) if 1 << power < num), num)  # at most half of a draft is unused


def make_language_model(
    part: str,
    model: PreTrainedModel,
    plan: CompilePlan,
    max_position: int | None,
    extra_inputs: ExtraInputs,
    keeps_states: bool,
    on_failure: Callable[[str, str], None],
    capture: LayerCapture | None = None,
) -> LanguageModel:
    """The "target" or "draft" as a `LanguageModel`, compiled or run from graphs if the plan says so.

    `on_failure` is called with the part and the reason, if it cannot be compiled or captured.
    """
    runner, is_draft = _runner(part, model, plan, on_failure), part == "draft"
    if runner is None:
        return LanguageModel(model, max_position, keeps_states, extra_inputs, is_draft, capture)
    query_lens: tuple[int, ...] = (STEP_QUERY_LEN,)
    if not is_draft:
        query_lens = _query_lens(plan.lens, runner.varies and model.device.type != "cuda")
    return CompiledLanguageModel(model, max_position, runner, query_lens, extra_inputs, capture)


def _query_lens(lens: Sequence[int], varies: bool) -> tuple[int, ...]:
    """The lengths Q of the target's queries, to which others are rounded up; CUDA graphs are recorded for each."""
    if not lens:
        return (1,)
    if varies:  # one compilation serves every Q from 2 on; a single token would be compiled anew
        return tuple(range(2, max(lens) + 2))
    # If K varies, plain steps are rounds of their own; after a constant K the last one is rounded up.
    return (*(() if len(lens) == 1 else (2,)), *(num + 1 for num in lens))


def _settings(config: CompileConfig) -> CompileSettings:
    return CompileSettings(config.backend, config.mode, config.dynamic, config.options)


def _eager_reason(candidate: CompileCandidate, settings: CompileSettings) -> str:
    """Why a model cannot run compiled; empty if it can."""
    name = f"eager forwards of the {candidate.part} {type(candidate.model).__name__}"
    if candidate.cache_kind != "preallocated":
        return f"{name}, whose states are not preallocated"
    if not candidate.extra_inputs.is_empty:
        return f"{name}, which reads more than its text"
    if candidate.eager_reason:
        return f"{name}, {candidate.eager_reason}"
    failure = model_state(candidate.model).units.failure(settings.key)
    return "" if failure is None else f"{candidate.part}: {failure}"


def _runner(
    part: str, model: PreTrainedModel, plan: CompilePlan, on_failure: Callable[[str, str], None]
) -> Runner | None:
    units, fail = model_state(model).units, partial(on_failure, part)
    if part in plan.settings:
        return Compilation(model, plan.settings[part], units, fail)
    return Graphing(model, units, fail) if part in plan.graphed else None


@cache
def warn_once(text: str) -> None:
    """Log a reason, the first time that it is met."""
    LOGGER.warning(text)
