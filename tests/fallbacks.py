"""Which fallbacks a test expects: a drafter that has died must not go unseen, for the text stays what it would be."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hf_speculate.stats import SpeculationStats

PAST_CONTEXT = "past the context of the drafter"


@contextmanager
def only_fallbacks(*words: str) -> Iterator[None]:
    """Fails at its end if a call inside fell back for a reason that holds none of these words."""
    reasons: list[str] = []
    add = SpeculationStats.add_fallback

    def add_and_keep(stats: SpeculationStats, reason: str) -> None:
        reasons.append(reason)
        add(stats, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculationStats, "add_fallback", add_and_keep)
        yield
    unnamed = [reason for reason in dict.fromkeys(reasons) if not any(word in reason for word in words)]
    assert not unnamed, f"fallbacks that no marker `fallback` of the test names: {unnamed}"
