"""Suggest the likely `generate()` argument for a mistyped one."""

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from transformers import GenerationConfig, GenerationMixin

from hf_speculate.config import FIELD_NAMES
from hf_speculate.draft.source import SOURCES
from hf_speculate.errors import ConfigError, nearest_name

ARGUMENTS = {
    *FIELD_NAMES,
    *filter(str.isidentifier, SOURCES),
    *(name for name in vars(GenerationConfig()) if not name.startswith("_")),
    *inspect.signature(GenerationMixin.generate).parameters,
} - {"self", "kwargs"}

# the beginning of transformers' error message
_REFUSAL = "The following `model_kwargs` are not used by the model"


@contextmanager
def name_mistyped(keywords: Collection[str]) -> Iterator[None]:
    """Raise a `ConfigError` that names the closest argument if transformers rejects a keyword."""
    try:
        yield
    except ValueError as error:
        is_refusal = type(error) is ValueError and str(error).startswith(_REFUSAL)
        for name in keywords if is_refusal else ():
            nearest = None if name in ARGUMENTS else nearest_name(name, ARGUMENTS)
            if nearest is not None and repr(name) in str(error):
                raise ConfigError(
                    f"{name} must be an argument of generate(), got an unknown one; did you mean "
                    f"{nearest}?"
                ) from error
        raise
