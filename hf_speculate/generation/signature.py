"""The signature and docstring of an enabled model's `generate`: those of its class, and our fields."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from types import FunctionType
from typing import Any

from transformers import GenerationMixin

from hf_speculate.config import SpeculationConfig


def described(generate: Any, plain: Callable[..., Any]) -> Any:
    """A copy of `generate` whose signature and docstring begin with those of `plain`; it runs as the original does."""
    code, scope, name = generate.__code__, generate.__globals__, generate.__name__
    twin = FunctionType(code, scope, name, generate.__defaults__, generate.__closure__)
    twin.__module__, twin.__qualname__ = generate.__module__, generate.__qualname__
    twin.__annotations__ = generate.__annotations__
    twin.__signature__ = _signature(plain)  # type: ignore[attr-defined]
    text = inspect.getdoc(plain) or inspect.getdoc(GenerationMixin.generate) or ""
    ours = (inspect.getdoc(SpeculationConfig) or "").partition("Args:\n")[2].partition("\n\n")[0]
    twin.__doc__ = f"{text}\n\nSpeculative decoding, by keyword or as fields of a `GenerationConfig`:\n{ours}\n"
    return twin


def _signature(plain: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(plain)
    theirs = list(signature.parameters.values())
    ours = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(SpeculationConfig)
        if field.name not in signature.parameters
    ]
    end = len(theirs) - (bool(theirs) and theirs[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*theirs[:end], *ours, *theirs[end:]])
