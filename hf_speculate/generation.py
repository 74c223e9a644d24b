"""The door: `generate()` of an enabled model, with its uses of transformers' private names."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache, StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_speculate.arguments import bind, own_prompt_lookup, own_static_cache, own_stop_strings, samples
from hf_speculate.attention_switch import folded_attention_for
from hf_speculate.batch import Batch
from hf_speculate.build import Call, build_decoder
from hf_speculate.compiling import Static, compile_settings, static_of
from hf_speculate.config import FIELD_NAMES, SpeculationConfig, fields_of, read_config
from hf_speculate.decoder import SpeculativeDecoder
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.outputs import Recorded
from hf_speculate.refusals import (
    Reason,
    check_assistant,
    check_call,
    check_models,
    check_prepared,
    check_rope,
    checked_mask,
    reason_of,
)
from hf_speculate.verify.base import check_verifier

GenerateOutput = GenerateDecoderOnlyOutput | Tensor  # what transformers' plain decoding returns
_TRANSFORMERS_FIELDS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)


class SpeculativeGenerationMixin(GenerationMixin):
    """Gives a model class speculative `generate()`; put it before the model in a class's bases.

    `generate()` takes all that transformers' takes, and the fields of `SpeculationConfig` as keywords or from a
    `GenerationConfig`. Without `assistant_model` and `prompt_lookup_num_tokens` it decodes plainly; with
    `do_sample=True` and `verifier="coupled"` it then draws, token by token, the text that every assistant gives with
    the same seed.
    """

    def generate(self, *args: Any, **kwargs: Any) -> GenerateOutput:  # type: ignore[override]  # takes the same
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
) -> GenerateOutput:
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
    if isinstance(fields_from, str | Path):
        fields: Mapping[str, Any] = json.loads(Path(fields_from).read_text(encoding="utf-8"))
    else:
        fields = fields_from or {}
    if isinstance(model, SpeculativeGenerationMixin):
        plain: Any = super(SpeculativeGenerationMixin, model).generate  # type: ignore[misc]
    else:
        plain_class: Any = type(model)
        plain = plain_class.generate.__get__(model)
    return _generate(model, plain, args, kwargs, fields)


def _generate(
    model: PreTrainedModel,
    plain: Callable[..., GenerateOutput],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fields_from: Mapping[str, Any],
) -> GenerateOutput:
    call = bind(plain, args, kwargs)
    if isinstance(call.get("custom_generate"), str):
        return plain(**call)  # the repository's function comes back through `generate` above
    keywords = {name: call.pop(name) for name in FIELD_NAMES if name in call}
    assistant = call.pop("assistant_model", None)
    passed = call.get("generation_config")
    sources = [keywords, fields_of(passed), _only_fields(fields_from), fields_of(model.generation_config)]
    if assistant is not None:
        sources.append(fields_of(getattr(assistant, "generation_config", None)))
    config = read_config(sources)
    reason = reason_of(assistant, config, samples(model, call))
    if reason is None:
        if config.verifier is not None:
            check_verifier(config)
        if config.speculation_stats is not None:
            config.speculation_stats.reset()
        return plain(**call, **{name: keywords[name] for name in _TRANSFORMERS_FIELDS if name in keywords})
    models = [model]
    if assistant is not None:
        check_assistant(assistant, call)
        models = [model, assistant]
    check_call(call, reason)
    check_models(models, stateful_names(models), reason)
    own_stop_strings(model, call)
    own_prompt_lookup(model, call)
    is_static = own_static_cache(model, call)
    return plain(**call, custom_generate=_Speculation(assistant, config, call, is_static, reason))


def stateful_names(models: Sequence[PreTrainedModel]) -> list[str]:
    """Class names of the models that transformers calls stateful."""
    return [type(one).__name__ for one in models if one._is_stateful]


class _Speculation:
    """The decoding method of one call, run by transformers once it has prepared the inputs."""

    def __init__(
        self,
        assistant: PreTrainedModel | None,
        config: SpeculationConfig,
        call: dict[str, Any],
        is_static: bool,
        reason: Reason,
    ):
        self.assistant = assistant
        self.is_static = is_static
        self.reason = reason
        self.config = config
        self.streamer = call.get("streamer")
        self.is_cache_passed = call.get("past_key_values") is not None
        mask = call.get("attention_mask")
        self.passed_mask_len = None if mask is None else mask.shape[-1]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateOutput:
        config = self.config.resolve(bool(generation_config.do_sample))
        check_verifier(config)
        check_rope(model, generation_config.max_length, self.reason)
        check_prepared(input_ids, generation_config, model_kwargs, self.streamer, self.reason)
        cache = model_kwargs["past_key_values"]
        pad = generation_config._pad_token_tensor
        returns_dict = bool(generation_config.return_dict_in_generate)
        call = Call(
            input_ids=input_ids,
            query_ids=self._query(input_ids, cache),
            attention_mask=checked_mask(model_kwargs.get("attention_mask")),
            cache=cache,
            is_cache_passed=self.is_cache_passed,
            is_cache_kept=self.is_cache_passed or returns_dict,
            processors=logits_processor,
            criteria=stopping_criteria,
            do_sample=bool(generation_config.do_sample),
            max_length=generation_config.max_length,
            pad_token_id=None if pad is None else int(pad),
            prefill_chunk_size=generation_config.prefill_chunk_size,
            recorded=_recorded(generation_config),
            on_tokens=self._stream if self.streamer is not None else None,
            target_attention=_attention(model),
            draft_attention="" if self.assistant is None else _attention(self.assistant),
            static=_static(model, self.assistant, generation_config, self.is_static),
        )
        decoder, batch = build_decoder(model, self.assistant, config, call)
        needs_eager = call.recorded.attentions
        models = [one for one in (model, self.assistant) if one is not None and not needs_eager]
        with folded_attention_for(models):
            self._decode(decoder, batch)
        if config.suffix_store is not None:
            for ids in decoder.recorder.new_ids:
                config.suffix_store.add(ids)
        if self.streamer is not None:
            self.streamer.end()
        return _output(decoder, call) if returns_dict else decoder.recorder.sequences(input_ids, call.pad_token_id or 0)

    def _decode(self, decoder: SpeculativeDecoder, batch: Batch) -> None:
        """Decode; a cache that the user passed is brought back when that fails."""
        snapshot = batch.target_cache.snapshot() if self.is_cache_passed else None
        try:
            decoder.decode(batch)
            batch.target_cache.hand_back()
        except BaseException:
            if snapshot is not None:
                batch.target_cache.restore(snapshot)
            raise
        finally:
            batch.release()

    def _query(self, input_ids: Tensor, cache: Cache) -> Tensor:
        """The prompt tokens that the cache does not hold; `input_ids` may be the whole text or only what is new."""
        num_held = cache.get_seq_length()
        has_all = self.passed_mask_len is None or self.passed_mask_len == input_ids.shape[1]
        query = input_ids[:, num_held:] if has_all else input_ids
        held_rows = _num_cached_rows(cache)
        if query.shape[1] < 1 or held_rows not in (None, input_ids.shape[0]):
            raise UnsupportedGenerationError(
                f"past_key_values must hold fewer tokens than the prompt, for {input_ids.shape[0]} rows, "
                f"got {num_held} of {input_ids.shape[1]} tokens for {held_rows} rows; "
                "pass the whole text and the cache of its beginning"
            )
        return query

    def _stream(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.streamer.put(torch.tensor([token_id]))  # type: ignore[union-attr]


def _attention(model: PreTrainedModel) -> str:
    """The implementation that the model's decoder looks up at every forward."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _only_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in FIELD_NAMES if values.get(name) is not None}


