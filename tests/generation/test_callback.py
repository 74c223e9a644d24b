"""`speculation_callback` hears of every round, what the statistics count of it, and waits for nothing."""

import logging
import re

import pytest
from transformers import LogitsProcessorList

from hf_speculate import RoundReport, SpeculationStats
from tests.cases import Unchanged, assert_equal_ids, pair
from tests.tiny import ragged_prompts

NUM_NEW = 14


def generate(callback, batch_size=3, **options):
    target, draft = pair("llama")
    options = {"num_assistant_tokens": 3, "max_new_tokens": NUM_NEW, **options}
    return target.generate(
        **ragged_prompts(batch_size, seed=1), assistant_model=draft, speculation_callback=callback, **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logits_processor": LogitsProcessorList([Unchanged()])},
        {"prompt_lookup_num_tokens": 4, "eos_token_id": 5},
        {"do_sample": True, "seed": 1, "num_assistant_tokens_schedule": "heuristic"},
    ],
)
def test_it_is_told_every_round_as_the_statistics_count_it(options):
    reports: list[RoundReport] = []
    stats = SpeculationStats()
    generate(reports.append, speculation_stats=stats, **options)
    assert len(stats.draft_lens) == len(reports)
    assert [report.num_round for report in reports] == list(range(1, stats.num_batch_rounds + 1))
    assert sum(len(report.row_ids) for report in reports) == stats.num_rounds
    for name in ("num_drafted", "num_accepted", "num_emitted"):
        assert sum(sum(getattr(report, name)) for report in reports) == getattr(stats, name) > 0
    assert all(type(num) is int for report in reports for part in report[1:5] for num in part)
    assert all(report.draft_s > 0 and report.score_s > 0 and report.other_s > 0 for report in reports)
    assert all(report.round_s == report.draft_s + report.score_s + report.other_s for report in reports)
    assert sum(report.score_s for report in reports) == pytest.approx(stats.score_s)
    assert reports[-1].total_s <= stats.total_s  # what follows the last round is not in it
    assert options or reports[-1].total_s == pytest.approx(stats.total_s, rel=0.05)


def test_rows_are_named_by_their_place_in_the_output():
    reports, quiet, told = [], SpeculationStats(), SpeculationStats()
    options = {"eos_token_id": 5, "max_new_tokens": 60}
    text = generate(reports.append, **options, speculation_stats=told)
    assert_equal_ids(generate(None, **options, speculation_stats=quiet), text)
    assert (quiet.num_host_syncs, quiet.num_user_host_syncs) == (told.num_host_syncs, told.num_user_host_syncs)
    ends = [(row[12:] == 5).nonzero()[:1, 0] for row in text]
    emitted = [1, 1, 1]  # the token after the prompt comes before the first round
    for report in reports:
        for row, num in zip(report.row_ids, report.num_emitted, strict=True):
            emitted[row] += num
    assert emitted == [int(end) + 1 if len(end) else 60 for end in ends]
    assert len({report.row_ids for report in reports}) > 1  # rows left


def test_a_call_with_drafts_is_reported_and_logs_one_line_at_info(caplog):
    reports: list[RoundReport] = []
    with caplog.at_level(logging.INFO, logger="hf_speculate"):
        pair("llama")[0].generate(**ragged_prompts(1), max_new_tokens=3, speculation_callback=reports.append)
        assert (caplog.records, reports) == ([], [])
        generate(None)
    (record,) = [record for record in caplog.records if record.name == "hf_speculate"]
    assert record.levelno == logging.INFO
    assert re.search(r"greedy verification: 39 tokens in \d+ rounds, .* \d+\.\d tokens/s$", record.getMessage())
