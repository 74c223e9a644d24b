"""The door: `generate()` of an enabled model."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.utils.generic import ModelOutput

from hf_speculate.arguments import (
    bind,
    own_early_exit,
    own_prompt_lookup,
    own_static_cache,
    own_stop_strings,
    samples,
    uncached,
    unwrapped,
)
from hf_speculate.attention_switch import folded_attention_for
from hf_speculate.build import build_decoder
from hf_speculate.call import Call
from hf_speculate.compiling import static_of, with_eager_draft
from hf_speculate.config import FIELD_NAMES, SpeculationConfig, fields_of, read_config
from hf_speculate.contexts import draft_context, target_context
from hf_speculate.draft.foreign import make_generator
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.healing import HealsTokens, healing
from hf_speculate.matching import Drafting, choose_draft, warn_of_low_acceptance
from hf_speculate.outputs import GenerateOutput, recorded_of
from hf_speculate.peers import peers_of
from hf_speculate.private_names import (
    adapters_by_row,
    attention_name,
    comes_from_model_config,
    pad_token_id,
    stateful_names,
)
from hf_speculate.reasons import Reason, reason_of
from hf_speculate.refusals.calls import check_call, check_context, check_prepared, check_synced, checked_mask
from hf_speculate.refusals.models import check_assistant, check_models, check_rope
from hf_speculate.saved_fields import fields_in
from hf_speculate.stats import SpeculationStats
from hf_speculate.tracing import Place, Stage
from hf_speculate.verify.base import check_verifier

_TRANSFORMERS_FIELDS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)


class SpeculativeGenerationMixin(HealsTokens):
    """Gives a model class speculative `generate()`; put it before the model in a class's bases.

    `generate()` takes all that transformers' takes, and the fields of `SpeculationConfig` as keywords or from a
    `GenerationConfig`. Without a source of drafts it decodes plainly; with `do_sample=True` and `verifier="coupled"`
    it then draws, token by token, the text that every assistant gives with the same seed.
    """

    def generate(self, *args: Any, **kwargs: Any) -> GenerateOutput | Tensor:  # type: ignore[override]  # takes the same
        """See `transformers.GenerationMixin.generate`; returns the same, with `.speculation` on output objects.

        Raises:
            ConfigError: a field has a wrong value.
            UnsupportedGenerationError: a combination of arguments cannot be decoded speculatively.
            UnsupportedModelError: a model cannot take part.
        """
        plain = super().generate  # type: ignore[misc]  # self is a model wherever the mixin is used
        return _generate(self, plain, args, kwargs, {})  # type: ignore[arg-type]


def generate(
    model: PreTrainedModel, *args: Any, fields_from: str | Path | Mapping[str, Any] | None = None, **kwargs: Any
) -> GenerateOutput | Tensor:
    """Decode once with speculation, without enabling the model.

    The model class's own `generate` runs underneath, never one that was put on the instance, so that a Hub
    repository's `custom_generate/generate.py` can call this.

    Args:
        model: the target.
        *args: as `model.generate`.
        fields_from: a `generation_config.json`, or its content; its fields count where the call leaves them open.
        **kwargs: as `model.generate`, and the fields of `SpeculationConfig`.

    Returns:
        What `model.generate` returns.

    Raises:
        ConfigError: a field has a wrong value.
        UnsupportedGenerationError: a combination of arguments cannot be decoded speculatively.
        UnsupportedModelError: a model cannot take part.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model must be a transformers model, got {type(model).__name__}; enable() serves PEFT models"
        )
    if isinstance(model, SpeculativeGenerationMixin):
        plain: Any = super(SpeculativeGenerationMixin, model).generate  # type: ignore[misc]
    else:
        plain_class: Any = type(model)
        plain = plain_class.generate.__get__(model)
    return _generate(model, plain, args, kwargs, fields_in(fields_from))


