"""Few and scattered measurements are flagged, and speed-ups that the pair cannot reach."""

import pytest

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.measuring import Run
from hf_speculate.tools.bench.methods import Method
from hf_speculate.tools.bench.results import doubts, draft_cost, method_entry, speedup_bound
from tests.tiny import make_model

OURS = Method("greedy, K = 4", "ours")
COPIES = Method("copies", "ours", {"prompt_lookup_num_tokens": 4})  # drafts cost nothing


def plain_runs(*ms_per_token):
    texts = [[1] * 11]
    return [Run(at, 0, 1.0 + ms / 100, texts, None, first_token_s=1.0) for at, ms in enumerate(ms_per_token)]


def stats_of(num_rounds, draft_len, num_accepted):
    stats = SpeculationStats(num_batch_rounds=num_rounds, num_longest=num_rounds * (num_accepted + 1))
    for _ in range(num_rounds):
        stats.add_row(draft_len, num_accepted, num_accepted + 1)
        stats.add_draft_len(draft_len)
    return stats


@pytest.mark.parametrize(
    ("runs", "repeats", "words"),
    [
        (plain_runs(20, 21, 22, 23, 24), 1, []),
        (plain_runs(20, 21), 1, ["2 prompts, 1 repeat: not reliable"]),
        (plain_runs(20, 21, 22, 23, 40), 1, ["plain decoding took 20 to 40 ms per token: the machine was busy"]),
        (plain_runs(20, 40), 2, ["2 prompts, 2 repeats", "20 to 40 ms per token"]),
        ([], 1, ["2 prompts, 1 repeat"]),
    ],
)
def test_few_and_scattered_measurements_are_doubted(runs, repeats, words):
    found = doubts(runs, repeats, 2)
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))


def test_a_round_takes_at_least_a_plain_step_and_its_draft_steps():
    assert speedup_bound(stats_of(10, 4, 3), 0.0) == 4
    assert speedup_bound(stats_of(10, 4, 3), 0.25) == 2
    assert speedup_bound(SpeculationStats(), 0.25) is None


@pytest.mark.parametrize(
    ("method", "seconds", "bound", "is_noise"),
    [(OURS, 0.5, 2, False), (OURS, 0.47, 2, False), (OURS, 0.4, 2, True), (COPIES, 0.4, 4, False)],
)
def test_a_speed_up_above_the_bound_is_noise(method, seconds, bound, is_noise):
    texts = [[1] * 40]
    run = Run(0, 0, seconds, texts, stats_of(10, 4, 3))
    entry = method_entry(method, [run], [Run(0, 0, 1.0, texts, None)], None, cost=0.25)
    assert (entry["speedup_bound"], entry["is_noise"]) == (bound, is_noise)


def test_the_cost_of_a_draft_is_its_share_of_the_bytes():
    target, draft = make_model("llama"), make_model("llama", hidden_size=16, intermediate_size=24)
    sizes = [
        sum(one.numel() for name, one in model.named_parameters() if "embed_tokens" not in name)
        for model in (target, draft)
    ]
    assert draft_cost(target, draft) == pytest.approx(sizes[1] / sizes[0])
    assert draft_cost(target, None) == 0
