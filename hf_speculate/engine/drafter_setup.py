"""What a draft source is told of a call: the drafter's setup before the plan, and the draft plan after it."""

import importlib
from collections.abc import Callable
from functools import partial

from hf_speculate.draft.base import DraftCompilation, DrafterSetup
from hf_speculate.draft.draft_plan import DraftPlan
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.engine.call import Call
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.row_lists import find_row_lists
from hf_speculate.engine.runners import draft_lens
from hf_speculate.models.context import Context
from hf_speculate.models.language_model import vocab_size_of
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.triton_kernels.backends import runs_kernels
from hf_speculate.verify.base import traits_of

_FUSED_WARPERS = "hf_speculate.options.cuda.fused_warpers"  # imported where a draft model samples with kernels


def drafter_setup(call: Call, on_failure: Callable[[str, str], None]) -> DrafterSetup:
    """What a drafter is told; `on_failure` gets the part and the reason if the draft cannot be compiled."""
    config, traits, compilation = call.config, traits_of(call.config), None
    settings = call.static.settings.get("target")
    if settings is not None:
        lens = draft_lens(config, call.source.varies_len)
        compilation = DraftCompilation(settings, lens, CompiledUnits(), partial(on_failure, "draft"))
    return DrafterSetup(
        target=call.target,
        batch_size=call.batch_size,
        num_pads=tuple(call.num_pads),
        max_length=call.max_length,
        max_draft_tokens=config.max_draft_tokens,
        vocab_size=vocab_size_of(call.target),
        eos_token_ids=call.criteria.eos_token_ids or frozenset(),
        device=call.input_ids.device,
        processors=call.processors.for_draft(),
        stream=traits.draft_stream,
        keeps_logits=traits.reads_draft_logits,
        confidence_threshold=config.assistant_confidence_threshold or 0.0,
        backend=config.verifier_backend,
        compilation=compilation,
    )


def draft_plan(plan: Plan, on_failure: Callable[[str, str], None], meet: Callable[[], None]) -> DraftPlan:
    """What the source of a planned call is told; with synced ranks, `meet` is called before a model's forwards."""
    call, draft = plan.call, plan.draft
    setup = drafter_setup(call, on_failure)
    processors = setup.processors
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
        setup=setup,
        config=call.config,
        inputs=call.draft_inputs,
        prompt_len=call.input_ids.shape[1] - min(setup.num_pads),
        num_query=call.prefill_chunk_size or call.query_ids.shape[1],
        max_position=call.max_position,
        processors=processors,
        row_processors=find_row_lists(call.rows_leave).processors(processors, call.batch_size),
        is_distributed=call.ranks.is_distributed,
        meet=meet if call.ranks.is_synced else None,
        make_compiled=make_compiled,
    )
