"""The setup of a call's drafter."""

import importlib
from collections.abc import Callable
from functools import partial

from transformers import CompileConfig

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import DraftCompilation, DrafterSetup
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.call import Call
from hf_speculate.engine.runners import draft_lens
from hf_speculate.models.language_model import device_of, vocab_size_of
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.triton_kernels.backends import runs_kernels
from hf_speculate.verify.base import traits_of

_FUSED_WARPERS = "hf_speculate.options.cuda.fused_warpers"  # imported where a draft model samples with kernels


def drafter_setup(
    call: Call,
    source: DraftSource,
    config: SpeculationConfig,
    settings: CompileConfig | None,  # of the target's compiled forwards; None if they run eagerly
    on_failure: Callable[[str, str], None],  # called with the part and the reason if the draft cannot be compiled
) -> DrafterSetup:
    """Return the setup of a drafter."""
    traits, prompts, compilation = traits_of(config), call.prompts, None
    if settings is not None:
        lens = draft_lens(config, source.varies_len)
        compilation = DraftCompilation(settings, lens, CompiledUnits(), partial(on_failure, "draft"))
    processors, num_pads = call.processors.for_draft(), tuple(prompts.num_pads)
    if source.model is not None:
        device = device_of(source.model)
        if device.type == "cuda" and runs_kernels(config.verifier_backend, device):
            fuse_warpers = importlib.import_module(_FUSED_WARPERS).fuse_warpers
            processors = BlockLogitsProcessorList(fuse_warpers(processors, config.verifier_backend))
    return DrafterSetup(
        target=call.target,
        batch_size=call.batch_size,
        num_pads=num_pads,
        max_length=call.max_length,
        max_draft_tokens=config.max_draft_tokens,
        vocab_size=vocab_size_of(call.target),
        eos_token_ids=call.criteria.eos_token_ids or frozenset(),
        device=prompts.input_ids.device,
        processors=call.row_lists.processors(processors, call.batch_size),
        stream=traits.draft_stream,
        keeps_logits=traits.reads_draft_logits,
        confidence_threshold=config.assistant_confidence_threshold or 0.0,
        backend=config.verifier_backend,
        compilation=compilation,
        prompt_axes=None if prompts.num_ahead else call.target_inputs.prompt_axes,
        has_media=call.target_inputs.has_media,
        config=config,
        prompt_len=prompts.input_ids.shape[1] - min(num_pads),
        num_query=call.prefill_chunk_size or prompts.query_ids.shape[1],
        max_position=call.max_position,
        inputs=call.draft_inputs,
        is_distributed=call.ranks.is_distributed,
        for_generators=call.for_generators,
    )
