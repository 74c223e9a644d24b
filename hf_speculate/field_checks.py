"""Checks of the values of settings; an error names the field, what is allowed, the value and the next step."""

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from hf_speculate.errors import ConfigError


class Check(NamedTuple):
    """A condition on the value of a field; calling it with name and value raises `ConfigError` unless it holds."""

    allowed: str  # follows "must" in the error
    is_allowed: Callable[[Any], bool]
    hint: str = "leave it out for the default"
    shows_type: bool = False  # whether the error shows the value's type instead of the value

    def __call__(self, name: str, value: Any, source: str = "") -> None:  # source: " at prompts.jsonl:3" for example
        if not self.is_allowed(value):
            got = type(value).__name__ if self.shows_type else repr(value)
            raise ConfigError(f"{name} must {self.allowed}, got {got}{source}; {self.hint}")


def is_int(value: object) -> bool:
    """Whether the value is an integer, numpy's included, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_list(value: object, is_entry: Callable[[Any], bool]) -> bool:
    """Whether the value is a sequence whose entries are all allowed, but not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_entry, value))


def one_of(*choices: str, aliases: tuple[str, ...] = ()) -> Check:
    """One of these strings; errors do not name the aliases."""
    return Check(f"be one of {', '.join(choices)}", lambda value: value in choices or value in aliases)


def real(allowed: str, holds: Callable[[Any], bool], hint: str = "leave it out for the default") -> Check:
    """A real number for which `holds` is true."""
    return Check(
        f"be {allowed}", lambda value: isinstance(value, Real) and not isinstance(value, bool) and holds(value), hint
    )


def integer(allowed: str, least: int, most: float, hint: str) -> Check:
    """An integer in least..most."""
    return Check(f"be {allowed}", lambda value: is_int(value) and least <= value <= most, hint)


def instance(name: str, of: type, hint: str) -> Check:
    """An object of a class."""
    return Check(f"be a {name}", lambda value: isinstance(value, of), hint, shows_type=True)


def function(allowed: str, hint: str) -> Check:
    """Something that can be called."""
    return Check(allowed, callable, hint, shows_type=True)
