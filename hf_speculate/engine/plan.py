"""Plan of a call: make all decisions from its arguments and models before building anything."""

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import CompileConfig, MaxLengthCriteria, MaxTimeCriteria, PreTrainedModel

from hf_speculate.cache.layers import is_recurrent
from hf_speculate.compat import attention_name
from hf_speculate.config import OFFLOADED_MAX_ASSISTANT_TOKENS, SpeculationConfig
from hf_speculate.draft.base import DraftCompilation, DrafterSetup
from hf_speculate.draft.no_drafts import NoDrafts
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.call import Call
from hf_speculate.engine.model_plan import ModelPlan, plan_draft, plan_target
from hf_speculate.engine.runners import Runners, draft_lens, find_runners, runner_request
from hf_speculate.engine.step_weights import draft_prior
from hf_speculate.errors import warn_user
from hf_speculate.kernels.backends import check_backend, runs_kernels
from hf_speculate.models.context import max_columns
from hf_speculate.models.language_model import (
    counts_columns,
    device_of,
    dtype_of,
    is_offloaded,
    takes_positions,
    vocab_size_of,
)
from hf_speculate.models.module_walk import is_compiled
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.models.wrapper_probe import HandedOn
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.registry import unfit_reason
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import SampleStrategy
from hf_speculate.verify.base import traits_of

LOGGER = logging.getLogger("hf_speculate")
_log_once = functools.cache(LOGGER.info)
# imported if a draft model samples with kernels
_FUSED_WARPERS = "hf_speculate.options.cuda.fused_warpers"
# imported on CUDA devices
_WORKING_KERNELS = "hf_speculate.options.cuda.kernel_trial:with_working_kernels"


@dataclass(frozen=True)
class Plan:
    """The decisions made for a call."""

    call: Call
    source: DraftSource  # the draft source after `begin`
    config: SpeculationConfig  # settings after applying the fallbacks
    setup: DrafterSetup  # arguments for the drafter
    target: ModelPlan
    draft: ModelPlan | None  # plan of the draft model; None without one
    draft_strategy: SampleStrategy  # how the drafter chooses tokens
    runners: Runners  # runners for compiled, captured or eager forwards
    compiles_itself: bool  # whether a custom drafter compiles its own forwards
    reads_keys: bool  # whether the drafter or the verifier reads the noise keys
    hidden_layers: tuple[int, ...] | None  # target layers that the drafter reads; None for none
    lock_step: str  # why all rows must advance by the same number of tokens; empty if they need not
    # Padding id for finished rows. None if rows continue until the last one has stopped, as without
    # an EOS token.
    pad_token_id: int | None
    keeps_rows: bool  # whether finished rows stay in the batch
    self_test: str  # result of the comparison with plain decoding; empty for tested types
    fallbacks: tuple[str, ...]  # deviations from the request, with reasons

    @property
    def models(self) -> list[PreTrainedModel]:
        """The target and the draft model, if there is one."""
        return [self.target.model] if self.draft is None else [self.target.model, self.draft.model]

    @property
    def is_lock_step(self) -> bool:
        """Whether all rows advance by the same number of tokens."""
        return bool(self.lock_step)

    @property
    def compiled(self) -> list[str]:
        """Names of the compiled models, "target" and "draft"."""
        return [*self.runners.settings, *(["draft"] if self.compiles_itself else [])]

    @property
    def graphed(self) -> list[str]:
        """Names of the models that run from device graphs, "target" and "draft"."""
        graphed = list(self.runners.graphed)
        return [*graphed, *(["draft"] if self.source.can_capture and "target" in graphed else [])]

    @property
    def pads_ended_rows(self) -> bool:
        """Whether stopped rows are padded; otherwise, they continue until the last row stops."""
        return self.pad_token_id is not None

    @property
    def steps_have_all_rows(self) -> bool:
        """Whether a plain step includes all rows of the batch."""
        return self.keeps_rows or not self.pads_ended_rows

    @property
    def end_padding_id(self) -> int | None:
        """Id of the tokens that fill a kept cache after finished rows.

        None if all rows end together or the cache is not kept.
        """
        is_fed = self.call.is_cache_kept and self.call.batch_size > 1 and not self.lock_step
        return self.pad_token_id if is_fed else None

    def report_to(self, stats: SpeculationStats) -> None:
        """Write the plan to the statistics of the call."""
        stats.plan, stats.verifier, stats.cache = (
            repr(self),
            self.config.verifier or "",
            self.target.cache_kind,
        )
        stats.compiled, stats.graphed = self.compiled, self.graphed
        stats.lock_step, stats.has_draft_source = self.is_lock_step, self.source.drafts
        for reason in self.fallbacks:
            stats.add_fallback(reason)
        LOGGER.debug("%s", stats.plan)

    def __repr__(self) -> str:
        config = self.config
        parts = {
            "drafter": self.source.description,
            "verifier": config.verifier,
            "draft length": f"{config.schedule}, at most {config.max_draft_tokens}",
            "drafts": "sampled" if self.draft_strategy is SampleStrategy.RANDOM else "argmax",
            "target cache": self.target.cache_description,
            "draft cache": "" if self.draft is None else self.draft.cache_description,
            "draft reads": "" if self.draft is None else self.draft.inputs.description,
            "compiled": ", ".join(self.runners.settings),
            "from graphs": ", ".join(
                f"{part} (compiled)" if part in self.runners.coded else part
                for part in self.graphed
            ),
            "hidden layers": "" if self.hidden_layers is None else str(list(self.hidden_layers)),
            "rows": "lock step" if self.lock_step else "each at its own pace",
            "finished rows": "stay in the batch" if self.keeps_rows else "leave the batch",
            "self-test": self.self_test,
        }
        return f"Plan({'; '.join(f'{name}: {value}' for name, value in parts.items() if value)})"


