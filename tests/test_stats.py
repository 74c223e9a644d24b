"""Counts follow from the rounds that were added, and read well."""

from dataclasses import fields

import pytest
from transformers import LogitsProcessor, LogitsProcessorList

import hf_speculate
from hf_speculate.stats import SpeculationStats
from hf_speculate.verify import GreedyVerifier, base, register_verifier
from tests.cases import ACCEPTED_ALL, DRAFT_NOISE, pair
from tests.tiny import ragged_prompts


def make_stats(*rounds: tuple[int, int, int]) -> SpeculationStats:
    """Rounds of (drafted, accepted, emitted) tokens."""
    stats = SpeculationStats(verifier="greedy")
    for num_drafted, num_accepted, num_emitted in rounds:
        stats.add_row(num_drafted, num_accepted, num_emitted)
    return stats


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "num_judged"),
    [(5, 0, 1), (5, 2, 3), (5, 4, 5), (5, 5, 5), (1, 0, 1), (1, 1, 1), (0, 0, 0)],
)
def test_the_first_refused_token_is_judged_and_those_after_it_are_not(num_drafted, num_accepted, num_judged):
    stats = make_stats((num_drafted, num_accepted, num_accepted + 1))
    assert stats.num_drafted == num_drafted
    assert stats.num_accepted == num_accepted
    assert stats.num_judged == num_judged
    assert stats.judged_by_position == [1] * num_judged
    assert stats.accepted_by_position == [1] * num_accepted + [0] * (num_judged - num_accepted)


def test_tokens_that_the_verifier_never_reached_are_not_judged():
    stats = SpeculationStats()
    stats.add_row(num_drafted=5, num_accepted=2, num_emitted=2, num_judged=2)
    assert stats.num_judged == 2
    assert stats.acceptance == 1.0
    assert stats.acceptance_by_position == [1.0, 1.0]


def test_counts_add_up_over_rounds():
    stats = make_stats((4, 4, 5), (4, 1, 2), (2, 0, 1), (4, 2, 1))
    assert stats.num_rounds == 4
    assert stats.num_drafted == 14
    assert stats.num_judged == 4 + 2 + 1 + 3
    assert stats.num_accepted == 7
    assert stats.num_emitted == 9
    assert stats.acceptance == 7 / 10
    assert stats.tokens_per_round == 9 / 4


def test_acceptance_by_position_is_of_those_that_were_judged_there():
    stats = make_stats((3, 3, 4), (3, 1, 2), (3, 0, 1), (1, 1, 2))
    assert stats.judged_by_position == [4, 2, 1]
    assert stats.accepted_by_position == [3, 1, 1]
    assert stats.acceptance_by_position == [3 / 4, 1 / 2, 1.0]


def test_positions_add_up_to_the_whole():
    stats = make_stats((5, 2, 3), (3, 3, 4), (5, 0, 1), (0, 0, 1), (1, 1, 2))
    assert sum(stats.judged_by_position) == stats.num_judged
    assert sum(stats.accepted_by_position) == stats.num_accepted


def test_before_the_first_round_shares_are_zero():
    stats = SpeculationStats()
    assert stats.acceptance == stats.tokens_per_round == 0.0
    assert stats.acceptance_by_position == []


def test_reset_sets_every_field_back_in_place():
    stats = make_stats((3, 2, 3))
    for entry in fields(stats):  # nothing is left at its default
        value = getattr(stats, entry.name)
        if isinstance(value, list):
            value.append("more")
        elif isinstance(value, dict):
            value[3] = 1
        else:
            setattr(stats, entry.name, "other" if isinstance(value, str) else value + 1)
    fresh, lists = SpeculationStats(), (stats.fallbacks, stats.judged_by_position)
    assert all(getattr(stats, entry.name) != getattr(fresh, entry.name) for entry in fields(stats))
    stats.reset()
    assert stats == fresh
    assert stats.fallbacks is not lists[0]
    assert stats.judged_by_position is not lists[1]


def test_two_objects_share_no_list():
    one, other = SpeculationStats(), SpeculationStats()
    one.add_row(2, 1, 2)
    one.fallbacks.append("reason")
    assert other == SpeculationStats()


