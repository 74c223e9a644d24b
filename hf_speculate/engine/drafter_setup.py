"""The drafter of a call: its source begins before the plan, and makes it from the plan."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hf_speculate.draft.base import DraftCompilation, Drafter, DrafterSetup
from hf_speculate.draft.draft_plan import DraftPlan
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.engine.call import Call
from hf_speculate.engine.draft_faults import DraftFaults
from hf_speculate.engine.draft_session import TargetStates
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.runners import draft_lens
from hf_speculate.models.context import Context
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.stats import SpeculationStats
from hf_speculate.triton_kernels.backends import runs_kernels
from hf_speculate.verify.base import traits_of

_STATES = "hf_speculate.options.heads.hidden_states"  # imported if the drafter reads states of the target
_FUSED_WARPERS = "hf_speculate.options.cuda.fused_warpers"  # imported where a draft model samples with kernels


def begin_source(call: Call, stats: SpeculationStats, prepared: Mapping[str, Any]) -> Call:
    """The call once its source has begun; `prepared` is what transformers hands to candidate generators."""
    return replace(call, source=call.source.begin(drafter_setup(call, stats.add_eager_part), prepared))


def make_drafter(plan: Plan, stats: SpeculationStats, faults: DraftFaults) -> Drafter:
    """The drafter of a planned call, which then says which errors of its own are the caller's."""
    source_plan = draft_plan(plan, stats.add_eager_part, partial(faults.meet, is_last=False))
    drafter = plan.call.source.make_drafter(source_plan)
    faults.is_callers = drafter.is_callers
    return drafter


def find_target_states(plan: Plan, drafter: Drafter) -> TargetStates | None:
    """The states that the drafter of a planned call reads; None if it reads none."""
    if plan.hidden_layers is None:
        return None
    states: TargetStates = importlib.import_module(_STATES).make_states(plan, drafter)
    return states


def drafter_setup(call: Call, on_failure: Callable[[str, str], None]) -> DrafterSetup:
    """The setup of a drafter; `on_failure` gets the part and the reason if the draft cannot be compiled."""
    config, traits, compilation = call.config, traits_of(call.config), None
    settings = call.static.settings.get("target")
    if settings is not None:
        lens = draft_lens(config, call.source.varies_len)
        compilation = DraftCompilation(settings, lens, CompiledUnits(), partial(on_failure, "draft"))
    return DrafterSetup(
        target=call.target,
        batch_size=call.batch_size,
        num_pads=tuple(call.prompts.num_pads),
        max_length=call.max_length,
        max_draft_tokens=config.max_draft_tokens,
        vocab_size=vocab_size_of(call.target),
        eos_token_ids=call.criteria.eos_token_ids or frozenset(),
        device=call.prompts.input_ids.device,
        processors=call.row_lists.processors(call.processors.for_draft(), call.batch_size),
        stream=traits.draft_stream,
        keeps_logits=traits.reads_draft_logits,
        confidence_threshold=config.assistant_confidence_threshold or 0.0,
        backend=config.verifier_backend,
        compilation=compilation,
        prompt_axes=None if call.prompts.num_ahead else call.target_inputs.prompt_axes,
        has_media=call.target_inputs.has_media,
    )


def draft_plan(plan: Plan, on_failure: Callable[[str, str], None], meet: Callable[[], None]) -> DraftPlan:
    """What the source of a planned call is told; with synced ranks, `meet` is called before a model's forwards."""
    call, draft = plan.call, plan.draft
    setup, processors = drafter_setup(call, on_failure), call.processors.for_draft()
    if draft is not None and draft.device.type == "cuda" and runs_kernels(setup.backend, draft.device):
        processors = BlockLogitsProcessorList(
            importlib.import_module(_FUSED_WARPERS).fuse_warpers(processors, setup.backend)
        )

    def make_compiled(
        max_position: int, chunk_size: int | None, settings: DraftSettings, context: Context | None
    ) -> ModelDrafter | None:
        if draft is None:
            return None
        rest = chunk_size, processors, settings, context
        return plan.runners.model_drafter(draft, max_position, on_failure, *rest)

    return DraftPlan(
        **{**vars(setup), "processors": call.row_lists.processors(processors, call.batch_size)},
        config=call.config,
        inputs=call.draft_inputs,
        prompt_len=call.prompts.input_ids.shape[1] - min(setup.num_pads),
        num_query=call.prefill_chunk_size or call.prompts.query_ids.shape[1],
        max_position=call.max_position,
        is_distributed=call.ranks.is_distributed,
        meet=meet if call.ranks.is_synced else None,
        make_compiled=make_compiled,
    )