def make_plan(
    call: Call, stats: SpeculationStats, *, drafts: bool = True, self_test: str = ""
) -> Plan:
    """Make the plan for a call and begin its draft source.

    Args:
        call: The call.
        stats: Records why kernels are not used, and later which parts are not compiled.
        drafts: Whether the call may draft; otherwise, it decodes token by token.
        self_test: Result of the target's comparison with plain decoding.
    """
    fallbacks: list[str] = []
    source, config = call.source, call.config
    if not drafts:
        source = NoDrafts(source.argument, source.hint, is_token_by_token=True)
    config = _with_working_kernels(call, source, config, stats)
    request = runner_request(call, source)
    source, config = _without_useless_draft(call.target, source, config, fallbacks)
    config = _for_offloaded(call, source, config)
    setup = _drafter_setup(
        call, source, config, request.settings.get("target"), stats.add_eager_part
    )
    source = source.begin(setup)
    goes_on = (
        call.criteria.eos_token_ids is None
        and call.batch_size > 1
        and not call.row_lists.rows_leave
    )
    lock_step = _lock_step_reason(call, source.model, goes_on, config.draft_state is not None)
    if lock_step:
        fallbacks.append(lock_step)
    samples_drafts = source.samples(config, call.do_sample)
    strategy = SampleStrategy.RANDOM if samples_drafts else SampleStrategy.GREEDY
    config = _without_useless_block(config, strategy, bool(lock_step), fallbacks)
    lens = draft_lens(config, source.varies_len) if source.drafts else ()
    hidden_layers = None if source.hidden_layers is None else tuple(source.hidden_layers)
    target = plan_target(call, config, source, hidden_layers)
    draft = None if source.model is None else plan_draft(call, config, source, source.model, target)
    models = [target] if draft is None else [target, draft]
    runners = find_runners(
        request,
        lens,
        models,
        config.speculation_graphs,
        call.batch_size,
        stats.add_eager_part,
        stats.add_code_part,
    )
    fallbacks += [
        *_cache_fallbacks(models),
        *_compiled_fallbacks(models, runners),
        *runners.reasons,
    ]
    reuses_draft_cache = (
        config.draft_state is not None and draft is not None and call.draft_inputs.is_empty
    )
    return Plan(
        call=call,
        source=source,
        config=config,
        setup=setup,
        target=target,
        draft=draft,
        draft_strategy=strategy,
        runners=runners,
        compiles_itself=source.is_compiled,
        reads_keys=source.reads_keys or samples_drafts or traits_of(config).reads_keys,
        hidden_layers=hidden_layers,
        lock_step=lock_step,
        pad_token_id=None if goes_on else _fed_pad_token_id(call),
        keeps_rows=bool(lock_step or call.is_cache_kept or runners.parts or reuses_draft_cache)
        or (call.batch_size > 1 and call.binds_rows),
        self_test=self_test,
        fallbacks=tuple(fallbacks),
    )


