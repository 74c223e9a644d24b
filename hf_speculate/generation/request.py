"""Read a call's draft source, its settings and its arguments for transformers."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_speculate.compat import (
    CACHE_NAME,
    CACHE_NAMES,
    OLD_CACHE_NAMES,
    TAKES_CACHE,
    check_private_names,
)
from hf_speculate.config import FIELD_NAMES, SpeculationConfig
from hf_speculate.draft.no_drafts import CONTINUOUS, COUPLED_ALONE, FORCED_TEXT_ALONE
from hf_speculate.draft.source import SOURCES, DraftSource, find_source, is_set
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.generation.config_sources import fields_of, read_config, setting
from hf_speculate.generation.defaults import Defaults, value_in
from hf_speculate.generation.undrafted import Undrafted, add_tokenizer, stats_of
from hf_speculate.generation.validate_call import check_call
from hf_speculate.generation.validate_models import check_models, check_weights
from hf_speculate.models.language_model import cache_name
from hf_speculate.stats import SpeculationStats
from hf_speculate.verify.base import check_verifier

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_DEFAULTS = GenerationConfig()
# The other fields exist in transformers as well.
OUR_FIELDS = {name for name in FIELD_NAMES if not hasattr(_DEFAULTS, name)}
_FRAMES_PER_POSITION = 2  # combined stride of the two convolutions before Whisper's encoder


@dataclass(frozen=True)
class Request:
    """A call to `generate()` with a draft source.

    Its arguments exclude the ones that are hidden from transformers.
    """

    plain: Callable[..., Any]  # the model's own `generate`
    arguments: Mapping[str, Any]  # by name
    # names of the arguments passed by position, because the function takes *args
    positional_names: Sequence[str]
    source: DraftSource
    config: SpeculationConfig
    stats: SpeculationStats
    report: Callable[[SpeculationStats], object]  # receives the statistics at the end of the call
    is_static: bool  # whether the call asks for a new static cache
    is_default: bool = False  # whether the source comes from `enable` and not from the call

    @cached_property
    def passed(self) -> dict[str, Any]:
        """Arguments that are not None."""
        return {name: value for name, value in self.arguments.items() if value is not None}

    @property
    def is_cache_passed(self) -> bool:
        """Whether the user passed a cache, dynamic or static."""
        return not self.passed.keys().isdisjoint(CACHE_NAMES)

    def run(self, decoding_method: Callable[..., Any]) -> Any:
        """Call `generate` with a decoding method."""
        call = {**self.arguments, "custom_generate": decoding_method}
        return call_by_name(self.plain, call, self.positional_names)


class RefusedDefaultError(Exception):
    """Error in a call that uses the defaults of `enable`; transformers then decodes the call."""


@contextmanager
def refusals(is_default: bool) -> Iterator[None]:
    """Convert the errors of a call to `RefusedDefaultError` if its draft source is a default."""
    try:
        yield
    except (ConfigError, UnsupportedGenerationError, UnsupportedModelError) as error:
        if not is_default:
            raise
        raise RefusedDefaultError(str(error)) from error


class Found(NamedTuple):
    """The draft source and settings found for a call."""

    source: DraftSource | None  # None if transformers decodes the call
    config: SpeculationConfig
    declined: list[str]  # arguments that yield no draft source for this target
    is_default: bool  # whether the source comes from `enable` and not from the call


def read_request(
    model: PreTrainedModel,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    saved: Mapping[str, Any],
    clock: StageClock,
) -> "Request | Undrafted":
    """Read the draft source and settings of a call.

    Args:
        model: the target.
        plain: the model's own `generate`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call; ours are removed if transformers decodes the call.
        saved: fields from a file; the fields of the call take precedence.
        clock: clock that times the preparation.

    Returns:
        The request, or an `Undrafted` with its statistics if transformers decodes the call.
    """
    call, positional_names = bind(plain, args, kwargs)
    if isinstance(call.get("custom_generate"), str):
        # the repository's function calls `generate` again
        return Undrafted.of(SpeculationConfig())
    named = {name: value_in(call, name) for name in ("verifier", "relax_only_inside")}
    found = find_source_of(model, plain, call, saved)
    if named["verifier"] is not None and found.is_default:  # an error of the call's own values
        config = replace(found.config, relax_only_inside=named["relax_only_inside"])
        check_verifier(config.resolve(do_sample=bool(setting(model, call, "do_sample"))))
    if found.source is not None:
        with refusals(found.is_default):
            check_row_lists(model, plain, call, found.config)
            return speculative_request(model, plain, call, found, clock, positional_names)
    check_verifier(found.config.resolve(do_sample=False))
    for name in OUR_FIELDS & kwargs.keys():
        del kwargs[name]
    add_tokenizer(model, call, kwargs)
    return Undrafted.of(found.config, samples=samples(model, plain, call))


def call_by_name(
    plain: Callable[..., Any], call: Mapping[str, Any], positional_names: Sequence[str]
) -> Any:
    """Call `generate`; positional arguments missing from the call are passed as None."""
    by_name = {name: value for name, value in call.items() if name not in positional_names}
    return plain(*(call.get(name) for name in positional_names), **by_name)


def find_source_of(
    model: PreTrainedModel,
    plain: Callable[..., Any],
    call: dict[str, Any],
    saved: Mapping[str, Any],
) -> Found:
    """Pop the draft source and settings from a call, and complete them with the defaults."""
    sources = getattr(model, "draft_sources", SOURCES)
    defaults = Defaults.of(model).for_call(call, sources)
    fields = {name: defaults.pop(name) for name in FIELD_NAMES if name in defaults}
    keywords = {name: call.pop(name) for name in FIELD_NAMES if name in call}
    keywords = {
        name: value for name, value in keywords.items() if value is not None or name not in fields
    }
    passed, model_fields = (
        fields_of(call.get("generation_config")),
        fields_of(model.generation_config),
    )
    stronger = [keywords, passed, fields, saved, model_fields]
    is_default = any(
        name in sources and is_set(value) for name, value in {**fields, **defaults}.items()
    )
    if not is_default:
        defaults.pop("assistant_tokenizer", None)
    call.update(defaults)
    values = source_arguments(model, call, sources)
    source, config = find_source(
        model, values, lambda weakest: read_config([*stronger, fields_of(weakest)]), sources
    )
    if source is not None:
        take_over_all(model, call, values)
        return Found(source, source.settings(config), [], is_default)
    declined = [name for name, value in values.items() if value]
    if config.grammar_draft:
        return Found(FORCED_TEXT_ALONE, config, declined, is_default="grammar_draft" in fields)
    draws_coupled = config.verifier == "coupled" and samples(model, plain, call)
    return Found(COUPLED_ALONE if draws_coupled else None, config, declined, is_default=False)


def speculative_request(
    model: PreTrainedModel,
    plain: Callable[..., Any],
    call: dict[str, Any],  # arguments by name; ours are removed
    found: Found,
    clock: StageClock,
    positional_names: Sequence[str] = (),
) -> Request:
    """Check a call with a draft source and hide its speculative arguments from transformers."""
    source, config = found.source or CONTINUOUS, found.config
    check_call(model, call, config, source, found.declined)
    check_private_names(model)
    clock.enter(Stage.PREPARE if source.model is None else Stage.VOCABULARY)
    source = check_source(model, source, call)
    clock.enter(Stage.PREPARE)
    intercept_stop_strings(model, call)
    hide_settings(model, call, getattr(model, "draft_sources", SOURCES))
    take_cache(model, call)
    is_static = take_static_cache(model, call)
    stats, report = stats_of(config)
    config = replace(config, speculation_stats=stats)
    arguments = plain, call, positional_names
    return Request(*arguments, source, config, stats, report, is_static, found.is_default)


def check_source(
    model: PreTrainedModel, source: DraftSource, arguments: Mapping[str, Any]
) -> DraftSource:
    """Check the models of a call and resolve its draft source for the target."""
    models = [model] if source.model is None else [model, source.model]
    check_models(models, source)
    check_weights(models, source)
    return source.resolve(model, arguments)


def bind(
    plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Bind the arguments of a call to names.

    Arguments in `*args` get their names from `GenerationMixin.generate`.

    Returns:
        The arguments by name, and the names of the arguments that must be passed by position
        because the function takes *args.
    """
    signature = inspect.signature(plain)
    call = dict(signature.bind(*args, **kwargs).arguments)
    positional_names: list[str] = []
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and call.pop(name, ()):
            # None is a placeholder for self
            named = list(_SIGNATURE.bind(None, *args).arguments.items())[1 + index :]
            call.update(named)
            positional_names = [*list(signature.parameters)[:index], *dict(named)]
    return call, positional_names


