"""Test random calls with drafts that have a short context, NaN or infinite weights, or errors."""

import random

import pytest

from tests.random_calls import FAMILY_NAMES
from tests.random_search import search
from tests.reliability.bad_drafts import FAULTS

# Faults may lead to any of these fallbacks.
pytestmark = [pytest.mark.fallback(""), pytest.mark.filterwarnings("ignore")]
FAMILIES = tuple(random.Random(0).sample(FAMILY_NAMES, len(FAMILY_NAMES)))


def check(seed, first, num):
    """Run random calls, as `python -m tests.reliability.bad_drafts` does for other families."""
    print(f"seed {seed}, calls {first} to {first + num - 1}")
    counts = search(seed, range(first, first + num), FAMILIES, FAULTS)
    assert counts["different"] == 0
    assert counts["equal"] > num / 2


@pytest.mark.parametrize("part", range(4))
def test_bad_drafts_change_no_text(part):
    check(1, 10 * part, 10)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_bad_drafts_change_no_text(part):
    check(2, 70 * part, 70)
