"""Checks of the values of settings; each raises an error that names the field."""

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.errors import ConfigError

Check = Callable[[str, Any], None]
"""Takes a field's name and value; raises `ConfigError` if the value is not allowed."""


def is_int(value: object) -> bool:
    """Whether the value is a whole number, of numpy too; a bool is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def one_of(*choices: str) -> Check:
    """The value must be one of these strings."""

    def check(name: str, value: Any) -> None:
        if value not in choices:
            raise ConfigError(
                f"{name} must be one of {', '.join(choices)}, got {value!r}; leave it out for the default"
            )

    return check


def real(allowed: str, holds: Callable[[Any], bool]) -> Check:
    """The value must be a real number for which `holds` is true; `allowed` says so in words."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, Real) or isinstance(value, bool) or not holds(value):
            raise ConfigError(f"{name} must be {allowed}, got {value!r}; leave it out for the default")

    return check


def count(allowed: str, most: float, hint: str) -> Check:
    """The value must be an int in 1..most."""

    def check(name: str, value: Any) -> None:
        if not is_int(value) or not 1 <= value <= most:
            raise ConfigError(f"{name} must be {allowed}, got {value!r}; {hint}")

    return check


def check_draft_lens(most: int) -> Check:
    """Checks one number of drafted tokens, or a list with one per row."""

    def check(name: str, value: Any) -> None:
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if listed and value and all(is_int(one) and 0 <= one <= most for one in value):
            return
        if not is_int(value) or not 1 <= value <= most:
            raise ConfigError(
                f"{name} must be in 1..{most}, or a list of one number in 0..{most} per output row, got {value!r}; "
                "leave assistant_model out to decode without speculation"
            )

    return check


def called(what: str, hint: str) -> Check:
    """The value must be callable."""

    def check(name: str, value: Any) -> None:
        if not callable(value):
            raise ConfigError(f"{name} must {what}, got {type(value).__name__}; {hint}")

    return check


def instance(kind: type, hint: str) -> Check:
    """The value must be an instance of a class."""
    label = f"torch.{kind.__name__}" if kind is torch.Generator else kind.__name__

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise ConfigError(f"{name} must be a {label}, got {type(value).__name__}; {hint}")

    return check


def check_seed(name: str, value: Any) -> None:
    """Check that a seed is an int, or a list of ints."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_int, value))
    if not is_int(value) and not is_list:
        raise ConfigError(
            f"{name} must be an int or one int per output row, got {value!r}; leave it out for a drawn one"
        )


def check_span(name: str, value: Any) -> None:
    """Check that a span is two different token ids."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        opens, closes = value
        if is_int(opens) and is_int(closes) and min(opens, closes) >= 0 and opens != closes:
            return
    raise ConfigError(
        f"{name} must be two different token ids, one that opens a span and one that closes it, got {value!r}; "
        "pass those of <think> and </think>, say"
    )


def check_generator_source(name: str, value: Any) -> None:
    """Check that a candidate generator is one, or can make one."""
    if not isinstance(value, CandidateGenerator) and not callable(value):
        raise ConfigError(
            f"{name} must be a CandidateGenerator or make one, got {type(value).__name__}; "
            "pass an instance, a class or a functools.partial of one"
        )
