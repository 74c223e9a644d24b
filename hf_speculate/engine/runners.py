"""Runners: choose how the forwards of a call's models run, which is eagerly by default."""

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
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

# imported if forwards may run compiled or from device graphs
_OPTION = "hf_speculate.options.compiled.plan"


@dataclass(frozen=True)
class RunnerRequest:
    """Request for fixed buffers and compiled forwards."""

    is_static: bool = False  # whether buffers never grow
    # compile settings by model, "target" or "draft"
    settings: Mapping[str, CompileConfig] = field(default_factory=dict)
    min_columns: int = 0  # minimum number of columns in the buffers
    reasons: tuple[str, ...] = ()  # why requested parts run eagerly


@dataclass(frozen=True)
class Runners:
    """Eager runners with growing buffers."""

    # compile settings by compiled model, "target" or "draft"
    settings: Mapping[str, CompileConfig] = field(default_factory=dict)
    graphed: tuple[str, ...] = ()  # models that run from device graphs, "target" or "draft"
    coded: tuple[str, ...] = ()  # models in `graphed` that earlier calls have compiled
    reasons: tuple[str, ...] = ()  # why parts run eagerly instead of compiled or captured
    # Draft lengths K, ascending. Without dynamic sizes, other lengths are rounded up to one of
    # these.
    lens: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Models that do not run eagerly, so that rows must not move in their buffers."""
        return (*self.settings, *self.graphed)

    @property
    def max_query(self) -> int | None:
        """Maximum number of tokens per row and forward after the longest row; None for no limit."""
        return None

    def buffers(self, model_plan: ModelPlan) -> Buffers:
        """Return the buffer arguments for the preallocated KV cache of a model."""
        return GROWING

    def language_model(
        self,
        part: str,  # "target" or "draft"
        model: PreTrainedModel,
        inputs: ExtraInputs,  # the model's inputs other than tokens
        max_position: int | None,
        capture: Any = None,  # see `LanguageModel`
    ) -> LanguageModel | None:
        """Return the compiled or captured model; None if its forwards run eagerly."""
        return None

    def shares_code(self, device: torch.device) -> bool:
        """Return whether one compilation of a target on a device serves all draft lengths."""
        return False

    def head_graphs(self, network: nn.Module, key: Hashable) -> Any | None:
        """Return the device graphs of a draft head's network; None if it drafts eagerly.

        Args:
            network: the head's network.
            key: changes if the parts of other modules that the network reads have changed.
        """
        return None

    def at_end(self, function: Callable[[], None]) -> None:
        """Call a function when the call has ended or failed."""

    def end(self) -> None:
        """Call the functions given to `at_end`."""

    def model_drafter(
        self,
        model: PreTrainedModel,
        setup: DrafterSetup,
        max_position: int | None,
        chunk_size: int | None,
        settings: DraftSettings,
        context: Context | None,
    ) -> ModelDrafter | None:
        """Return a drafter with a compiled or captured model; None if its forwards run eagerly."""
        return None


EAGER = Runners()


def find_runners(
    request: RunnerRequest,
    lens: tuple[int, ...],  # draft lengths K, ascending
    models: Sequence[ModelPlan],
    graphs: str,  # `speculation_graphs`
    batch_size: int,
    on_failure: Callable[[str, str], None],  # called with the part and the reason of a failure
    # called with the part and, if it does not run from graphs of compiled code, the reason
    on_code: Callable[[str, str], None],
) -> Runners:
    """Return the runners for a request, which may be compiled, captured or eager."""
    has_graphs = any(model_plan.model.device.type in GRAPH_BACKENDS for model_plan in models)
    if not request.is_static and not (graphs == "on" or (graphs == "auto" and has_graphs)):
        return EAGER
    runners: Runners = importlib.import_module(_OPTION).make_runners(
        request, lens, models, graphs, batch_size, on_failure, on_code
    )
    return runners


def runner_request(call: Call, source: DraftSource) -> RunnerRequest:
    """Return the request for fixed buffers and compiled forwards, following plain `generate`."""
    config, eager_draft = call.generation_config, source.eager_reason
    if not call.is_static:
        return RunnerRequest()
    models = (
        {"target": call.target}
        if source.model is None
        else {"target": call.target, "draft": source.model}
    )
    configs = {part: compile_config_of(model, config) for part, model in models.items()}
    settings = {
        part: compile_config
        for part, compile_config in configs.items()
        if compile_config is not None
    }
    reason = ""
    if config.compile_config is not None and "target" not in settings:
        reason = (
            "eager forwards: plain generate() would not compile with this compile_config on "
            f"{call.target.device}"
        )
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
    """Return the draft lengths K of compiled forwards in ascending order.

    Other lengths are rounded up to one of these.

    Args:
        config: Settings of the call.
        varies: Whether the number of tokens varies even with a constant draft length.
    """
    max_tokens = config.max_draft_tokens
    if config.schedule == "constant" and not varies:
        return (max_tokens,)
    # With powers of two, at most half of a draft is unused.
    return (*(1 << power for power in range(1, 8) if 1 << power < max_tokens), max_tokens)
