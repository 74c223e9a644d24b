"""The door: `generate()` of an enabled model, with every use of transformers' private names."""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, StopStringCriteria

from hf_speculate.build import Call, build_decoder, check_models
from hf_speculate.config import FIELD_NAMES, SpeculationConfig, fields_of, read_config
from hf_speculate.decoder import Batch, SpeculativeDecoder
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.outputs import Recorded
from hf_speculate.verify.base import make_verifier

_KNOWN_MODEL_KWARGS = {
    "attention_mask",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "use_cache",
}
_TRANSFORMERS_FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_WAY_OUT = "leave assistant_model out to decode without speculation"


class SpeculativeGenerationMixin(GenerationMixin):
    """Gives a model class speculative `generate()`; put it before the model in a class's bases.

    `generate()` takes all that transformers' takes, and the fields of `SpeculationConfig` as keywords or from a
    `GenerationConfig`. Without `assistant_model` it decodes plainly.
    """

    def generate(self, *args: Any, **kwargs: Any) -> GenerateDecoderOnlyOutput | Tensor:
        """See `transformers.GenerationMixin.generate`; returns the same, with `.speculation` on output objects.

        Raises:
            ConfigError: a field has a wrong value.
            UnsupportedGenerationError: a combination of arguments cannot be decoded speculatively.
            UnsupportedModelError: a model cannot take part.
        """
        return _generate(self, super().generate, args, kwargs, None)  # type: ignore[arg-type]


def generate(
    model: PreTrainedModel, *args: Any, fields_from: str | Path | Mapping[str, Any] | None = None, **kwargs: Any
) -> GenerateDecoderOnlyOutput | Tensor:
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
    if isinstance(fields_from, str | Path):
        fields_from = json.loads(Path(fields_from).read_text(encoding="utf-8"))
    if isinstance(model, SpeculativeGenerationMixin):
        plain = super(SpeculativeGenerationMixin, model).generate
    else:
        plain = type(model).generate.__get__(model)
    return _generate(model, plain, args, kwargs, fields_from)


def _generate(
    model: PreTrainedModel,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fields_from: Mapping[str, Any] | None,
) -> GenerateDecoderOnlyOutput | Tensor:
    call = _bind(plain, args, kwargs)
    if isinstance(call.get("custom_generate"), str):
        return plain(**call)  # the repository's function comes back through `generate` above
    keywords = {name: call.pop(name) for name in FIELD_NAMES if name in call}
    assistant = call.pop("assistant_model", None)
    passed = call.get("generation_config")
    sources = [keywords, fields_of(passed), _only_fields(fields_from or {}), fields_of(model.generation_config)]
    if assistant is not None:
        sources.append(fields_of(getattr(assistant, "generation_config", None)))
    config = read_config(sources)
    if assistant is None:
        return plain(**call, **{name: keywords[name] for name in _TRANSFORMERS_FIELDS if name in keywords})
    _check_call(model, assistant, call)
    _own_stop_strings(model, call)
    return plain(**call, custom_generate=_Speculation(assistant, config, call))