def samples(model: PreTrainedModel, plain: Callable[..., Any], call: Mapping[str, Any]) -> bool:
    """Return whether the call may sample by its keywords, its generation config or the model's."""
    # A `generate` method with an argument `temperature`, such as Whisper's, samples at temperatures
    # above 0.
    if call.get("temperature") and "temperature" in inspect.signature(plain).parameters:
        return True
    return bool(setting(model, call, "do_sample"))


def check_row_lists(
    model: PreTrainedModel,
    plain: Callable[..., Any],
    call: Mapping[str, Any],
    config: SpeculationConfig,
) -> None:
    """Reject lists with an entry per row if the model's own `generate` may decode several times.

    Whisper's `generate` decodes only unfinished rows again and does not pass their indices on.
    """
    name = "force_unique_generate_call"
    lists = {field: getattr(config, field) for field in ("num_assistant_tokens", "seed")}
    lists = {
        field: value
        for field, value in lists.items()
        if isinstance(value, Sequence) and len(value) > 1
    }
    if not lists or name not in inspect.signature(plain).parameters or setting(model, call, name):
        return
    frames = call.get("input_features")
    is_long = (
        frames is not None
        and frames.shape[-1] > _FRAMES_PER_POSITION * model.config.max_source_positions
    )
    if (
        is_long
        or setting(model, call, "return_timestamps")
        or isinstance(call.get("temperature"), Sequence)
    ):
        field, value = next(iter(lists.items()))
        raise UnsupportedGenerationError(
            f"{field} must be one number for audio that is decoded in several parts, got {value}; "
            "pass an int for all "
            "rows, or decode the rows one by one"
        )


