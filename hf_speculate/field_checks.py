"""Checks of single values that users set."""

from collections.abc import Callable, Sequence
from numbers import Integral, Real

from hf_speculate.errors import ConfigError


def is_int(value: object) -> bool:
    """Whether it is a whole number, one of numpy's too; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_real(name: str, value: object, allowed: str, holds: Callable[[float], bool]) -> None:
    """Refuse what is no real number of the field's range.

    Args:
        name: of the field.
        value: what was set.
        allowed: the range, in words.
        holds: whether a number lies in it.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not holds(value):  # type: ignore[arg-type]
        raise ConfigError(f"{name} must be {allowed}, got {value!r}; leave it out for the default")


def check_count(name: str, value: object, most: int, hint: str) -> None:
    """Refuse what is no number of tokens.

    Args:
        name: of the field.
        value: what was set; None: nothing was.
        most: the largest number.
        hint: what to do instead.

    Raises:
        ConfigError: it is set and is not in 1..most.
    """
    if isinstance(value, Integral) and is_int(value) and 1 <= int(value) <= most:
        return
    if value is not None:
        raise ConfigError(f"{name} must be in 1..{most}, got {value!r}; {hint}")


def check_callable(name: str, value: object, what: str, hint: str) -> None:
    """Refuse what cannot be called.

    Args:
        name: of the field.
        value: what was set; None: nothing was.
        what: it must do.
        hint: what to pass instead.

    Raises:
        ConfigError: it is set and cannot be called.
    """
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must {what}, got {type(value).__name__}; {hint}")


def check_span(name: str, value: object) -> None:
    """Refuse what does not name the ids that open and close a span.

    Args:
        name: of the field.
        value: what was set; None: nothing was.

    Raises:
        ConfigError: it is set and is not two different ids.
    """
    if value is None:
        return
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        opens, closes = value
        if is_int(opens) and is_int(closes) and min(opens, closes) >= 0 and opens != closes:
            return
    raise ConfigError(
        f"{name} must be two different token ids, one that opens a span and one that closes it, got {value!r}; "
        "pass those of <think> and </think>, say"
    )
