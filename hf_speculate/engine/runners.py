"""Runners: how the forwards of a call's models run. By themselves they run eagerly, which is the null object."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import CompileConfig, PreTrainedModel

from hf_speculate.compat import compile_config_of
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.source import DraftSource
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.engine.call import Call
from hf_speculate.engine.model_plan import ModelPlan
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.models.cache_kinds import GROWING, Buffers
from hf_speculate.models.context import Context
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.models.runner import GRAPH_BACKENDS

_OPTION = "hf_speculate.options.compiled.plan"  # imported where forwards may run compiled, or from device graphs


@dataclass(frozen=True)
class RunnerRequest:
    """The fixed buffers and compiled forwards that a call asks for."""

    is_static: bool = False  # whether buffers never grow
    settings: Mapping[str, CompileConfig] = field(default_factory=dict)  # by model, "target" and "draft"
    min_columns: int = 0  # columns that buffers have at least
    reasons: tuple[str, ...] = ()  # why what was to be compiled runs eagerly


@dataclass(frozen=True)
class Runners:
    """The runners of a call's forwards: eager ones, over buffers that grow."""

    settings: Mapping[str, CompileConfig] = field(default_factory=dict)  # by compiled model, "target" and "draft"
    graphed: tuple[str, ...] = ()  # the models whose forwards run from device graphs, "target" and "draft"
    reasons: tuple[str, ...] = ()  # why what was to be compiled or captured runs eagerly

    @property
    def parts(self) -> tuple[str, ...]:
        """The models whose forwards do not run eagerly; rows must stay where they are in their buffers."""
        return (*self.settings, *self.graphed)

    @property
    def max_query(self) -> int | None:
        """Tokens of each row that a forward may write after the longest row; None for any number."""
        return None

    def buffers(self, model_plan: ModelPlan) -> Buffers:
        """Arguments of the preallocated KV cache of a model."""
        return GROWING

    def language_model(
        self,
        part: str,  # "target" or "draft"
        model: PreTrainedModel,
        inputs: ExtraInputs,  # what the model reads besides tokens
        max_position: int | None,
        capture: Any = None,  # see `LanguageModel`
    ) -> LanguageModel | None:
        """Return a model whose forwards do not run eagerly; None if they do."""
        return None

    def model_drafter(
        self,
        model: PreTrainedModel,
        setup: DrafterSetup,
        max_position: int | None,
        chunk_size: int | None,
        settings: DraftSettings,
        context: Context | None,
    ) -> ModelDrafter | None:
        """Return the drafter over a draft model whose forwards do not run eagerly; None if they do."""
        return None


EAGER = Runners()


def find_runners(
    request: RunnerRequest,
    lens: tuple[int, ...],  # draft lengths K, ascending
    models: Sequence[ModelPlan],
    graphs: str,  # `speculation_graphs`
    batch_size: int,
    on_failure: Callable[[str, str], None],  # called with the part and the reason if a forward cannot run so
) -> Runners:
    """Return what runs compiled or from graphs, of what a call asks for."""
    has_graphs = any(model_plan.model.device.type in GRAPH_BACKENDS for model_plan in models)
    if not request.is_static and not (graphs == "on" or (graphs == "auto" and has_graphs)):
        return EAGER
    runners: Runners = importlib.import_module(_OPTION).make_runners(
        request, lens, models, graphs, batch_size, on_failure
    )
    return runners


def runner_request(call: Call, source: DraftSource) -> RunnerRequest:
    """The fixed buffers and compiled forwards that a call asks for: no more than plain `generate` would compile."""
    config, eager_draft = call.generation_config, source.eager_reason
    if not call.is_static:
        return RunnerRequest()
    models = {"target": call.target} if source.model is None else {"target": call.target, "draft": source.model}
    configs = {part: compile_config_of(model, config) for part, model in models.items()}
    settings = {part: compile_config for part, compile_config in configs.items() if compile_config is not None}
    reason = ""
    if config.compile_config is not None and "target" not in settings:
        reason = f"eager forwards: plain generate() would not compile with this compile_config on {call.target.device}"
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
    return RunnerRequest(True, settings, min_columns, (reason,) if reason else ())


def draft_lens(config: SpeculationConfig, varies: bool) -> tuple[int, ...]:
    """Return the draft lengths K of compiled forwards, ascending; other lengths are rounded up to these.

    `varies` says that rounds may have any number of tokens with a constant draft length too.
    """
    num = config.max_draft_tokens
    if config.schedule == "constant" and not varies:
        return (num,)
    return (*(1 << power for power in range(1, 8) if 1 << power < num), num)  # at most half of a draft is unused
