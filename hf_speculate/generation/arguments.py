"""Arguments of `generate()`: binds them, and takes out those that speculation handles itself."""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import attention_layers, num_cached, text_cache
from hf_speculate.compat import CACHE_NAME, CACHE_NAMES, OLD_CACHE_NAMES, TAKES_CACHE
from hf_speculate.config import FIELD_NAMES, SpeculationConfig
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, counted
from hf_speculate.generation.config_sources import setting
from hf_speculate.models.language_model import cache_name

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_DEFAULTS = GenerationConfig()
_FRAMES_PER_POSITION = 2  # strides of the two convolutions before Whisper's encoder


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
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and call.pop(name, ()):
            named = list(_SIGNATURE.bind(None, *args).arguments.items())[1 + index :]  # None stands for self
            call.update(named)
            positional_names = [*list(signature.parameters)[:index], *dict(named)]
    return BoundCall(plain, call, positional_names)


def samples(model: PreTrainedModel, bound: BoundCall) -> bool:
    """Whether transformers may resolve `do_sample` to True: by the keyword, the passed config, the model's."""
    call = bound.call
    # a `generate` that names `temperature` among its own arguments, as Whisper's, draws where that is above 0
    if call.get("temperature") and "temperature" in inspect.signature(bound.plain).parameters:
        return True
    return bool(setting(model, call, "do_sample"))


def check_row_lists(model: PreTrainedModel, bound: BoundCall, config: SpeculationConfig) -> None:
    """Refuse a list with an entry per row if a model's own `generate`, as Whisper's, may decode several times.

    Only the rows that are not finished are decoded again, and it does not say which these are.
    """
    call, name = bound.call, "force_unique_generate_call"
    lists = {field: getattr(config, field) for field in ("num_assistant_tokens", "seed")}
    lists = {field: value for field, value in lists.items() if isinstance(value, Sequence) and len(value) > 1}
    if not lists or name not in inspect.signature(bound.plain).parameters or setting(model, call, name):
        return
    frames = call.get("input_features")
    is_long = frames is not None and frames.shape[-1] > _FRAMES_PER_POSITION * model.config.max_source_positions
    if is_long or setting(model, call, "return_timestamps") or isinstance(call.get("temperature"), Sequence):
        field, value = next(iter(lists.items()))
        raise UnsupportedGenerationError(
            f"{field} must be one number for audio that is decoded in several parts, got {value}; pass an int for all "
            "rows, or decode the rows one by one"
        )


def pop_setting(model: PreTrainedModel, call: dict[str, Any], name: str, left: Any = None) -> Any:
    """The value of a field that speculation handles itself; in its place transformers gets `left`."""
    value = setting(model, call, name)
    if value not in (None, left):
        call[name] = left
    return value


def source_arguments(model: PreTrainedModel, call: dict[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of draft sources by name, but for the settings.

    What no generation config has, such as `assistant_model`, leaves the call: transformers must not see it.
    """
    names = [name for name in sources if name not in FIELD_NAMES and name.isidentifier()]
    return {name: setting(model, call, name) if hasattr(_DEFAULTS, name) else call.pop(name, None) for name in names}


def take_over_all(model: PreTrainedModel, call: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Hide the arguments of a draft source from transformers."""
    for name, value in values.items():
        if hasattr(_DEFAULTS, name):
            pop_setting(model, call, name, left=False if isinstance(value, bool) else None)


def intercept_stop_strings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Turn `stop_strings` into a criterion, in place: transformers drops the tokenizer before it would."""
    stop_strings, tokenizer = pop_setting(model, call, "stop_strings"), call.get("tokenizer")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ConfigError("tokenizer must be given with stop_strings, got None; pass tokenizer= to generate()")
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    call["stopping_criteria"] = criteria


def hide_settings(model: PreTrainedModel, call: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Keep settings that choose a draft source from transformers, which would draft itself, and refuse several rows."""
    for name in sources:
        if name not in FIELD_NAMES or not hasattr(_DEFAULTS, name):
            continue
        passed = call.get("generation_config")
        if getattr(passed, name, None) is not None:
            call["generation_config"] = copy.deepcopy(passed)
            setattr(call["generation_config"], name, None)
        if getattr(model.generation_config, name) is not None:
            call[name] = None


def take_cache(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Use a cache, in place, unless the call itself says otherwise: a model's own config only names its default.

    The cache changes no text, and configs such as that of MPT leave it out.
    """
    passed = call.get("use_cache"), getattr(call.get("generation_config"), "use_cache", None)
    if passed == (None, None) and ("use_cache" in call or model.generation_config.use_cache is False):
        call["use_cache"] = True


def take_static_cache(model: PreTrainedModel, call: dict[str, Any]) -> bool:
    """Whether a call asks for a new static cache, which cannot roll back by row: it gets a dynamic one, in place."""
    is_passed = any(call.get(name) is not None for name in CACHE_NAMES)
    if is_passed or setting(model, call, "cache_implementation") != "static":
        return False
    call["cache_implementation"] = "dynamic"
    return True


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
    num_before, num_prompt = num_cached(cache), input_ids.shape[1]
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
