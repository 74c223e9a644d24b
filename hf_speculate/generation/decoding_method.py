"""The decoding method of a call, which transformers runs once it has prepared the inputs."""

import copy
import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from hf_speculate.cache.layers import num_cached
from hf_speculate.cache.static import is_static, static_copies
from hf_speculate.caller import caller_level
from hf_speculate.compat import CACHE_NAMES, plain_decoding
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.no_drafts import NoDrafts
from hf_speculate.draft.source import VARIANTS, DraftSource, load_entry
from hf_speculate.engine.builder import Prepared, build_decoder
from hf_speculate.engine.call import Call, Prompts
from hf_speculate.engine.drafter_setup import begin_source
from hf_speculate.engine.outputs import GenerateOutput
from hf_speculate.engine.plan import gains_nothing, make_plan, with_working_kernels
from hf_speculate.engine.ranks import Ranks, find_ranks
from hf_speculate.engine.row_lists import ONE_CALL, RowLists
from hf_speculate.engine.runners import static_request
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.generation.arguments import uncached
from hf_speculate.generation.draft_inputs import read_draft_inputs
from hf_speculate.generation.model_inputs import target_inputs
from hf_speculate.generation.validate_call import (
    check_extra_inputs,
    check_mask,
    check_prepared,
    check_room,
    check_synced,
)
from hf_speculate.generation.validate_models import check_target
from hf_speculate.models.extra_inputs import MEDIA, ExtraInputs
from hf_speculate.models.folded_attention import folded_attention_for
from hf_speculate.models.foreign_code import described, foreign_code
from hf_speculate.models.language_model import cache_name, text_prefix, vocab_size_of
from hf_speculate.models.quirks import is_tested_type
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.processors.used import check_unused
from hf_speculate.stats import SpeculationStats
from hf_speculate.verify.base import check_verifier

_FEWEST_LEFT = 2  # tokens to come, without which nothing is drafted
_SELF_TEST = "hf_speculate.options.self_test.compare"  # imported for models of a type that no test has shown


