"""Defaults of an enabled model: what `enable` was given, for calls that name no draft source of their own."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.errors import warn_user
from hf_speculate.models.text_decoder import unwrapped

SAVED_ASSISTANT = "speculation_assistant"  # key of a generation config that names a draft
TOKENIZERS = ("tokenizer", "assistant_tokenizer")
_ATTRIBUTE = "_hf_speculate_defaults"  # of an enabled model; no module, parameter or buffer

_plain_models: ContextVar[tuple[PreTrainedModel, ...]] = ContextVar("hf_speculate_plain_models", default=())


class Defaults:
    """Arguments of `generate()` by name. Copies of a model share them, and what is pickled leaves them out."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)
        self._said: set[str] = set()

    @staticmethod
    def of(model: PreTrainedModel) -> "Defaults":
        """Return the defaults of a model, empty ones if it has none."""
        defaults = vars(model).get(_ATTRIBUTE)
        return defaults if isinstance(defaults, Defaults) else Defaults({})

    def for_call(self, call: Mapping[str, Any], sources: Collection[str]) -> dict[str, Any]:
        """Return what counts for a call, whose own draft source replaces all of these.

        Args:
            call: arguments of the call by name; None counts as left out.
            sources: arguments that name a draft source.
        """
        names_source = any(_is_set(call, name) for name in sources)
        return {
            name: value
            for name, value in self.values.items()
            if not (_is_set(call, name) or (names_source and name in sources))
        }

    def warn_once(self, text: str) -> None:
        """Warn the user, unless these defaults have brought the same warning before."""
        if text not in self._said:
            self._said.add(text)
            warn_user(text)

    def warn_left_out(self, where: str, hint: str) -> None:
        """Warn the user once that these defaults are not part of what is saved."""
        if self.values:
            self.warn_once(f"{where} leaves out {', '.join(self.values)}, which enable() was given; {hint}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Defaults":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.warn_left_out("a pickle of the model", "call enable() with them again where it is loaded")
        return Defaults, ({},)


def set_defaults(model: PreTrainedModel, values: Mapping[str, Any]) -> None:
    """Replace the defaults of a model."""
    vars(model)[_ATTRIBUTE] = Defaults(values)


def remove_defaults(model: PreTrainedModel) -> None:
    """Remove the defaults of a model."""
    vars(model).pop(_ATTRIBUTE, None)


@contextmanager
def plain(model: PreTrainedModel) -> Iterator[None]:
    """Decode plainly in this context: `model.generate()` leaves out whatever drafts, whoever named it.

    It counts for the current thread or task alone. `generate()` of other models drafts as before.

    Args:
        model: an enabled model, or the PEFT model around one.
    """
    token = _plain_models.set((*_plain_models.get(), unwrapped(model)))
    try:
        yield
    finally:
        _plain_models.reset(token)


def decodes_plainly(model: PreTrainedModel) -> bool:
    """Return whether the current context is one of `plain` for a model."""
    return any(model is other for other in _plain_models.get())


def _is_set(call: Mapping[str, Any], name: str) -> bool:
    """Return whether a call sets an argument, by keyword or in the generation config that it passes."""
    return call.get(name) is not None or getattr(call.get("generation_config"), name, None) is not None