def _num_cached_rows(cache: Cache) -> int | None:
    layers: list[Any] = cache.layers
    rows = [layer.keys.shape[0] for layer in layers if layer.get_seq_length()]
    return rows[0] if rows else None


def _static(
    model: PreTrainedModel, assistant: PreTrainedModel | None, config: GenerationConfig, is_static: bool
) -> Static | None:
    """What the call asks of fixed buffers; what plain `generate` would not compile is not compiled."""
    if not is_static and config.compile_config is None:
        return None
    settings = []
    for one in (model, model if assistant is None else assistant):
        probe = StaticCache(config=one.config.get_text_config(decoder=True), max_cache_len=1)
        compiles = one._valid_auto_compile_criteria({"past_key_values": probe}, config)  # type: ignore[operator]
        compile_config = config.compile_config or one._default_compile_config()
        settings.append(compile_settings(compile_config) if compiles else None)
    return static_of(settings, config, model.device)


def _recorded(generation_config: GenerationConfig) -> Recorded:
    if not generation_config.return_dict_in_generate:
        return Recorded()
    return Recorded(
        scores=bool(generation_config.output_scores),
        logits=bool(generation_config.output_logits),
        hidden_states=bool(generation_config.output_hidden_states),
        attentions=bool(generation_config.output_attentions),
    )


def _output(decoder: SpeculativeDecoder, call: Call) -> GenerateDecoderOnlyOutput:
    recorder, pad = decoder.recorder, call.pad_token_id or 0
    parts: dict[str, Any] = {
        "sequences": recorder.sequences(call.input_ids, pad),
        "scores": recorder.scores(pad),
        "logits": recorder.logits(pad),
        "attentions": tuple(recorder.attentions) if recorder.recorded.attentions else None,
        "hidden_states": tuple(recorder.hidden_states) if recorder.recorded.hidden_states else None,
        "past_key_values": call.cache,
    }
    output = GenerateDecoderOnlyOutput(**parts)
    output.speculation = decoder.stats
    return output


def warn_of_lost_fields(model: PreTrainedModel) -> None:
    """Say so when transformers will lose our fields on the next load.

    Args:
        model: whose generation config is looked at.
    """
    config = model.generation_config
    names = sorted(fields_of(config))
    if names and config._from_model_config:
        warnings.warn(
            f"generation_config carries _from_model_config, so transformers will drop {', '.join(names)} when it is "
            "saved and loaded; save a fresh GenerationConfig(**fields) instead",
            stacklevel=3,
        )
