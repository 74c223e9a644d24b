"""`speculation_callback` hears of every round, what the statistics count of it, and waits for nothing."""

import logging
import re

import pytest
import torch
from transformers import LogitsProcessorList

import hf_speculate
from hf_speculate import RoundReport, SpeculationStats
from tests.cases import ACCEPTED_ALL, Unchanged, assert_equal_ids, pair
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
    ids=["ragged", "lock step", "lookup, rows that end", "sampling"],
)
def test_it_is_told_every_round_as_the_statistics_count_it(options):
    reports: list[RoundReport] = []
    stats = SpeculationStats()
    generate(reports.append, speculation_stats=stats, **options)
    assert [report.num_round for report in reports] == list(range(1, stats.num_batch_rounds + 1))
    assert sum(len(report.row_ids) for report in reports) == stats.num_rounds
    for name in ("num_drafted", "num_accepted", "num_emitted"):
        assert sum(sum(getattr(report, name)) for report in reports) == getattr(stats, name) > 0
    for report in reports:
        lens = {len(part) for part in (report.row_ids, report.num_drafted, report.num_accepted, report.num_emitted)}
        assert lens == {len(report.row_ids)}
        assert set(report.row_ids) <= {0, 1, 2}
        assert all(type(num) is int for part in report[1:5] for num in part)


def test_rows_are_named_by_their_place_in_the_output():
    reports: list[RoundReport] = []
    text = generate(reports.append, eos_token_id=5, max_new_tokens=60)
    plain = generate(None, eos_token_id=5, max_new_tokens=60)
    assert_equal_ids(plain, text)
    ends = [(row[12:] == 5).nonzero()[:1, 0] for row in text]
    emitted = [1, 1, 1]  # the token after the prompt comes before the first round
    for report in reports:
        for row, num in zip(report.row_ids, report.num_emitted, strict=True):
            emitted[row] += num
    assert emitted == [int(end) + 1 if len(end) else 60 for end in ends]
    assert len({report.row_ids for report in reports}) > 1  # rows left


def test_seconds_add_up():
    reports: list[RoundReport] = []
    stats = SpeculationStats()
    generate(reports.append, speculation_stats=stats)
    assert all(report.draft_s > 0 and report.score_s > 0 and report.other_s > 0 for report in reports)
    assert all(report.round_s == report.draft_s + report.score_s + report.other_s for report in reports)
    totals = [report.total_s for report in reports]
    assert totals == sorted(totals)
    assert sum(report.score_s for report in reports) == pytest.approx(stats.score_s)
    assert totals[-1] == pytest.approx(stats.total_s, rel=0.05)  # what follows the last round is not in its report
    assert totals[-1] - sum(report.round_s for report in reports) >= stats.prefill_s


def test_it_changes_no_text_and_no_number_of_waits():
    quiet, told = SpeculationStats(), SpeculationStats()
    one = generate(None, speculation_stats=quiet)
    other = generate(lambda report: None, speculation_stats=told)
    assert_equal_ids(one, other)
    assert (quiet.num_host_syncs, quiet.num_user_host_syncs) == (told.num_host_syncs, told.num_user_host_syncs)


def test_without_drafts_nobody_calls_it():
    target, _ = pair("llama")
    reports: list[RoundReport] = []
    target.generate(**ragged_prompts(1), max_new_tokens=3, speculation_callback=reports.append)
    assert reports == []


def test_what_cannot_be_called_is_refused():
    with pytest.raises(
        hf_speculate.ConfigError,
        match=r"^speculation_callback must be called after every round, got int; pass a function of one RoundReport$",
    ):
        generate(3)


def test_a_call_logs_one_line_at_info(caplog):
    with caplog.at_level(logging.INFO, logger="hf_speculate"):
        generate(None)
    (record,) = [record for record in caplog.records if record.name == "hf_speculate"]
    assert record.levelno == logging.INFO
    pattern = (
        r"speed-up over plain decoding not measured .*; greedy verification: 39 tokens in \d+ rounds, "
        r"mean acceptance length \d\.\d\d, "
        r"acceptance rate 0\.\d{3}, \d+\.\d\d s, \d+\.\d tokens/s"
    )
    assert re.fullmatch(pattern, record.getMessage()), record.getMessage()


def test_a_call_without_drafts_logs_nothing(caplog):
    target, _ = pair("llama")
    with caplog.at_level(logging.INFO, logger="hf_speculate"):
        target.generate(**ragged_prompts(1), max_new_tokens=3)
    assert caplog.records == []


def test_lens_of_drafts_are_kept_in_order_and_over_runs():
    target, draft = pair("llama", ACCEPTED_ALL)
    stats, reports = SpeculationStats(), []
    target.generate(
        torch.tensor([[5, 6, 7]]),
        assistant_model=draft,
        num_assistant_tokens=2,
        num_assistant_tokens_schedule="heuristic",
        max_new_tokens=30,
        speculation_stats=stats,
        speculation_callback=reports.append,
    )
    assert stats.draft_lens == [report.num_drafted[0] for report in reports]
    assert len(set(stats.draft_lens)) > 1
    assert sum(stats.rounds_by_draft_len.values()) == len(stats.draft_lens)
