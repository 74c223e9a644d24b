"""The decoding method of a call, which transformers runs once it has prepared the inputs."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from hf_speculate.cache.layers import num_cached
from hf_speculate.cache.static import is_static, static_copies
from hf_speculate.compat import CACHE_NAMES
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.builder import Prepared, build_decoder
from hf_speculate.engine.call import Call, Prompts
from hf_speculate.engine.drafter_setup import begin_source
from hf_speculate.engine.outputs import GenerateOutput
from hf_speculate.engine.plan import make_plan, with_working_kernels
from hf_speculate.engine.ranks import find_ranks
from hf_speculate.engine.row_lists import ONE_CALL, refilled_rows
from hf_speculate.engine.runners import static_request
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.generation.arguments import uncached
from hf_speculate.generation.draft_encoder import read_inputs
from hf_speculate.generation.model_inputs import draft_inputs, target_inputs
from hf_speculate.generation.validate_call import check_context, check_mask, check_prepared, check_room, check_synced
from hf_speculate.generation.validate_models import check_target
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.folded_attention import folded_attention_for
from hf_speculate.models.language_model import cache_name, text_prefix, vocab_size_of
from hf_speculate.models.quirks import is_tested_type
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria
from hf_speculate.processors.used import check_unused
from hf_speculate.stats import SpeculationStats
from hf_speculate.verify.base import check_verifier

_SELF_TEST = "hf_speculate.options.self_test.compare"  # imported for models of a type that no test has shown


class _Inputs(NamedTuple):
    """What transformers has prepared."""

    model: PreTrainedModel
    input_ids: Tensor  # [B, T] int64
    generation_config: GenerationConfig
    inputs_tensor: Tensor | None
    model_kwargs: dict[str, Any]
    static_cache: Cache | None  # the passed one, whose states a dynamic cache in `model_kwargs` holds; or None


@dataclass(eq=False)
class SpeculativeDecoding:
    """A `custom_generate` function for one call of `generate()`, which Whisper's own `generate` runs several times."""

    source: DraftSource
    config: SpeculationConfig
    passed: dict[str, Any]  # the arguments of the call that are not None
    is_static: bool  # whether the call asks for fixed buffers
    clock: StageClock  # that was made when the call began
    first_row: int = 0  # number of the first output row
    # gets the prepared call in place of decoding it, so that its rows may join others; None to decode
    on_prepared: Callable[[Prepared], object] | None = None

    def __post_init__(self) -> None:
        self.stats = self.config.speculation_stats or SpeculationStats()
        self.stats.reset()
        self.config = replace(self.config, speculation_stats=self.stats)
        self.num_runs = 0
        self.is_cache_passed = not self.passed.keys().isdisjoint(CACHE_NAMES)

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
        cache, static_cache = model_kwargs[cache_name(model)], None
        if is_static(cache):
            static_cache = cache
            text_config = model.config.get_text_config(decoder=True)
            model_kwargs[cache_name(model)] = static_copies().dynamic_copy(cache, text_config)
        inputs = _Inputs(model, input_ids, generation_config, inputs_tensor, model_kwargs, static_cache)
        check_unused(logits_processor)
        processors = BlockLogitsProcessorList(logits_processor).by_row(len(input_ids))
        call = self._call(inputs, config, processors, stopping_criteria)
        self_test = ""
        if not is_tested_type(model):
            check_decoding = importlib.import_module(_SELF_TEST).check_decoding
            self_test = check_decoding(call, generation_config, model_kwargs, self.source)
        call = with_working_kernels(call, self.stats)
        call = begin_source(call, self.stats, self._for_generators(inputs, processors))
        prepared = build_decoder(make_plan(call, self_test), self.stats, self.clock)
        if self.on_prepared is not None:
            self.on_prepared(prepared)
            return input_ids
        output = self._decode(prepared, inputs)
        self.clock.enter(Stage.INPUTS)  # a model's own generate() may go on with another run
        self.stats.add_seconds(self.clock.lap())
        return output

    def _decode(self, prepared: Prepared, inputs: _Inputs) -> GenerateOutput | Tensor:
        decoder, batch, call = prepared.decoder, prepared.batch, prepared.plan.call
        folded = folded_attention_for([] if call.recorded.attentions else call.models)
        with folded, decoder.caches(call.is_cache_passed):
            decoder.decode(batch)
            self.clock.enter(Stage.RETURN)
            decoder.target.kv_cache.hand_back()
            cache, pad_id = self._returned_cache(inputs, call), call.pad_token_id or 0
            if call.streamer is not None:
                call.streamer.end()
            output: GenerateOutput | Tensor
            if inputs.generation_config.return_dict_in_generate:
                encoded = inputs.model_kwargs.get("encoder_outputs")
                encoder_states = encoded.get("hidden_states") if isinstance(encoded, ModelOutput) else None
                output = decoder.output.output(inputs.input_ids, pad_id, cache, encoder_states)
            else:
                output = decoder.output.sequences(inputs.input_ids, pad_id)
            for ids in decoder.output.new_ids.values():
                call.source.keep(ids)
            if inputs.static_cache is not None:
                static_copies().write_back(call.cache, inputs.static_cache)  # the last step, which nothing would undo
        return output

    def _call(
        self,
        inputs: _Inputs,
        config: SpeculationConfig,
        processors: BlockLogitsProcessorList,
        criteria: StoppingCriteriaList,
    ) -> Call:
        model, input_ids, generation_config, inputs_tensor, model_kwargs, static_cache = inputs
        source, device = self.source, input_ids.device
        draft = source.model
        mask = model_kwargs.get(f"{text_prefix(model)}attention_mask")  # [B, P] of any dtype
        padding_mask = None if mask is None or bool((mask != 0).all()) else (mask != 0).to(torch.int64)
        query_ids = self._query(inputs, mask, padding_mask is not None)
        has_positions = "position_ids" in self.passed
        extra = target_inputs(model, input_ids, query_ids.shape[1], model_kwargs, has_positions=has_positions)
        check_context(extra, input_ids, generation_config, draft, source.vocabulary)
        is_fixed = self.is_static or static_cache is not None
        models = [model] if draft is None else [model, draft]
        ranks = find_ranks(self.passed.get("synced_gpus"), models, device)
        if ranks.is_synced:
            has_compiled = generation_config.compile_config is not None
            check_synced(generation_config, is_fixed or has_compiled, self.source)
        reads_tensor = "encoder_outputs" not in self.passed and model_kwargs.get("inputs_embeds") is None
        read = model, inputs_tensor if reads_tensor else None, model_kwargs, len(input_ids), source.vocabulary
        read_by_draft: ExtraInputs | None
        if draft is not None and draft.config.is_encoder_decoder:
            read_by_draft = read_inputs(self.stats, ranks, draft, *read)
        else:
            read_by_draft = draft_inputs(draft, *read)
        if read_by_draft is None:  # the draft cannot read what the target has read
            source = source.without_model()
            config = source.settings(config)
        static = static_request(model, source.model, generation_config, is_fixed, source.eager_reason)
        return Call(
            target=model,
            source=source,
            config=config,
            generation_config=copy.copy(generation_config),  # candidate generators may write to the one they are given
            prompts=Prompts(input_ids, query_ids, padding_mask),
            cache=model_kwargs[cache_name(model)],
            is_cache_passed=self.is_cache_passed and static_cache is None,
            is_cache_kept=self.is_cache_passed or bool(generation_config.return_dict_in_generate),
            processors=processors,
            criteria=BlockStoppingCriteria(criteria),
            streamer=self.passed.get("streamer"),
            static=static,
            target_inputs=extra,
            draft_inputs=read_by_draft or ExtraInputs(),
            ranks=ranks,
            row_lists=ONE_CALL if self.on_prepared is None else refilled_rows(self.first_row),
        )

    def _for_generators(self, inputs: _Inputs, processors: BlockLogitsProcessorList) -> dict[str, Any]:
        """What transformers hands to its candidate generators."""
        tensor = inputs.input_ids if inputs.inputs_tensor is None else inputs.inputs_tensor
        return {
            "input_ids": inputs.input_ids,
            "generation_config": inputs.generation_config,
            "model_kwargs": inputs.model_kwargs,
            "inputs_tensor": tensor,
            "logits_processor": processors,
            "vocab_size": vocab_size_of(inputs.model),
        }

    def _query(self, inputs: _Inputs, mask: Tensor | None, is_padded: bool) -> Tensor:
        """[B, Q] int64, the prompt tokens that the cache does not hold, after the checks of mask, length and cache."""
        model, input_ids, generation_config = inputs.model, inputs.input_ids, inputs.generation_config
        cache = inputs.model_kwargs[cache_name(model)]
        mask_shape = None if mask is None else tuple(mask.shape)
        if model.config.is_encoder_decoder:
            query = uncached(input_ids, cache, mask)
        else:
            embeds, passed = inputs.model_kwargs.get("inputs_embeds"), self.passed.get("attention_mask")
            query = uncached(input_ids, cache, passed, embeds)
            if not is_padded:
                mask_shape = self._shape_of_ones(input_ids if embeds is None else embeds)
        num_columns_before = num_cached(cache)
        check_mask(mask_shape, query, num_columns_before, text_prefix(model))
        max_tokens = generation_config.max_length + num_columns_before + query.shape[1] - input_ids.shape[1]
        check_target(model, generation_config, is_padded, max_tokens, self.source)
        if inputs.static_cache is not None:
            room = static_copies().room_in(inputs.static_cache, model.config.get_text_config(decoder=True))
            check_room(room, max_tokens - 1)
        return query

    def _returned_cache(self, inputs: _Inputs, call: Call) -> Cache:
        """The cache that plain `generate` returns: the passed one, or one of the requested kind."""
        if inputs.static_cache is not None:
            return inputs.static_cache
        if not self.is_static or not call.is_cache_kept:
            return call.cache
        num_columns = call.max_length + call.prompts.num_ahead - 1
        max_cache_len = max(num_columns, getattr(inputs.generation_config, "max_cache_len", None) or 0)
        config = inputs.model.config.get_text_config(decoder=True)
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
