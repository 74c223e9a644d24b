"""Arguments of `generate()`: binds them, takes out what speculation handles itself, and collects the fields of ours."""

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import attention_layers, num_held, text_cache
from hf_speculate.config import FIELD_NAMES, SpeculationConfig
from hf_speculate.draft.state import DraftState
from hf_speculate.draft.suffix_index import SuffixStore
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError

_SIGNATURE = inspect.signature(GenerationMixin.generate)
# A field that is settled keeps its companion out of weaker sources: a call that asks for K tokens gets K.
_SHUTS_OUT = {"num_assistant_tokens": "num_assistant_tokens_schedule", "seed": "generator", "generator": "seed"}


class BoundCall(NamedTuple):
    """A `generate` function, and the arguments of a call."""

    plain: Callable[..., Any]
    call: dict[str, Any]  # all arguments, by name
    positional_names: list[str]  # those that must be passed by position, because the function takes *args

    def run(self) -> Any:
        """Call the function; a positional argument that was removed from the call is passed as None."""
        by_name = {name: value for name, value in self.call.items() if name not in self.positional_names}
        return self.plain(*(self.call.get(name) for name in self.positional_names), **by_name)


def bind(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
    """Name all arguments of a call; what goes into `*args` is named as in `GenerationMixin.generate`."""
    signature = inspect.signature(plain)
    call = dict(signature.bind(*args, **kwargs).arguments)
    positional_names: list[str] = []
    for place, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and call.pop(name, ()):
            named = list(_SIGNATURE.bind(None, *args).arguments.items())[1 + place :]  # None stands for self
            call.update(named)
            positional_names = [*list(signature.parameters)[:place], *dict(named)]
    return BoundCall(plain, call, positional_names)


def samples(model: PreTrainedModel, bound: BoundCall) -> bool:
    """Whether transformers may resolve `do_sample` to True: by the keyword, the passed config, the model's."""
    call = bound.call
    # a `generate` that names `temperature` among its own arguments, as Whisper's, draws where that is above 0
    if call.get("temperature") and "temperature" in inspect.signature(bound.plain).parameters:
        return True
    return bool(setting(model, call, "do_sample"))


def unwrapped(assistant: Any) -> Any:
    """The transformers model inside a PEFT wrapper, adapters included; anything else as it is."""
    if isinstance(assistant, PreTrainedModel) or not callable(getattr(assistant, "get_base_model", None)):
        return assistant
    if getattr(assistant.active_peft_config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"assistant_model must read the text alone, got {type(assistant).__name__} with a learned prompt; "
            "use a draft without one, or with LoRA"
        )
    return assistant.get_base_model()


def take_over(model: PreTrainedModel, call: dict[str, Any], name: str, left: Any = None) -> Any:
    """The value of a field that speculation handles itself; in its place transformers gets `left`."""
    value = setting(model, call, name)
    if value not in (None, left):
        call[name] = left
    return value


def own_stop_strings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Turn `stop_strings` into a criterion, in place: transformers drops the tokenizer before it would."""
    stop_strings, tokenizer = take_over(model, call, "stop_strings"), call.get("tokenizer")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ConfigError("tokenizer must be given with stop_strings, got None; pass tokenizer= to generate()")
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    call["stopping_criteria"] = criteria


def own_prompt_lookup(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Keep prompt lookup from transformers, which would refuse several rows of a prompt."""
    passed = call.get("generation_config")
    if getattr(passed, "prompt_lookup_num_tokens", None) is not None:
        call["generation_config"] = copy.deepcopy(passed)
        call["generation_config"].prompt_lookup_num_tokens = None
    if model.generation_config.prompt_lookup_num_tokens is not None:
        call["prompt_lookup_num_tokens"] = None


def uncached(input_ids: Tensor, cache: Cache, passed_mask: Tensor | None, embeds: Tensor | None = None) -> Tensor:
    """[B, Q] int64, the tokens of ids [B, T], whole or new, that the cache lacks; zeros for embeddings [B, P, D]."""
    num_before, num_prompt = num_held(cache), input_ids.shape[1]
    mask_len = None if passed_mask is None else passed_mask.shape[-1]
    if embeds is None:
        query = input_ids[:, num_before:] if mask_len in (None, num_prompt) else input_ids
    else:
        num_ids, num_prompt = num_prompt, embeds.shape[1]
        if mask_len != num_prompt and (mask_len is not None or num_ids not in (0, num_prompt)):
            got = "none" if mask_len is None else f"{mask_len} columns"
            raise UnsupportedGenerationError(
                f"attention_mask must be [B, {num_prompt}] for {num_prompt} inputs_embeds and {num_ids} input_ids, got "
                f"{got}; pass a mask over the embeddings"
            )
        query = input_ids.new_zeros(input_ids.shape[0], max(num_prompt - num_before, 0))
    layers = attention_layers(text_cache(cache).layers)
    rows = [layer.keys.shape[0] for layer in layers if layer.get_seq_length()]
    if query.shape[1] < 1 or (rows and rows[0] != input_ids.shape[0]):
        raise UnsupportedGenerationError(
            f"past_key_values must hold fewer tokens than the prompt, for {input_ids.shape[0]} rows, "
            f"got {num_before} of {num_prompt} tokens for {rows[0] if rows else None} rows; "
            "pass the whole text and the cache of its beginning"
        )
    return query


def setting(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """A field by the keyword, even if that is None, the passed config, or the model's; None if nobody set it."""
    if name in call:
        return call[name]
    values = (getattr(config, name, None) for config in (call.get("generation_config"), model.generation_config))
    return next((value for value in values if value is not None), None)


def read_config(sources: Iterable[Mapping[str, Any]]) -> SpeculationConfig:
    """Read each field from the first source that sets it; the strongest source comes first."""
    settled: dict[str, Any] = {}
    for source in sources:
        shut_out = {other for name, other in _SHUTS_OUT.items() if name in settled}
        for name in FIELD_NAMES:
            if name in source and name not in settled and name not in shut_out:
                settled[name] = source[name]
    for name, kind in (("suffix_store", SuffixStore), ("draft_state", DraftState)):
        value = settled.get(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name} must be a {kind.__name__}, got {type(value).__name__}; pass hf_speculate.{kind.__name__}()"
            )
    # an explicit None keeps weaker sources out, then means the default
    return SpeculationConfig(**{name: value for name, value in settled.items() if value is not None})


def fields_of(config: object) -> dict[str, Any]:
    """The fields that a `GenerationConfig` sets; `None` counts as not set."""
    values = {name: getattr(config, name, None) for name in FIELD_NAMES}
    return {name: value for name, value in values.items() if value is not None}


def fields_in(saved: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of ours that a `generation_config.json`, or its content, sets; `None` counts as not set."""
    values: Any = saved or {}
    if isinstance(saved, str | Path):
        try:
            values = json.loads(Path(saved).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # no JSON, or lists in lists without end
            raise ConfigError(f"fields_from must be a JSON object, got {saved}: {error}; mend the file") from error
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"fields_from must be a JSON object or a mapping, got {type(values).__name__}; "
            'write {"verifier": "typical"}, say'
        )
    return {name: values[name] for name in FIELD_NAMES if values.get(name) is not None}