@dataclass(eq=False)
class SpeculativeDecoding:
    """A `custom_generate` function for one call of `generate()`, which Whisper's own `generate` runs several times."""

    source: DraftSource
    config: SpeculationConfig
    passed: dict[str, Any]  # the arguments of the call that are not None
    is_static: bool  # whether the call asks for fixed buffers
    clock: StageClock  # that was made when the call began
    row_lists: RowLists = ONE_CALL
    # gets the prepared call instead of decoding it, so that its rows may join others; None to decode
    on_prepared: Callable[[Prepared], object] | None = None

    def __post_init__(self) -> None:
        self.stats = self.config.speculation_stats or SpeculationStats()
        self.stats.reset()
        self.config = replace(self.config, speculation_stats=self.stats)
        self.num_runs = 0

    @property
    def is_cache_passed(self) -> bool:
        """Whether the user passed a cache, dynamic or static."""
        return not self.passed.keys().isdisjoint(CACHE_NAMES)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        self.clock.enter(Stage.PREPARE, 0)
        config = self.config.for_run(self.num_runs).resolve(bool(generation_config.do_sample))
        self.num_runs += 1
        check_verifier(config)
        streamer = self.passed.get("streamer")
        check_prepared(model, input_ids, generation_config, model_kwargs, streamer, self.source)
        input_ids = input_ids.long()  # plain decoding takes int32 prompts too, and returns int64
        static_cache = _replace_static_cache(model, model_kwargs)
        check_unused(logits_processor)
        prompts = self._prompts(model, input_ids, generation_config, model_kwargs, static_cache)
        call = Call(
            target=model,
            source=self.source,
            config=config,
            generation_config=copy.copy(generation_config),  # candidate generators may write to the one they are given
            prompts=prompts,
            cache=model_kwargs[cache_name(model)],
            is_cache_passed=self.is_cache_passed and static_cache is None,
            is_cache_kept=self.is_cache_passed or bool(generation_config.return_dict_in_generate),
            processors=BlockLogitsProcessorList(logits_processor).by_row(len(input_ids)),
            criteria=BlockStoppingCriteria(stopping_criteria),
            streamer=streamer,
            target_inputs=target_inputs(model, prompts, model_kwargs, has_positions="position_ids" in self.passed),
            row_lists=self.row_lists,
        )
        check_extra_inputs(call)
        is_fixed = self.is_static or static_cache is not None
        call = replace(call, ranks=self._ranks(call, is_fixed))
        call = self._with_draft_inputs(call, inputs_tensor, model_kwargs)
        call = replace(call, static=static_request(call, is_fixed), foreign_code=foreign_code(model))
        self_test = ""
        if not is_tested_type(model):
            check_decoding = importlib.import_module(_SELF_TEST).check_decoding
            self_test = check_decoding(call, generation_config, model_kwargs, self.source)
        reason = self._why_plainly(call, generation_config, model_kwargs)
        if reason:
            self._warn(reason)
            if config.verifier != "coupled":
                plain = logits_processor, stopping_criteria, generation_config
                return self._decode_plainly(call, plain, model_kwargs, static_cache)
            source = NoDrafts(self.source.argument, self.source.hint, is_token_by_token=True)
            call = replace(call, source=source, draft_inputs=ExtraInputs())
            call = replace(call, static=static_request(call, is_fixed))
        call = with_working_kernels(call, self.stats)
        for_generators = _for_generators(call, generation_config, inputs_tensor, model_kwargs)
        call = begin_source(call, self.stats, for_generators)
        prepared = build_decoder(make_plan(call, self_test), self.stats, self.clock)
        if self.on_prepared is not None:
            self.on_prepared(prepared)
            return input_ids
        output = self._decode(prepared, static_cache, model_kwargs.get("encoder_outputs"))
        self.clock.enter(Stage.INPUTS)  # a model's own generate() may go on with another run
        self.stats.add_seconds(self.clock.lap())
        return output

    def _prompts(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
        static_cache: Cache | None,
    ) -> Prompts:
        """The prompts of a run, after the checks of mask, length and cache."""
        mask = model_kwargs.get(f"{text_prefix(model)}attention_mask")  # [B, P] of any dtype
        is_padded = mask is not None and not bool((mask != 0).all())
        padding_mask = (mask != 0).to(torch.int64) if is_padded and mask is not None else None
        cache = model_kwargs[cache_name(model)]
        mask_shape = None if mask is None else tuple(mask.shape)
        if model.config.is_encoder_decoder:
            query_ids = uncached(input_ids, cache, mask)
        else:
            embeds, passed = model_kwargs.get("inputs_embeds"), self.passed.get("attention_mask")
            query_ids = uncached(input_ids, cache, passed, embeds)
            if not is_padded:
                mask_shape = self._shape_of_ones(input_ids if embeds is None else embeds)
        num_before = num_cached(cache)
        check_mask(mask_shape, query_ids, num_before, text_prefix(model))
        prompts = Prompts(input_ids, query_ids, padding_mask)
        max_tokens = generation_config.max_length + num_before + prompts.num_ahead
        check_target(model, generation_config, is_padded, max_tokens, self.source)
        if static_cache is not None:
            room = static_copies().room_in(static_cache, model.config.get_text_config(decoder=True))
            check_room(room, max_tokens - 1)
        return prompts

    def _ranks(self, call: Call, is_fixed: bool) -> Ranks:
        """The processes that decode the call together."""
        ranks = find_ranks(self.passed.get("synced_gpus"), call.models, call.prompts.input_ids.device)
        if ranks.is_synced:
            has_compiled = call.generation_config.compile_config is not None
            check_synced(call.generation_config, is_fixed or has_compiled, call.source)
        return ranks

    def _with_draft_inputs(self, call: Call, inputs_tensor: Tensor | None, model_kwargs: dict[str, Any]) -> Call:
        """The call with what its draft model reads besides tokens, or without that model if it cannot read them."""
        draft, media = call.draft, sorted(MEDIA & self.passed.keys())
        if draft is None or not (draft.config.is_encoder_decoder or "encoder_outputs" in model_kwargs):
            num_left = call.generation_config.max_length - call.prompts.input_ids.shape[1]
            if draft is None or not media or num_left < _FEWEST_LEFT or gains_nothing(call):
                return call
            read_media = load_entry(VARIANTS["pictures"])
            return replace(call, draft_inputs=read_media(call, draft, self.passed, media, self.stats))
        reads_tensor = "encoder_outputs" not in self.passed and model_kwargs.get("inputs_embeds") is None
        inputs = read_draft_inputs(call, draft, self.stats, inputs_tensor if reads_tensor else None, model_kwargs)
        if inputs is not None:
            return replace(call, draft_inputs=inputs)
        source = call.source.without_model()
        return replace(call, source=source, config=source.settings(call.config))

    def _why_plainly(self, call: Call, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> str:
        """Why a call decodes without drafts because of foreign code in its target; empty if it drafts."""
        choice = call.config.speculation_hooks
        if self.on_prepared is not None or not self.source.drafts or choice == "trusted":
            return ""
        if not call.ranks.max(int(bool(call.foreign_code))):
            return ""
        reason = 'speculation_hooks is "plain"'
        if choice == "check":
            obstacle_of = importlib.import_module(_SELF_TEST).foreign_code_obstacle
            reason = obstacle_of(call, generation_config, model_kwargs, self.source)
        code = described(call.foreign_code) or "hooks on another rank"
        return f"plain decoding, because of {code}: {reason}" if reason else ""

    def _warn(self, reason: str) -> None:
        """Record a fallback, and warn of it."""
        self.stats.add_fallback(reason)
        warnings.warn(reason, stacklevel=caller_level())

    def _decode_plainly(
        self,
        call: Call,
        plain: tuple[LogitsProcessorList, StoppingCriteriaList, GenerationConfig],
        model_kwargs: Mapping[str, Any],
        static_cache: Cache | None,
    ) -> GenerateOutput | Tensor:
        """Decode in transformers' own loop, over a cache that holds what transformers puts there."""
        self.stats.plan = f"Plan(drafter: none; {self.stats.fallbacks[-1]})"
        options = {**model_kwargs, "streamer": call.streamer, "synced_gpus": call.ranks.is_synced}
        device, seeds = call.prompts.input_ids.device, None
        if call.do_sample and (call.config.seed is not None or call.config.generator is not None):
            seeds = call.config.row_seeds(call.batch_size, do_sample=True)
        devices = [device.index or 0] if seeds is not None and device.type not in ("cpu", "meta") else []
        with torch.random.fork_rng(devices, enabled=seeds is not None, device_type=device.type if devices else "cuda"):
            if seeds is not None:
                torch.manual_seed(int(seeds.sum()))
            output: Any = plain_decoding(call.target, call.prompts.input_ids, plain, **options)
        if static_cache is not None:
            static_copies().write_back(call.cache, static_cache)
        if isinstance(output, ModelOutput):
            cache = self._returned_cache(call) if static_cache is None else static_cache
            for name in CACHE_NAMES:
                if output.get(name) is not None:
                    output[name] = cache
        self.clock.enter(Stage.INPUTS)
        self.stats.add_seconds(self.clock.lap())
        return output  # type: ignore[no-any-return]

    def _decode(self, prepared: Prepared, static_cache: Cache | None, encoded: object) -> GenerateOutput | Tensor:
        decoder, batch, call = prepared.decoder, prepared.batch, prepared.plan.call
        input_ids, pad_id = call.prompts.input_ids, call.pad_token_id or 0
        folded = folded_attention_for([] if call.recorded.attentions else call.models)
        with folded, decoder.caches(call.is_cache_passed):
            decoder.decode(batch)
            self.clock.enter(Stage.RETURN)
            decoder.target.kv_cache.hand_back()
            cache = self._returned_cache(call) if static_cache is None else static_cache
            if call.streamer is not None:
                call.streamer.end()
            output: GenerateOutput | Tensor
            if call.generation_config.return_dict_in_generate:
                encoder_states = encoded.get("hidden_states") if isinstance(encoded, ModelOutput) else None
                output = decoder.output.output(input_ids, pad_id, cache, encoder_states)
            else:
                output = decoder.output.sequences(input_ids, pad_id)
            for row, ids in enumerate(decoder.output.new_ids.values()):
                call.source.keep_row(ids, partial(call.prompts.real_ids, row))
            if static_cache is not None:
                static_copies().write_back(call.cache, static_cache)  # the last step, which nothing would undo
        return output

    def _returned_cache(self, call: Call) -> Cache:
        """The cache that plain `generate` returns for a call without a passed static one."""
        if not self.is_static or not call.is_cache_kept:
            return call.cache
        num_columns = call.max_length + call.prompts.num_ahead - 1
        max_cache_len = max(num_columns, getattr(call.generation_config, "max_cache_len", None) or 0)
        config = call.target.config.get_text_config(decoder=True)
        copy: Cache = static_copies().static_copy(call.cache, config, max_cache_len)
        return copy

    def _shape_of_ones(self, prompt: Tensor) -> tuple[int, ...] | None:
        """The shape of a passed mask of ones, which transformers may drop, for a prompt [B, P, ...]; or None."""
        names = ("inputs_embeds", "input_ids", "inputs")
        mask, prompts = self.passed.get("attention_mask"), [self.passed[name] for name in names if name in self.passed]
        if mask is None or not prompts or prompts[0].shape[1] != prompt.shape[1]:
            return None  # none was passed, or the model's own generate() has made another prompt
        num_copies = prompt.shape[0] // prompts[0].shape[0]
        return (prompt.shape[0] if len(mask) == 1 else len(mask) * num_copies, *mask.shape[1:])


def _replace_static_cache(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> Cache | None:
    """The static cache that a call passes, if any; a dynamic one with its states replaces it."""
    cache: Cache = model_kwargs[cache_name(model)]
    if not is_static(cache):
        return None
    model_kwargs[cache_name(model)] = static_copies().dynamic_copy(cache, model.config.get_text_config(decoder=True))
    return cache


def _for_generators(
    call: Call, generation_config: GenerationConfig, inputs_tensor: Tensor | None, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What transformers hands to its candidate generators."""
    input_ids = call.prompts.input_ids
    return {
        "input_ids": input_ids,
        "generation_config": generation_config,
        "model_kwargs": model_kwargs,
        "inputs_tensor": input_ids if inputs_tensor is None else inputs_tensor,
        "logits_processor": call.processors,
        "vocab_size": vocab_size_of(call.target),
    }