def test_it_reads_well():
    stats = make_stats((3, 3, 4), (3, 1, 2))
    stats.draft_s, stats.num_host_syncs, stats.num_user_host_syncs = 0.25, 3, 1
    stats.add_draft_len(3)
    stats.add_draft_len(3)
    lines = str(stats).splitlines()
    assert lines == [
        "greedy verification: 6 tokens in 2 rounds",
        "tokens a round 3.00, acceptance 0.800 (4 of 5 judged, 6 drafted)",
        "acceptance by position: 1.00 0.50 1.00",
        "rounds by draft length: 3:2",
        "seconds: prefill 0.000 draft 0.250 score 0.000 verify 0.000 bookkeeping 0.000",
        "host synchronisations: 3 ours, 1 in user code",
    ]


def test_lock_step_and_fallbacks_are_said_with_their_reason():
    stats = make_stats((3, 1, 2))
    assert "lock step" not in str(stats)
    stats.lock_step = True
    stats.fallbacks += ["first reason", "second reason"]
    lines = str(stats).splitlines()
    assert lines[-3:] == ["rows moved in lock step", "fallback: first reason", "fallback: second reason"]


def test_an_unused_one_reads_too():
    text = str(SpeculationStats())
    assert "no verification: 0 tokens in 0 rounds" in text
    assert "acceptance by position: -" in text


def generate(stats: SpeculationStats, batch_size: int, noise: float = DRAFT_NOISE, **options) -> None:
    target, draft = pair("llama", noise)
    target.generate(
        **ragged_prompts(batch_size, seed=1),
        assistant_model=draft,
        max_new_tokens=13,
        num_assistant_tokens=3,
        speculation_stats=stats,
        **options,
    )


def test_a_call_with_a_perfect_draft_is_counted_exactly():
    """Twelve tokens after the first: three rounds of a wholly kept draft of three and one token more."""
    stats = hf_speculate.SpeculationStats()
    generate(stats, 2, ACCEPTED_ALL)
    assert stats.num_batch_rounds == 3
    assert stats.num_rounds == 2 * 3
    assert stats.num_drafted == stats.num_judged == stats.num_accepted == 2 * 9
    assert stats.num_emitted == 2 * 12
    assert stats.acceptance_by_position == [1.0] * 3
    assert stats.tokens_per_round == 4.0
    assert stats.status == 0


def test_each_call_starts_it_anew_and_times_every_stage():
    stats = hf_speculate.SpeculationStats()
    generate(stats, 3)
    generate(stats, 2)
    assert stats.num_emitted == 2 * 12
    assert stats.num_accepted < stats.num_judged < stats.num_drafted
    assert stats.num_batch_rounds < stats.num_rounds <= 2 * stats.num_batch_rounds
    assert all(getattr(stats, f"{stage}_s") > 0 for stage in ("prefill", "draft", "score", "verify", "bookkeeping"))


class SeeingGreedy(GreedyVerifier):
    """Greedy verification that keeps what each call judged."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "judged", [])  # of each call, [B] pairs of tokens that counted and were accepted

    def verify(self, target_logits, draft, keys):
        verdict = super().verify(target_logits, draft, keys)
        self.judged.append(list(zip(draft.lens.tolist(), verdict.num_accepted.tolist(), strict=True)))
        return verdict


class Unchanged(LogitsProcessor):
    """A user's own processor, which moves the rows in lock step and changes nothing."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize("is_lock_step", [False, True])
def test_generate_counts_as_judged_what_its_verifier_judged(monkeypatch, is_lock_step):
    verifier = SeeingGreedy()
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    register_verifier("seeing", lambda config: verifier, lossless=True, reads_draft_logits=False)
    stats = SpeculationStats()
    processors = LogitsProcessorList([Unchanged()] if is_lock_step else [])
    generate(stats, 3, verifier="seeing", logits_processor=processors)
    assert stats.lock_step == is_lock_step
    rows = [row for call in verifier.judged for row in call]
    assert stats.num_judged == sum(min(accepted + 1, num) for num, accepted in rows)
    assert stats.num_accepted == sum(accepted for _, accepted in rows)
    assert stats.num_accepted < stats.num_judged < stats.num_drafted
