"""The decoding method of a call, which transformers runs once it has prepared the inputs."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import num_held
from hf_speculate.cache.static import dynamic_copy, is_static, room_in, static_copy, write_back
from hf_speculate.compat import adapters_by_row, attention_name, pad_token_id
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.assistant import ResolvedAssistant
from hf_speculate.draft.from_candidate_generator import make_generator
from hf_speculate.engine.builder import build_decoder
from hf_speculate.engine.call import Call
from hf_speculate.engine.compile_plan import static_request
from hf_speculate.engine.distributed import synced_ranks, tensor_parallel_group
from hf_speculate.engine.outputs import GenerateOutput, recorded_of
from hf_speculate.engine.running_batch import Preparation, Prepared
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.generation.arguments import uncached
from hf_speculate.generation.draft_source import DraftSource
from hf_speculate.generation.model_inputs import draft_inputs, encoder_hidden_states, target_inputs
from hf_speculate.generation.self_test import check_decoding
from hf_speculate.generation.validate_call import (
    check_context,
    check_mask,
    check_prepared,
    check_room,
    check_span_ids,
    check_synced,
    checked_mask,
)
from hf_speculate.generation.validate_models import (
    check_attention,
    check_chunks,
    check_decoder_prompt,
    check_rope,
)
from hf_speculate.models.attention_switch import folded_attention_for
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.language_model import CACHE_NAMES, cache_name, text_prefix, vocab_size_of
from hf_speculate.stats import SpeculationStats
from hf_speculate.verify.base import check_verifier


class _Run(NamedTuple):
    model: PreTrainedModel
    input_ids: Tensor  # [B, P] int64
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    inputs_tensor: Tensor | None
    model_kwargs: dict[str, Any]


class _Text(NamedTuple):
    query_ids: Tensor  # [B, Q] int64, the tokens that the cache does not hold
    mask: Tensor | None
    cache: Cache
    static_cache: Cache | None  # the one that was passed, whose states `cache` holds
    model_kwargs: dict[str, Any]  # with `cache`


class SpeculativeDecoding:
    """A `custom_generate` function that decodes for one `generate()` call, with fixed buffers if `is_static`.

    A model's own `generate`, such as Whisper's, may call it several times: for parts of the input, or to try again.
    With a `preparation`, the decoder is handed over to that instead of run.
    """

    def __init__(
        self,
        assistant: ResolvedAssistant,
        config: SpeculationConfig,
        call: dict[str, Any],
        is_static: bool,
        source: DraftSource,
        preparation: Preparation | None = None,
    ):
        self.preparation = preparation
        self.assistant = assistant
        self.is_static = is_static
        self.source = source
        self.stats = config.speculation_stats or SpeculationStats()
        self.stats.reset()
        self.config = replace(config, speculation_stats=self.stats)
        self.num_runs = 0
        self.clock = StageClock()
        self.passed = {name: value for name, value in call.items() if value is not None}  # by the user
        self.streamer = call.get("streamer")
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
        input_ids = input_ids.long()  # plain decoding takes int32 prompts too, and returns int64
        config = self.config.for_run(self.num_runs).resolve(bool(generation_config.do_sample))
        self.num_runs += 1
        check_verifier(config)
        check_span_ids(config, model)
        run = _Run(
            model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor, model_kwargs
        )
        call = self._prepared(run, config)
        self_test = check_decoding(model, call, config, generation_config, model_kwargs, self.source)
        call = replace(call, self_test=self_test)
        if self.preparation is not None:
            call = replace(call, first_row=self.preparation.first_row, rows_leave=True)
        decoder, batch = build_decoder(model, self.assistant.model, config, call, self.stats, self.clock)
        if self.preparation is not None:
            self.preparation.prepared = [Prepared(decoder, batch, call, config, self.stats)]
            return input_ids
        folded = folded_attention_for([] if call.recorded.attentions else self._models(model))
        with folded, decoder.released(), decoder.target.restored_on_error(call.is_cache_passed):
            decoder.decode(batch)
            self.clock.enter(Stage.RETURN)
            decoder.target.kv_cache.hand_back()
            cache, pad_id = self._returned_cache(model, call, generation_config), call.pad_token_id or 0
            if self.streamer is not None:
                self.streamer.end()
            output: GenerateOutput | Tensor
            if generation_config.return_dict_in_generate:
                output = decoder.output.output(input_ids, pad_id, cache, encoder_hidden_states(model_kwargs))
            else:
                output = decoder.output.sequences(input_ids, pad_id)
            if config.suffix_store is not None:
                for ids in decoder.output.new_ids.values():
                    config.suffix_store.add(ids)
            if call.static_cache is not None:
                write_back(call.cache, call.static_cache)  # the last step, which nothing would undo
        self.clock.enter(None)
        return output

    def _prepared(self, run: _Run, config: SpeculationConfig) -> Call:
        model, draft, generation_config = run.model, self.assistant.model, run.generation_config
        text = self._text(run)
        num_query, has_positions = text.query_ids.shape[1], "position_ids" in self.passed
        context = target_inputs(model, run.input_ids, num_query, text.model_kwargs, has_positions=has_positions)
        check_context(context, run.input_ids, generation_config, draft, self.assistant.vocabulary)
        is_static = self.is_static or text.static_cache is not None
        static = static_request(model, draft, generation_config, is_static, self.assistant.eager_reason)
        device = run.input_ids.device
        ranks = synced_ranks(self.passed.get("synced_gpus"), self._models(model), device)
        if ranks is not None:
            check_synced(config, generation_config, static.is_static, self.source)
        return Call(
            input_ids=run.input_ids,
            query_ids=text.query_ids,
            attention_mask=checked_mask(text.mask),
            cache=text.cache,
            static_cache=text.static_cache,
            is_cache_passed=self.is_cache_passed and text.static_cache is None,
            is_cache_kept=self.is_cache_passed or bool(generation_config.return_dict_in_generate),
            keeps_rows=adapters_by_row(model),
            processors=run.logits_processor,
            criteria=run.stopping_criteria,
            do_sample=bool(generation_config.do_sample),
            max_length=generation_config.max_length,
            pad_token_id=pad_token_id(generation_config),
            prefill_chunk_size=generation_config.prefill_chunk_size,
            recorded=recorded_of(generation_config),
            on_tokens=self._stream if self.streamer is not None else None,
            target_attention=_attention(model),
            draft_attention=_attention(draft),
            static=static,
            target_inputs=context,
            draft_inputs=self._draft_inputs(run, text),
            vocabulary=self.assistant.vocabulary,
            generator=make_generator(
                config.candidate_generator,
                input_ids=run.input_ids,
                generation_config=generation_config,
                model_kwargs=text.model_kwargs,
                inputs_tensor=run.input_ids if run.inputs_tensor is None else run.inputs_tensor,
                logits_processor=run.logits_processor,
                vocab_size=vocab_size_of(model),
            ),
            ranks=ranks,
            group=tensor_parallel_group(self._models(model), device),
        )

    def _text(self, run: _Run) -> _Text:
        """The text that is decoded from, after the checks of models, cache and mask."""
        model, generation_config, input_ids = run.model, run.generation_config, run.input_ids
        has_encoder = bool(model.config.is_encoder_decoder)
        check_attention(model, _attention(model), bool(generation_config.output_attentions), self.source)
        check_prepared(input_ids, generation_config, run.model_kwargs, has_encoder, self.streamer, self.source)
        mask = run.model_kwargs.get("decoder_attention_mask" if has_encoder else "attention_mask")
        if has_encoder:
            check_decoder_prompt(model, mask, self.source)
        cache, static_cache, model_kwargs = run.model_kwargs[cache_name(model)], None, run.model_kwargs
        text_config = model.config.get_text_config(decoder=True)
        if is_static(cache):
            static_cache, cache = cache, dynamic_copy(cache, text_config)
            model_kwargs = {**model_kwargs, "past_key_values": cache}
        embeds = model_kwargs.get("inputs_embeds")
        mask_shape = None if mask is None else tuple(mask.shape)
        passed = mask if has_encoder else self.passed.get("attention_mask")
        query = uncached(
            input_ids, cache, None if passed is None else passed.shape[-1], None if has_encoder else embeds
        )
        if not has_encoder and (mask is None or bool((mask != 0).all())):
            mask_shape = self._shape_of_ones(input_ids if embeds is None else embeds)
        check_mask(mask_shape, query, num_held(cache), text_prefix(model))
        max_tokens = generation_config.max_length + num_held(cache) + query.shape[1] - input_ids.shape[1]
        check_chunks(model, generation_config, self.source)
        check_rope(model, max_tokens, self.source)
        if static_cache is not None:
            check_room(room_in(static_cache, text_config), max_tokens - 1)
        return _Text(query, mask, cache, static_cache, model_kwargs)

    def _draft_inputs(self, run: _Run, text: _Text) -> ExtraInputs:
        reads_tensor = "encoder_outputs" not in self.passed and text.model_kwargs.get("inputs_embeds") is None
        inputs = run.inputs_tensor if reads_tensor else None
        draft, batch_size = self.assistant.model, run.input_ids.shape[0]
        return draft_inputs(draft, run.model, inputs, text.model_kwargs, batch_size, self.assistant.vocabulary)

    def _returned_cache(self, model: PreTrainedModel, call: Call, generation_config: GenerationConfig) -> Cache:
        """The cache that plain `generate` returns: the passed one, or one of the requested kind."""
        if call.static_cache is not None:
            return call.static_cache
        if not self.is_static or not call.is_cache_kept:
            return call.cache
        num_columns = call.max_length + call.query_ids.shape[1] - call.input_ids.shape[1] - 1
        max_cache_len = max(num_columns, getattr(generation_config, "max_cache_len", None) or 0)
        return static_copy(call.cache, model.config.get_text_config(decoder=True), max_cache_len)

    def _shape_of_ones(self, prompt: Tensor) -> tuple[int, ...] | None:
        """The shape of a passed mask of ones, which transformers may drop, for a prompt [B, P, ...]; or None."""
        names = ("inputs_embeds", "input_ids", "inputs")
        mask, prompts = self.passed.get("attention_mask"), [self.passed[name] for name in names if name in self.passed]
        if mask is None or not prompts or prompts[0].shape[1] != prompt.shape[1]:
            return None  # none was passed, or the model's own generate() has made another prompt
        num_copies = prompt.shape[0] // prompts[0].shape[0]
        return (prompt.shape[0] if len(mask) == 1 else len(mask) * num_copies, *mask.shape[1:])

    def _models(self, model: PreTrainedModel) -> list[PreTrainedModel]:
        return [one for one in (model, self.assistant.model) if one is not None]

    def _stream(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.streamer.put(torch.tensor([token_id], device="cpu"))  # type: ignore[union-attr]


def _attention(model: PreTrainedModel | None) -> str:
    """The implementation that the model's decoder looks up at every forward."""
    return "" if model is None else str(attention_name(model.config.get_text_config(decoder=True)))