def _for_offloaded(call: Call, source: DraftSource, config: SpeculationConfig) -> SpeculationConfig:
    """Return the settings with a larger K_max if loading weights dominates the forward's time."""
    is_open = config.schedule == "adaptive" and config.num_assistant_tokens is None
    if source.model is None or not is_open or call.batch_size > 1 or not is_offloaded(call.target):
        return config
    max_tokens = OFFLOADED_MAX_ASSISTANT_TOKENS
    return replace(
        config, num_assistant_tokens=max_tokens, num_assistant_tokens_schedule="adaptive"
    )


def counts_by_column(model: PreTrainedModel) -> bool:
    """Return whether the target positions tokens by cache column, so all rows advance together."""
    return counts_columns(model) or (takes_positions(model) and not HandedOn.of(model).positions)


def attention_of(model: PreTrainedModel) -> str:
    """Return the attention implementation that the model's decoder looks up in every forward."""
    return str(attention_name(model.config.get_text_config(decoder=True)))


def _fed_pad_token_id(call: Call) -> int:
    """Return the padding token of the call, or 0 if the token has no embedding.

    Plain `generate` fails if the token has no embedding.
    """
    pad = call.pad_token_id or 0
    return pad if 0 <= pad < vocab_size_of(call.target) else 0


def _drafter_setup(
    call: Call,
    source: DraftSource,
    config: SpeculationConfig,
    # settings for the target's compiled forwards; None if they run eagerly
    settings: CompileConfig | None,
    # called with the part and the reason if drafting cannot be compiled
    on_failure: Callable[[str, str], None],
) -> DrafterSetup:
    """Make the setup for a drafter."""
    traits, prompts, compilation = traits_of(config), call.prompts, None
    if settings is not None:
        lens = draft_lens(config, source.varies_len)
        compilation = DraftCompilation(
            settings, lens, CompiledUnits(), partial(on_failure, "draft")
        )
    processors, num_pads = call.processors.for_draft(), tuple(prompts.num_pads)
    if source.model is not None or source.samples_with_kernels:
        device = device_of(call.target if source.model is None else source.model)
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
        for_generators=call.for_generators if source.reads_prepared else {},
    )


def _with_working_kernels(
    call: Call, source: DraftSource, config: SpeculationConfig, stats: SpeculationStats
) -> SpeculationConfig:
    """Replace kernels that failed on this device with torch; raise if the call names them."""
    models = [call.target] if source.model is None else [call.target, source.model]
    devices = [device_of(model) for model in models]
    for device in devices:
        check_backend(config.verifier_backend, device)
    if config.verifier_backend != "auto" or all(device.type != "cuda" for device in devices):
        return config
    sizes = dtype_of(call.target), vocab_size_of(call.target)
    traits = {"samples": call.do_sample, "is_processed": len(call.processors) > 0}
    working: SpeculationConfig = pkgutil.resolve_name(_WORKING_KERNELS)(
        config, devices, *sizes, **traits, stats=stats
    )
    return working


