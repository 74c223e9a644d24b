"""Arguments of `generate()`: binds them, and takes out those that speculation handles itself."""

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import attention_layers, num_held, text_cache
from hf_speculate.compat import CACHE_NAME, OLD_CACHE_NAMES, TAKES_CACHE
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError, counted
from hf_speculate.generation.config_sources import setting
from hf_speculate.models.language_model import cache_name

_SIGNATURE = inspect.signature(GenerationMixin.generate)


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


def name_cache(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Rename a passed cache, in place, as this version of transformers names it.

    The warning about an old name is attributed to the line that calls `generate`, two functions above the caller.
    """
    if not TAKES_CACHE and "cache" in arguments:
        arguments[cache_name(model) or CACHE_NAME] = arguments.pop("cache")
    for name in OLD_CACHE_NAMES if TAKES_CACHE else ():
        if name in arguments:
            cache = arguments.pop(name)
            arguments.setdefault("cache", cache)
            warnings.warn(f"`{name}` is deprecated since transformers 5.24; use `cache`", FutureWarning, stacklevel=4)


def uncached(input_ids: Tensor, cache: Cache, passed_mask: Tensor | None, embeds: Tensor | None = None) -> Tensor:
    """[B, Q] int64, the tokens of ids [B, T], whole or new, that the cache lacks; zeros for embeddings [B, P, D]."""
    num_before, num_prompt = num_held(cache), input_ids.shape[1]
    mask_len = None if passed_mask is None else passed_mask.shape[-1]
    if embeds is None:
        query = input_ids[:, num_before:] if mask_len in (None, num_prompt) else input_ids
    else:
        num_ids, num_prompt = num_prompt, embeds.shape[1]
        if mask_len != num_prompt and (mask_len is not None or num_ids not in (0, num_prompt)):
            got = "none" if mask_len is None else counted(mask_len, "column")
            raise UnsupportedGenerationError(
                f"attention_mask must be [B, {num_prompt}] for {num_prompt} inputs_embeds and {num_ids} input_ids, got "
                f"{got}; pass a mask over the embeddings"
            )
        query = input_ids.new_zeros(input_ids.shape[0], max(num_prompt - num_before, 0))
    layers = attention_layers(text_cache(cache).layers)
    rows = [layer.keys.shape[0] for layer in layers if layer.get_seq_length()]
    if query.shape[1] < 1 or (rows and rows[0] != input_ids.shape[0]):
        raise UnsupportedGenerationError(
            f"the cache must hold fewer tokens than the prompt, for {counted(input_ids.shape[0], 'row')}, got "
            f"{num_before} of {counted(num_prompt, 'token')} for {counted(rows[0] if rows else 0, 'row')}; "
            "pass the whole text and the cache of its beginning"
        )
    return query
