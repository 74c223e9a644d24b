"""Enable and disable speculative `generate()` for one model object."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from hf_speculate.compat import check_private_names, version_note
from hf_speculate.config import FIELD_NAMES
from hf_speculate.draft.named import NamedDrafts
from hf_speculate.draft.source import SOURCES, find_source, is_set
from hf_speculate.errors import ConfigError, UnsupportedModelError, nearest_name, warn_user
from hf_speculate.generation.config_sources import fields_of, read_config
from hf_speculate.generation.defaults import (
    SAVED_ASSISTANT,
    TOKENIZERS,
    Defaults,
    remove_defaults,
    set_defaults,
)
from hf_speculate.generation.generate import SpeculativeGenerationMixin, warn_of_lost_fields
from hf_speculate.generation.request import check_source, source_arguments
from hf_speculate.verify.base import check_verifier

ModelT = TypeVar("ModelT")

_LOCK = threading.Lock()
_ENABLED_CLASSES: dict[type, type] = {}  # plain class (their `_plain_class`) -> enabled class


def enable(model: ModelT, assistant_model: Any = None, **defaults: Any) -> ModelT:
    """Make every call to `model.generate()` speculative.

    All speculation arguments of `generate()` can be given here as defaults: a draft source
    (`assistant_model`, `prompt_lookup_num_tokens`, `assistant_early_exit`, `drafter`,
    `candidate_generator` or `use_mtp`), tokenizers, and the fields of `SpeculationConfig`. A call
    may override the defaults, and its draft source replaces the default one. The defaults take
    precedence over the settings saved with the model. A call that cannot use the defaults falls
    back to plain decoding and warns once. If `enable` is called again without defaults, the model
    keeps its earlier ones. A call without a draft source decodes as before, except that `seed`
    applies, and that `verifier="coupled"` with `do_sample=True` replaces the sampling of tokens.

    Only this object changes. Its class becomes a subclass with the same name. The defaults are
    stored on the object and are not part of its state dict, config or parameters. For a PEFT model,
    the wrapped model is enabled. Copies share the defaults. Pickles stay enabled, even in other
    processes, but lose the defaults. `save_pretrained` saves a plain model.

    If transformers is newer than the newest tested version, the first enabled model of a class
    triggers a warning, and its first speculative call runs a self-test.

    Args:
        model: a transformers model that can generate, changed in place.
        assistant_model: a draft model or head, or its folder or Hub id, loaded with the target's
            dtype and onto its device. None for the draft that `save_settings` saved with the model,
            if any.
        **defaults: other speculation arguments of `generate()`; None counts as left out.

    Returns:
        The same object.

    Raises:
        ConfigError: a default is unknown or invalid, or the draft cannot be loaded.
        UnsupportedGenerationError: the defaults cannot be combined.
        UnsupportedModelError: `model` is not a transformers model that can generate, the draft does
            not fit it, or this version of transformers lacks a name that the library uses.
    """
    base = _base_model(model)
    check_private_names(base)
    values = _given_defaults(base, {"assistant_model": assistant_model, **defaults})
    if values:
        _check_defaults(base, values)
    if not is_enabled(base):
        if type(base) not in _ENABLED_CLASSES and (note := version_note(type(base))):
            warn_user(note)
        base.__class__ = _enabled_class(type(base))
    if values:
        set_defaults(base, values)
    warn_of_lost_fields(base)
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `enable` in place; a plain model stays unchanged.

    Args:
        model: the enabled object, or the PEFT model around it.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: `model` is not a transformers model that can generate.
    """
    base = _base_model(model)
    plain: Any = vars(type(base)).get("_plain_class")
    remove_defaults(base)
    if plain is not None:
        base.__class__ = plain
    return model


def is_enabled(model: object) -> bool:
    """Return whether `model.generate()` is speculative.

    This includes classes written with `SpeculativeGenerationMixin`.
    """
    return isinstance(_base_model(model), SpeculativeGenerationMixin)


def _base_model(model: object) -> PreTrainedModel:
    get_base_model = getattr(model, "get_base_model", None)
    base = (
        get_base_model()
        if callable(get_base_model) and not isinstance(model, PreTrainedModel)
        else model
    )
    if isinstance(base, str | Path):
        raise UnsupportedModelError(
            f"model must be a loaded model, got {str(base)!r}; load it first, for example with "
            f"AutoModelForCausalLM.from_pretrained({str(base)!r})"
        )
    if not isinstance(base, PreTrainedModel) or not isinstance(base, GenerationMixin):
        raise UnsupportedModelError(
            f"model must be a transformers model that can generate, got {type(model).__name__}; "
            "load it with an AutoModelFor... class that has a language modelling head; pass what a "
            "wrapper holds, and "
            "compile in place, with model.compile()"
        )
    return base


