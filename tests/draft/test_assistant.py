"""What is remembered of a target's draft models."""

from hf_speculate import SpeculationStats
from hf_speculate.draft.assistant import AcceptanceTallies
from tests.tiny import make_model


def test_low_acceptance_is_reported_once_also_after_it_rose():
    tallies, draft = AcceptanceTallies(), make_model("llama")
    calls = [(100, 1), (100, 10), (1000, 0), (100, 90), (9000, 0)]
    assert [tallies.add(draft, SpeculationStats(num_verified=n, num_accepted=a)) for n, a in calls] == [
        *(True, False, False, False, False)
    ]