def _generate(
    model: PreTrainedModel,
    plain: Callable[..., GenerateOutput | Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    saved: Mapping[str, Any],
) -> GenerateOutput | Tensor:
    call = bind(plain, args, kwargs)
    if isinstance(call.get("custom_generate"), str):
        return plain(**call)  # the repository's function comes back through `generate` above
    keywords = {name: call.pop(name) for name in FIELD_NAMES if name in call}
    assistant = unwrapped(call.pop("assistant_model", None))
    sources = [keywords, fields_of(call.get("generation_config")), saved, fields_of(model.generation_config)]
    if assistant is not None:
        sources.append(fields_of(getattr(assistant, "generation_config", None)))
    config = read_config(sources)
    early_exit = own_early_exit(model, call)
    reason = reason_of(assistant, early_exit, config, samples(model, plain, call))
    if reason is None:
        if config.verifier is not None:
            check_verifier(config)
        if config.speculation_stats is not None:
            config.speculation_stats.reset()
        return plain(**call, **{name: keywords[name] for name in _TRANSFORMERS_FIELDS if name in keywords})
    check_call(call, reason)
    if assistant is not None:
        check_assistant(assistant)
    models = [model] if assistant is None else [model, assistant]
    check_models(models, stateful_names(models), reason)
    tokenizers = call.get("tokenizer"), call.get("assistant_tokenizer")
    drafting = choose_draft(model, assistant, early_exit, *tokenizers)
    own_stop_strings(model, call)
    own_prompt_lookup(model, call)
    is_static = own_static_cache(model, call)
    speculation = _Speculation(drafting, config, call, is_static, reason)
    with speculation.place, healing(model, call):
        output = plain(**call, custom_generate=speculation)
    if not speculation.num_calls:
        raise UnsupportedModelError(
            f"generate() of the model must decode by GenerationMixin's, got {type(model).__name__} with a loop of its "
            f"own; {reason.way_out}"
        )
    reads_text = call.get("inputs_embeds") is None  # a draft that cannot read the prompt is poor, whatever its ids
    if assistant is not None and drafting.is_guess and reads_text and config.prompt_lookup_num_tokens is None:
        warn_of_low_acceptance(model, assistant, speculation.stats)
    if isinstance(output, ModelOutput):
        output.speculation = speculation.stats
    return output


class _Speculation:
    """The decoding method of one call, run by transformers once it has prepared the inputs.

    A model's own `generate`, as Whisper's, may run it several times: for parts of the input, or to try again.
    """

    def __init__(
        self, drafting: Drafting, config: SpeculationConfig, call: dict[str, Any], is_static: bool, reason: Reason
    ):
        self.drafting = drafting
        self.assistant = drafting.assistant
        self.is_static = is_static
        self.reason = reason
        self.stats = config.speculation_stats or SpeculationStats()
        self.stats.reset()
        self.config = replace(config, speculation_stats=self.stats)
        self.num_calls = 0
        self.place = Place()
        self.streamer = call.get("streamer")
        self.synced_gpus = call.get("synced_gpus")
        self.is_cache_passed = call.get("past_key_values") is not None
        self.has_positions = call.get("position_ids") is not None
        self.has_encoder_outputs = call.get("encoder_outputs") is not None
        mask = call.get("attention_mask")
        self.passed_mask_len = None if mask is None else mask.shape[-1]

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
        self.place.enter(Stage.PREPARE, 0)
        config = self.config.for_run(self.num_calls).resolve(bool(generation_config.do_sample))
        self.num_calls += 1
        check_verifier(config)
        has_encoder = bool(model.config.is_encoder_decoder)
        check_prepared(input_ids, generation_config, model_kwargs, has_encoder, self.streamer, self.reason)
        mask = model_kwargs.get("decoder_attention_mask" if has_encoder else "attention_mask")
        if has_encoder:
            self.passed_mask_len = None if mask is None else mask.shape[-1]
        cache = model_kwargs["past_key_values"]
        returns_dict = bool(generation_config.return_dict_in_generate)
        embeds = model_kwargs.get("inputs_embeds")
        query = uncached(input_ids, cache, self.passed_mask_len, None if has_encoder else embeds)
        num_before = cache.get_seq_length() + query.shape[1] - input_ids.shape[1]  # that the output does not show
        check_rope(model, generation_config.max_length + num_before, self.reason)
        context = target_context(model, input_ids, query.shape[1], model_kwargs, has_positions=self.has_positions)
        vocabulary = self.drafting.vocabulary
        check_context(context, input_ids, generation_config, self.assistant, vocabulary)
        inputs = None if self.has_encoder_outputs or embeds is not None else inputs_tensor
        draft_reads = draft_context(self.assistant, model, inputs, model_kwargs, input_ids.shape[0], vocabulary)
        static = static_of(model, self.assistant, generation_config, self.is_static)
        models = [one for one in (model, self.assistant) if one is not None]
        peers = peers_of(self.synced_gpus, models, input_ids.device)
        if peers is not None:
            check_synced(config, generation_config, static is not None, self.reason)
        generator = make_generator(
            config.candidate_generator,
            input_ids=input_ids,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            inputs_tensor=input_ids if inputs_tensor is None else inputs_tensor,
            logits_processor=logits_processor,
        )
        call = Call(
            input_ids=input_ids,
            query_ids=query,
            attention_mask=checked_mask(mask),
            cache=cache,
            is_cache_passed=self.is_cache_passed,
            is_cache_kept=self.is_cache_passed or returns_dict,
            keeps_rows=adapters_by_row(model),
            processors=logits_processor,
            criteria=stopping_criteria,
            do_sample=bool(generation_config.do_sample),
            max_length=generation_config.max_length,
            pad_token_id=pad_token_id(generation_config),
            prefill_chunk_size=generation_config.prefill_chunk_size,
            recorded=recorded_of(generation_config),
            on_tokens=self._stream if self.streamer is not None else None,
            target_attention=_attention(model),
            draft_attention=_attention(self.assistant),
            static=with_eager_draft(static, self.drafting.why_eager),
            target_context=context,
            draft_context=draft_reads,
            vocabulary=vocabulary,
            generator=generator,
            peers=peers,
        )
        decoder, batch = build_decoder(model, self.assistant, config, call)
        recorder, pad_id = decoder.recorder, call.pad_token_id or 0
        folded = folded_attention_for([] if call.recorded.attentions else models)
        with folded, batch.undone_on_error(self.is_cache_passed):
            decoder.decode(batch, self.place)
            self.place.enter(Stage.RETURN)
            batch.target_cache.hand_back()
            output = (
                recorder.output(input_ids, pad_id, cache) if returns_dict else recorder.sequences(input_ids, pad_id)
            )
            if self.streamer is not None:
                self.streamer.end()
            if config.suffix_store is not None:
                for ids in recorder.new_ids:
                    config.suffix_store.add(ids)
        self.place.enter(None)
        return output

    def _stream(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.streamer.put(torch.tensor([token_id]))  # type: ignore[union-attr]


def _attention(model: PreTrainedModel | None) -> str:
    """The implementation that the model's decoder looks up at every forward."""
    return "" if model is None else str(attention_name(model.config.get_text_config(decoder=True)))


def warn_of_lost_fields(model: PreTrainedModel) -> None:
    """Say so when transformers will lose our fields on the next load.

    Args:
        model: whose generation config is looked at.
    """
    config = model.generation_config
    names = sorted(fields_of(config))
    if names and comes_from_model_config(config):
        warnings.warn(
            f"generation_config carries _from_model_config, so transformers will drop {', '.join(names)} when it is "
            "saved and loaded; save a fresh GenerationConfig(**fields) instead",
            stacklevel=3,
        )
