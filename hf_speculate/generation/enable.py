"""Enables and disables speculative `generate()` for one model object."""

import threading
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from hf_speculate.compat import check_private_names, version_note
from hf_speculate.errors import UnsupportedModelError, warn_user
from hf_speculate.generation.generate import SpeculativeGenerationMixin, warn_of_lost_fields

ModelT = TypeVar("ModelT")

_LOCK = threading.Lock()
_ENABLED_CLASSES: dict[type, type] = {}  # by plain class, which they name as `_plain_class`


def enable(model: ModelT) -> ModelT:
    """Make `model.generate()` speculative when it is given a source of drafts.

    Sources are `assistant_model`, `prompt_lookup_num_tokens`, `assistant_early_exit`, `drafter` and
    `candidate_generator`. Without one it decodes as before; only `verifier="coupled"` with `do_sample=True` replaces
    the draw then too.

    Only this object changes: its class becomes a subclass of its own class, of the same name. A PEFT-wrapped model is
    enabled through the model that it wraps. Copies and pickles are enabled too, in other processes as well; what
    `save_pretrained` writes is loaded as a plain model.

    With a newer transformers than the newest tested one, the first enabled model of a class brings a warning, and its
    first speculative call a self-test.

    Args:
        model: a transformers model that can generate, changed in place.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: it is not a transformers model that can generate, or this version of transformers lacks
            what is needed.
    """
    base = _base_model(model)
    check_private_names(base)
    if not is_enabled(base):
        if type(base) not in _ENABLED_CLASSES and (note := version_note(type(base))):
            warn_user(note)
        base.__class__ = _enabled_class(type(base))
    warn_of_lost_fields(base)
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `enable`, in place. A model that is not enabled stays as it is.

    Args:
        model: the object, or the PEFT model around it.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: it is not a transformers model that can generate.
    """
    base = _base_model(model)
    plain: Any = vars(type(base)).get("_plain_class")
    if plain is not None:
        base.__class__ = plain
    return model


def is_enabled(model: object) -> bool:
    """Return whether `model.generate()` is speculative, also for a class written with `SpeculativeGenerationMixin`."""
    return isinstance(_base_model(model), SpeculativeGenerationMixin)


def _base_model(model: object) -> PreTrainedModel:
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) and not isinstance(model, PreTrainedModel) else model
    if not isinstance(base, PreTrainedModel) or not isinstance(base, GenerationMixin):
        raise UnsupportedModelError(
            f"model must be a transformers model that can generate, got {type(model).__name__}; "
            "load it with an AutoModelFor... class that has a language modelling head; pass what a wrapper holds, and "
            "compile in place, with model.compile()"
        )
    return base


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
            _ENABLED_CLASSES[plain] = type(plain.__name__, (SpeculativeGenerationMixin, plain), body)
        return _ENABLED_CLASSES[plain]


class _Maker:
    """Makes the empty object that a copy or a pickle of an enabled model fills.

    A copy gets the model's own class. A pickle names the plain class, which other processes can import, and the loaded
    model is enabled again.
    """

    def __init__(self, model_class: Any):
        self.model_class = model_class

    def __call__(self) -> Any:
        return object.__new__(self.model_class)

    def __reduce__(self) -> tuple[Any, ...]:
        return _maker_of, (self.model_class._plain_class,)


def _maker_of(plain: type[PreTrainedModel]) -> _Maker:
    """Return what a pickle calls for its plain class."""
    return _Maker(_enabled_class(plain))


# Copies come from here too: wrappers such as PEFT's, which look up missing attributes in their model, would find its
# `__copy__` and `__deepcopy__` and return a copy of the model alone.
def _reduce(self: PreTrainedModel, protocol: Any) -> tuple[Any, ...]:
    return _Maker(type(self)), (), self.__getstate__()