def _given_defaults(model: PreTrainedModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `enable`, with the draft saved with the model if none is given."""
    sources = getattr(model, "draft_sources", SOURCES)
    given = {name: value for name, value in values.items() if value is not None}
    given = {name: value for name, value in given.items() if is_set(value) or name not in sources}
    saved = getattr(model.generation_config, SAVED_ASSISTANT, None)
    if (
        saved is None
        or not sources.keys().isdisjoint(given)
        or (not given and Defaults.of(model).values)
    ):
        return given
    try:
        NamedDrafts.of(model).get(saved, model)
    except ConfigError as error:
        raise ConfigError(
            f"{SAVED_ASSISTANT} in the generation config must name a draft, got {saved!r}, which "
            "does not load: "
            f"{error}; set model.generation_config.{SAVED_ASSISTANT} to None to enable without it"
        ) from error
    return {**given, "assistant_model": saved}


def _check_defaults(model: PreTrainedModel, values: Mapping[str, Any]) -> None:
    """Check the arguments of `enable` as calls would, so that errors are raised early."""
    sources = getattr(model, "draft_sources", SOURCES)
    names = {*filter(str.isidentifier, sources), *FIELD_NAMES, *TOKENIZERS}
    for name in values.keys() - names:
        nearest = nearest_name(name, names)
        hint = f"did you mean {nearest}?" if nearest else f"they are {', '.join(sorted(names))}"
        raise ConfigError(f"arguments of enable() must be about drafts, got {name}; {hint}")
    for name in ("num_assistant_tokens", "seed"):
        if isinstance(values.get(name), Sequence):
            raise ConfigError(
                f"{name} must be one number in enable(), whose calls have any number of rows, got "
                "a list; "
                "pass it to generate()"
            )
    if values.get("verifier") == "greedy":
        raise ConfigError(
            "verifier must be a sampling one in enable(), got 'greedy', which is the default "
            "without do_sample; "
            "leave it out"
        )
    fields = {name: value for name, value in values.items() if name in FIELD_NAMES}
    others = {name: value for name, value in values.items() if name not in FIELD_NAMES}
    weaker = fields_of(model.generation_config)
    arguments = source_arguments(model, others, sources)
    source, config = find_source(
        model, arguments, lambda weakest: read_config([fields, weaker, fields_of(weakest)]), sources
    )
    check_verifier(config.resolve(do_sample=config.verifier != "greedy"))
    if source is not None:
        source.settings(config)
        check_source(model, source, {name: values.get(name) for name in TOKENIZERS})
    elif not sources.keys().isdisjoint(values):
        raise UnsupportedModelError(
            f"{type(model).__name__} must draft by itself in transformers' own way, which enable() "
            "cannot prepare; "
            f"pass {', '.join(sources.keys() & values.keys())} to generate()"
        )


def _enabled_class(plain: type[PreTrainedModel]) -> type:
    with _LOCK:
        if plain not in _ENABLED_CLASSES:
            body = {
                "_plain_class": plain,
                "__doc__": plain.__doc__,
                "__module__": plain.__module__,
                "__qualname__": plain.__qualname__,
                "__reduce_ex__": _reduce,
            }
            _ENABLED_CLASSES[plain] = type(
                plain.__name__, (SpeculativeGenerationMixin, plain), body
            )
        return _ENABLED_CLASSES[plain]


class _Maker:
    """Factory for empty objects, used by copies and pickles.

    A copy gets the model's own class. A pickle names the plain class, which other processes can
    import, and the loaded model is enabled again.
    """

    def __init__(self, model_class: Any):
        self.model_class = model_class

    def __call__(self) -> Any:
        return object.__new__(self.model_class)

    def __reduce__(self) -> tuple[Any, ...]:
        return _maker_of, (self.model_class._plain_class,)


def _maker_of(plain: type[PreTrainedModel]) -> _Maker:
    """Return the factory for the plain class named in a pickle."""
    return _Maker(_enabled_class(plain))


# Copies use this function, too. Wrappers such as PEFT's look up missing attributes in their model.
# They would find its `__copy__` and `__deepcopy__` and return a copy of the model alone.
def _reduce(self: PreTrainedModel, protocol: Any) -> tuple[Any, ...]:
    return _Maker(type(self)), (), self.__getstate__()