def _lock_step_reason(
    call: Call, draft: PreTrainedModel | None, goes_on: bool, keeps_draft_cache: bool
) -> str:
    """Return why all rows must advance together; empty if they do not."""
    foreign = [*call.processors.foreign, *call.criteria.foreign]
    if foreign:
        return f"lock step, {unfit_reason(foreign)}"
    ends_apart = any(
        type(criterion) not in (MaxLengthCriteria, MaxTimeCriteria) for criterion in call.criteria
    )
    is_deep = any(call.cache.is_sliding) or is_recurrent(call.cache)
    if goes_on and ends_apart and call.is_cache_kept and is_deep:
        return (
            "lock step, because rows without EOS are cut back to one length, past what window or "
            "recurrent layers can "
            "restore"
        )
    if call.batch_size == 1:
        return ""
    counting = {type(call.target).__name__} if counts_by_column(call.target) else set()
    counting |= {type(draft).__name__} if draft is not None and counts_columns(draft) else set()
    if counting:
        names = ", ".join(sorted(counting))
        return f"lock step, because {names} takes no positions but counts columns"
    num_columns = max_columns(call.target)
    if num_columns is None or call.max_columns <= num_columns:
        return ""
    if call.is_cache_kept or keeps_draft_cache or call.binds_rows:
        return (
            f"lock step, because a row that has filled the {num_columns} columns of the model's "
            "table leaves no room"
        )
    return ""


def call_type_of(plan: Plan) -> tuple[Hashable, ...]:
    """Return the call type: all that affects a plain step's time except the number of rows."""
    call, target = plan.call, plan.target
    return (
        *(
            target.model.device,
            target.model.dtype,
            torch.get_num_threads(),
            plan.config.verifier,
            target.cache_kind,
        ),
        *(*plan.runners.settings, plan.runners.graphed, plan.is_lock_step),
        call.max_length.bit_length(),  # a forward's time changes little within a factor of two
    )


def gains_nothing(target: PreTrainedModel, source: DraftSource, config: SpeculationConfig) -> bool:
    """Return whether the prior costs of a source's draft model rule out any gain."""
    is_adaptive = source.model is not None and config.schedule == "adaptive"
    return is_adaptive and draft_prior(target, source).never_pays


def _without_useless_draft(
    target: PreTrainedModel, source: DraftSource, config: SpeculationConfig, fallbacks: list[str]
) -> tuple[DraftSource, SpeculationConfig]:
    """Return the source and its settings, without the draft model if it cannot gain anything."""
    if not gains_nothing(target, source, config):
        return source, config
    free_source = source.without_model()
    fallback = f"{free_source.description} alone" if free_source.drafts else "plain decoding"
    fallbacks.append(f"{fallback}, because a draft model as large as its target gains nothing")
    return (free_source, free_source.settings(config)) if free_source.drafts else (source, config)


def _without_useless_block(
    config: SpeculationConfig, strategy: SampleStrategy, is_lock_step: bool, fallbacks: list[str]
) -> SpeculationConfig:
    """Return the settings, with rejection sampling instead of an equivalent block verification."""
    if config.verifier != "block":
        return config
    if is_lock_step:
        reason = "because rows in lock step are verified token by token"
    elif strategy is SampleStrategy.GREEDY:
        reason = "which is the same if the draft takes its argmax"
    else:
        return config
    fallbacks.append(f"rejection in place of block, {reason}")
    return replace(config, verifier="rejection")


def _compiled_fallbacks(models: Sequence[ModelPlan], runners: Runners) -> Iterator[str]:
    """Yield the reasons for running the user's compiled models eagerly."""
    for part, model in ((model_plan.part, model_plan.model) for model_plan in models):
        if part in runners.settings or not is_compiled(model):
            continue
        reason = (
            f"eager forwards of the {part} {type(model).__name__}, because a forward that the "
            "caller compiled would be "
            "traced anew for each form of the cache; pass compile_config= to compile speculative "
            "forwards"
        )
        warn_user(reason)
        yield reason


def _cache_fallbacks(models: Sequence[ModelPlan]) -> Iterator[str]:
    """Yield the reasons for dynamic instead of preallocated KV caches, and log each once."""
    for model_plan in models:
        part, reason = model_plan.part, model_plan.cache_reason
        if model_plan.cache_kind == "dynamic" and reason:
            _log_once(f"the {part} cache of {type(model_plan.model).__name__} is dynamic: {reason}")
            yield f"{part} cache: dynamic, because {reason}"
