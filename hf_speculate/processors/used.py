"""Used processors: reject processors whose state has lost rows in an earlier call."""

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.processors.registry import name_of

_lost_rows: dict[int, "weakref.ref[Any]"] = {}  # by id, because processors may not be hashable


def note_lost_rows(processor: Any) -> None:
    """Record that a processor's state has lost rows if the processor supports weak references."""
    number = id(processor)
    with contextlib.suppress(TypeError):
        _lost_rows[number] = weakref.ref(processor, lambda _: _lost_rows.pop(number, None))


def check_unused(processors: Iterable[Any]) -> None:
    """Raise an error if a processor's state has lost rows in an earlier call.

    Raises:
        UnsupportedGenerationError: rows have left the state of a processor.
    """
    for processor in processors:
        reference = _lost_rows.get(id(processor))
        if reference is not None and reference() is processor:
            raise UnsupportedGenerationError(
                "a logits processor with state must be a new one in each call, got a "
                f"{name_of(processor)} that holds "
                "the last rows of an earlier call; make another one"
            )