class _Speculation:
    """The decoding method of one call, run by transformers once it has prepared the inputs."""

    def __init__(self, assistant: PreTrainedModel, config: SpeculationConfig, call: dict[str, Any]):
        self.assistant = assistant
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
    ) -> GenerateDecoderOnlyOutput | Tensor:
        config = self.config.resolve(bool(generation_config.do_sample))
        make_verifier(config)
        _check_prepared(input_ids, generation_config, model_kwargs, self.streamer)
        cache = model_kwargs["past_key_values"]
        pad = generation_config._pad_token_tensor
        returns_dict = bool(generation_config.return_dict_in_generate)
        call = Call(
            input_ids=input_ids,
            query_ids=self._query(input_ids, cache),
            attention_mask=_checked_mask(model_kwargs.get("attention_mask")),
            cache=cache,
            is_cache_kept=self.is_cache_passed or returns_dict,
            processors=logits_processor,
            criteria=stopping_criteria,
            do_sample=bool(generation_config.do_sample),
            max_length=generation_config.max_length,
            pad_token_id=None if pad is None else int(pad),
            prefill_chunk_size=generation_config.prefill_chunk_size,
            recorded=_recorded(generation_config),
            on_tokens=self._stream if self.streamer is not None else None,
        )
        decoder, batch = build_decoder(model, self.assistant, config, call)
        self._decode(decoder, batch)
        if self.streamer is not None:
            self.streamer.end()
        return _output(decoder, call) if returns_dict else decoder.recorder.sequences(input_ids, call.pad_token_id or 0)

    def _decode(self, decoder: SpeculativeDecoder, batch: Batch) -> None:
        """Decode; a cache that the user passed is brought back when that fails."""
        snapshot = batch.target_cache.snapshot() if self.is_cache_passed else None
        try:
            decoder.decode(batch)
        except BaseException:
            if snapshot is not None:
                batch.target_cache.restore(snapshot)
            raise
        batch.target_cache.end_recording()

    def _query(self, input_ids: Tensor, cache: Cache) -> Tensor:
        """The prompt tokens that the cache does not hold; `input_ids` may be the whole text or only what is new."""
        num_held = cache.get_seq_length()
        has_all = self.passed_mask_len is None or self.passed_mask_len == input_ids.shape[1]
        query = input_ids[:, num_held:] if has_all else input_ids
        held_rows = _num_cached_rows(cache)
        if query.shape[1] < 1 or held_rows not in (None, input_ids.shape[0]):
            raise UnsupportedGenerationError(
                f"past_key_values must hold fewer tokens than the prompt, for {input_ids.shape[0]} rows, got {num_held} of "
                f"{input_ids.shape[1]} tokens for {held_rows} rows; pass the whole text and the cache of its beginning"
            )
        return query

    def _stream(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.streamer.put(torch.tensor([token_id]))  # type: ignore[union-attr]


def _bind(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    signature = inspect.signature(plain)
    call = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
    return call


def _only_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in FIELD_NAMES if values.get(name) is not None}


def _check_call(model: PreTrainedModel, assistant: object, call: dict[str, Any]) -> None:
    """Refuse before transformers prepares anything."""
    if not isinstance(assistant, PreTrainedModel) or not assistant.can_generate():
        raise UnsupportedModelError(
            f"assistant_model must be a transformers model that can generate, got {type(assistant).__name__}; {_WAY_OUT}"
        )
    check_models(model, assistant, [type(one).__name__ for one in (model, assistant) if one._is_stateful])
    tokenizer, assistant_tokenizer = call.get("tokenizer"), call.get("assistant_tokenizer")
    if tokenizer is not None and assistant_tokenizer is not None:
        if tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
            raise UnsupportedModelError(
                "assistant_tokenizer must have the vocabulary of tokenizer, got another one; use a draft with the same tokenizer"
            )
    refused = {
        "custom_generate": call.get("custom_generate"),
        "inputs_embeds": call.get("inputs_embeds"),
        "position_ids": call.get("position_ids"),
        "synced_gpus": call.get("synced_gpus") or None,
    }
    for name, value in refused.items():
        if value is not None:
            raise UnsupportedGenerationError(f"{name} must be left out with assistant_model, got one; {_WAY_OUT}")


def _check_prepared(
    input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], streamer: object
) -> None:
    """Refuse what only the prepared call shows."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedGenerationError(
            f"the generation mode must be greedy or sampling with assistant_model, got {mode.value}; {_WAY_OUT}"
        )
    if not generation_config.use_cache:
        raise UnsupportedGenerationError(f"use_cache must be True with assistant_model, got False; {_WAY_OUT}")
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        raise UnsupportedGenerationError(
            "assistant_ensemble_weight must be left out, got one; choose verifier='typical' for a lossy rule"
        )
    extra = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN_MODEL_KWARGS)
    if extra:
        raise UnsupportedGenerationError(
            f"model arguments must be among {', '.join(sorted(_KNOWN_MODEL_KWARGS))}, got {', '.join(extra)}; {_WAY_OUT}"
        )
    cache = model_kwargs.get("past_key_values")
    if type(cache) is not DynamicCache or cache.offloading:
        raise UnsupportedGenerationError(
            f"the cache must be a DynamicCache on one device with assistant_model, got {type(cache).__name__}; "
            "leave cache_implementation out"
        )
    if input_ids.shape[1] == 0:
        raise UnsupportedGenerationError(f"the prompt must hold at least one token, got an empty one; {_WAY_OUT}")
    one_row_only = {
        "streamer": streamer is not None,
        "output_hidden_states": bool(generation_config.output_hidden_states),
        "output_attentions": bool(generation_config.output_attentions),
    }
    for name, is_wanted in one_row_only.items():
        if is_wanted and input_ids.shape[0] > 1:
            raise UnsupportedGenerationError(
                f"{name} must be left out for more than one row, got {input_ids.shape[0]} rows; decode the rows one by one"
            )


def _checked_mask(mask: Tensor | None) -> Tensor | None:
    """[B, P] int64, or None where nothing is padded."""
    if mask is None or bool((mask != 0).all()):
        return None
    if not bool(mask.any(dim=1).all()):
        raise UnsupportedGenerationError("every prompt must hold a real token, got an empty row; drop that row")
    return (mask != 0).to(torch.int64)


def _num_cached_rows(cache: Cache) -> int | None:
    rows = [layer.keys.shape[0] for layer in cache.layers if layer.get_seq_length()]
    return rows[0] if rows else None


def _own_stop_strings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Turn `stop_strings` into a criterion here: transformers drops the tokenizer before it would."""
    passed = call.get("generation_config")
    stop_strings = call.pop("stop_strings", None)
    for config in (passed, model.generation_config):
        if stop_strings is None and config is not None:
            stop_strings = config.stop_strings
    if stop_strings is None:
        return
    tokenizer = call.get("tokenizer")
    if tokenizer is None:
        raise ConfigError("tokenizer must be given with stop_strings, got None; pass tokenizer= to generate()")
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    call["stopping_criteria"] = criteria
    call["stop_strings"] = None


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
    output = GenerateDecoderOnlyOutput(
        sequences=recorder.sequences(call.input_ids, pad),
        scores=recorder.scores(pad),
        logits=recorder.logits(pad),
        attentions=tuple(recorder.attentions) if recorder.recorded.attentions else None,
        hidden_states=tuple(recorder.hidden_states) if recorder.recorded.hidden_states else None,
        past_key_values=call.cache,
    )
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
