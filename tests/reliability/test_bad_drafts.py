"""Random calls whose drafts have too short a context, NaN and infinity among their weights, or raise errors."""

import pytest

from tests.random_calls import FAMILY_NAMES
from tests.random_search import search
from tests.reliability.bad_drafts import FAULTS

SEED, NUM = 7, 40


@pytest.mark.fallback("")  # whatever a fault leads to
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_no_text_differs_and_no_call_ends(part):
    """A part of `python -m tests.reliability.bad_drafts`, with families from all over the list."""
    families = FAMILY_NAMES[part::4]
    counts = search(
        SEED, range(NUM // 4), tuple(families[place * 5 % len(families)] for place in range(len(families))), FAULTS
    )
    assert counts["different"] == 0
    assert counts["equal"] > NUM // 8
