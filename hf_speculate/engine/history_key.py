"""The history key of a draft source: under which its calls share what they have measured."""

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

from hf_speculate.engine.call import Call


class HistoryKey(NamedTuple):
    """What drafts, as far as later calls can recognise it."""

    draft: object | None  # a draft model, which is held weakly; None if no object stays
    name: Hashable  # of the kind of source, and what tells it from others of its kind


def history_key(source: Call) -> HistoryKey:
    """The key of the draft source of a call.

    A draft model is recognised by itself, the first layers of the target by their number, and a custom drafter by its
    `description`, or if it has none by its class or function. Candidate generators are recognised by their class.
    """
    config, model, name = source.config, None, "none"
    if source.early_exit is not None:
        name = f"early exit after {source.early_exit} layers"
    elif source.draft is not None:
        model, name = source.draft, "model"
    elif config.drafter is not None:
        name = f"drafter {getattr(config.drafter, 'description', None) or _qualified_name(config.drafter)}"
    elif source.generator is not None:
        name = f"candidate generator {_qualified_name(source.generator)}"
    return HistoryKey(model, (name, config.prompt_lookup_num_tokens is not None))


def _qualified_name(factory: object) -> str:
    """Of a function or class, or of an object's class; a partial function is what it calls."""
    while isinstance(factory, partial):
        factory = factory.func
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"
