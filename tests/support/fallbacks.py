"""Check that only expected fallbacks occur, because a drafter that never runs changes no text."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from hf_speculate.stats import SpeculationStats

PAST_CONTEXT = "past the context of the drafter"
# Reasons for a dynamic KV cache that come from the model or an argument, not from the drafter.
OF_CACHES = (
    "it takes no position_ids",
    "its layers attend to an encoder's output",
    "ALiBi position biases need the dynamic cache",
    "its layers cut their windows by columns",
    "its layers have several windows",
    "its layers attend in other ways than fully or by window",
    "it takes one mask for layers of two types",
    "its cache holds the states of pictures too",
    "its forward reads the attention mask as [B, T]",
    "makes masks in a way of its own",
    "attention weights are returned",
    "draft_state keeps all states",
    "the attention mask has holes",
)


@contextmanager
def only_fallbacks(*words: str) -> Iterator[None]:
    """Fail on exit if a call in this context fell back for a reason with none of the words.

    Reasons for a dynamic KV cache are allowed.
    """
    # each reason once, because a test may count the objects that calls leave behind
    reasons: dict[str, None] = {}
    add = SpeculationStats.add_fallback

    def add_and_keep(stats: SpeculationStats, reason: str) -> None:
        reasons[reason] = None
        add(stats, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculationStats, "add_fallback", add_and_keep)
        yield
    unnamed = [
        reason for reason in without_caches(reasons) if not any(word in reason for word in words)
    ]
    assert not unnamed, f"fallbacks that no marker `fallback` of the test names: {unnamed}"


def without_caches(reasons: Iterable[str]) -> list[str]:
    """Return the reasons except the ones for a dynamic KV cache, see `OF_CACHES`."""
    return [
        reason
        for reason in reasons
        if " cache: dynamic, because " not in reason or not reason.endswith(OF_CACHES)
    ]
