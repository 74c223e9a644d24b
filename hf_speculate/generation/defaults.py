"""Store the arguments of `enable` as a model's defaults for calls without a draft source."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.draft.source import is_set
from hf_speculate.errors import warn_user
from hf_speculate.models.text_decoder import unwrapped

# Each of these fields applies to only one draft source.
_COMPANIONS = ("draft_state", "suffix_store")
SAVED_ASSISTANT = "speculation_assistant"  # key in generation configs that names a draft
TOKENIZERS = ("tokenizer", "assistant_tokenizer")
_ATTRIBUTE = "_hf_speculate_defaults"  # attribute of enabled models, outside the state dict

_plain_models: ContextVar[tuple[PreTrainedModel, ...]] = ContextVar(
    "hf_speculate_plain_models", default=()
)
_is_nested: ContextVar[bool] = ContextVar("hf_speculate_is_nested", default=False)


class Defaults:
    """Default arguments of `generate()` by name.

    Copies of a model share its defaults; pickles leave them out.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)
        self._said: set[str] = set()

    @staticmethod
    def of(model: PreTrainedModel) -> "Defaults":
        """Return the defaults of a model, empty if it has none."""
        defaults = vars(model).get(_ATTRIBUTE)
        return defaults if isinstance(defaults, Defaults) else Defaults({})

    def for_call(self, call: Mapping[str, Any], sources: Collection[str]) -> dict[str, Any]:
        """Return the defaults for a call; the call's own draft source replaces all default ones.

        Args:
            call: arguments of the call by name; None counts as left out.
            sources: names of the arguments that select draft sources.
        """
        values = dict(self.values)
        if any(is_set(value_in(call, name)) for name in sources):
            values = {
                name: value
                for name, value in values.items()
                if name not in {*sources, *_COMPANIONS}
            }
        return {name: value for name, value in values.items() if value_in(call, name) is None}

    def warn_once(self, text: str) -> None:
        """Warn the user once per text."""
        if text not in self._said:
            self._said.add(text)
            warn_user(text)

    def warn_left_out(self, where: str, hint: str) -> None:
        """Warn the user once that saving leaves these defaults out."""
        if self.values:
            self.warn_once(
                f"{where} leaves out {', '.join(self.values)}, which enable() was given; {hint}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Defaults":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.warn_left_out(
            "a pickle of the model", "call enable() with them again where it is loaded"
        )
        return Defaults, ({},)


def set_defaults(model: PreTrainedModel, values: Mapping[str, Any]) -> None:
    """Set the defaults of a model, replacing earlier ones."""
    vars(model)[_ATTRIBUTE] = Defaults(values)


def remove_defaults(model: PreTrainedModel) -> None:
    """Remove the defaults of a model."""
    vars(model).pop(_ATTRIBUTE, None)


@contextmanager
def plain(model: PreTrainedModel) -> Iterator[None]:
    """Use plain decoding within this context.

    Calls to `model.generate()` ignore all draft sources, and all fields except for the statistics
    and the seed. Other threads and tasks still draft, and so do calls to `generate()` of other
    models. A generator suspended inside the context keeps the context active for its caller.

    Args:
        model: an enabled model, or the PEFT model around one.
    """
    token = _plain_models.set((*_plain_models.get(), unwrapped(model)))
    try:
        yield
    finally:
        _plain_models.reset(token)


def decodes_plainly(model: PreTrainedModel) -> bool:
    """Return whether the current code runs within `plain` for this model."""
    return any(model is other for other in _plain_models.get())


@contextmanager
def nested_calls(model: PreTrainedModel) -> Iterator[None]:
    """Use plain decoding without statistics for calls to `generate()` inside another call."""
    token = _is_nested.set(True)
    try:
        with plain(model):
            yield
    finally:
        _is_nested.reset(token)


def is_nested() -> bool:
    """Return whether the current code runs within `nested_calls`."""
    return _is_nested.get()


def value_in(call: Mapping[str, Any], name: str) -> Any:
    """Return an argument from the call's keywords or its generation config; None if not set."""
    value = call.get(name)
    return getattr(call.get("generation_config"), name, None) if value is None else value
