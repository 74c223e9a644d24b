"""Check the values of settings. An error names the field, allowed values, value and next step."""

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from hf_speculate.errors import ConfigError


class Check(NamedTuple):
    """A condition on the value of a field.

    Calling the check with a name and a value raises `ConfigError` unless the condition holds.
    """

    allowed: str  # text after "must" in the error
    is_allowed: Callable[[Any], bool]
    hint: str = "leave it out for the default"
    shows_type: bool = False  # whether the error contains the value's type instead of the value

    # `source` is, for example, " at prompts.jsonl:3"
    def __call__(self, name: str, value: Any, source: str = "") -> None:
        if not self.is_allowed(value):
            got = type(value).__name__ if self.shows_type else repr(value)
            raise ConfigError(f"{name} must {self.allowed}, got {got}{source}; {self.hint}")


def is_int(value: object) -> bool:
    """Return whether the value is an integer, including numpy integers, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_list(value: object, is_entry: Callable[[Any], bool]) -> bool:
    """Return whether the value is a sequence of allowed entries, but not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_entry, value))


def one_of(*choices: str, aliases: tuple[str, ...] = ()) -> Check:
    """Require one of the given strings; errors do not name the aliases."""
    return Check(
        f"be one of {', '.join(choices)}", lambda value: value in choices or value in aliases
    )


def real(
    allowed: str, holds: Callable[[Any], bool], hint: str = "leave it out for the default"
) -> Check:
    """Require a real number for which `holds` is true."""
    return Check(
        f"be {allowed}",
        lambda value: isinstance(value, Real) and not isinstance(value, bool) and holds(value),
        hint,
    )


def integer(allowed: str, min_value: int, max_value: float, hint: str) -> Check:
    """Require an integer from `min_value` to `max_value`, inclusive."""
    return Check(
        f"be {allowed}", lambda value: is_int(value) and min_value <= value <= max_value, hint
    )


def instance(name: str, of: type, hint: str) -> Check:
    """Require an object of a class."""
    return Check(f"be a {name}", lambda value: isinstance(value, of), hint, shows_type=True)


def function(allowed: str, hint: str) -> Check:
    """Require a callable."""
    return Check(allowed, callable, hint, shows_type=True)
