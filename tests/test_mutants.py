"""The mutants' replacements still apply to the files that they name."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.__main__ import MUTANTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant):
    assert mutant.old != mutant.new
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
    assert all((ROOT / "tests" / name).exists() for name in mutant.tests.split())


def test_there_are_enough_mutants_of_different_names():
    assert len(MUTANTS) >= 100
    assert Counter(mutant.name for mutant in MUTANTS).most_common(1)[0][1] == 1