def pop_setting(model: PreTrainedModel, call: dict[str, Any], name: str, left: Any = None) -> Any:
    """Pop a setting: return its value and pass `left` on to transformers."""
    value = setting(model, call, name)
    if value not in (None, left):
        call[name] = left
    return value


def source_arguments(
    model: PreTrainedModel, call: dict[str, Any], sources: Mapping[str, str]
) -> dict[str, Any]:
    """Return the draft-source arguments by name, without fields of `SpeculationConfig`.

    Arguments that generation configs do not have, such as `assistant_model`, are popped from the
    call.
    """
    names = [name for name in sources if name not in FIELD_NAMES and name.isidentifier()]
    return {
        name: setting(model, call, name) if hasattr(_DEFAULTS, name) else call.pop(name, None)
        for name in names
    }


def take_over_all(model: PreTrainedModel, call: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Hide the arguments of draft sources from transformers."""
    for name, value in values.items():
        if hasattr(_DEFAULTS, name):
            pop_setting(model, call, name, left=False if isinstance(value, bool) else None)


def intercept_stop_strings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Convert `stop_strings` to a stopping criterion in place.

    transformers would drop the tokenizer before the conversion.
    """
    stop_strings, tokenizer = pop_setting(model, call, "stop_strings"), call.get("tokenizer")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ConfigError(
            "tokenizer must be given with stop_strings, got None; pass tokenizer= to generate()"
        )
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    call["stopping_criteria"] = criteria


def hide_settings(model: PreTrainedModel, call: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Hide the settings of draft sources from transformers.

    Otherwise, transformers would draft by itself and reject several rows.
    """
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
    """Set `use_cache` in place unless the call itself sets it.

    The cache does not change the text. Some model configs, such as MPT's, disable it by default.
    """
    passed = call.get("use_cache"), getattr(call.get("generation_config"), "use_cache", None)
    if passed == (None, None) and (
        "use_cache" in call or model.generation_config.use_cache is False
    ):
        call["use_cache"] = True


def take_static_cache(model: PreTrainedModel, call: dict[str, Any]) -> bool:
    """Replace a requested static cache with a dynamic one in place.

    Static caches cannot roll back by row. Return whether a static cache was requested.
    """
    is_passed = any(call.get(name) is not None for name in CACHE_NAMES)
    if is_passed or setting(model, call, "cache_implementation") != "static":
        return False
    call["cache_implementation"] = "dynamic"
    return True


def name_cache(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Rename a passed cache in place for this version of transformers.

    The warning about an old name points to the call to `generate`, two functions above the caller.
    """
    if not TAKES_CACHE and "cache" in arguments:
        arguments[cache_name(model) or CACHE_NAME] = arguments.pop("cache")
    for name in OLD_CACHE_NAMES if TAKES_CACHE else ():
        if name in arguments:
            cache = arguments.pop(name)
            arguments.setdefault("cache", cache)
            warnings.warn(
                f"`{name}` is deprecated since transformers 5.24; use `cache`",
                FutureWarning,
                stacklevel=4,
            )
