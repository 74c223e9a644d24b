"""Test statistics: their counts, their printed form and `speculation_callback`."""

import io
import json
import logging
import re
import sys
from dataclasses import fields

import pytest
import rich
import torch
from transformers import LogitsProcessorList

import hf_speculate
from hf_speculate import RoundReport
from hf_speculate.draft.acceptance_tallies import AcceptanceBound, AcceptanceTallies, DraftCounts
from hf_speculate.engine.observers import PlainSteps, StatsObserver
from hf_speculate.stats import ENOUGH_PLAIN_STEPS, MAX_DRAFT_LENS, MAX_PLAIN_STEPS, SpeculationStats
from hf_speculate.types import (
    CachedDraft,
    DraftNames,
    DraftOut,
    RoundRecord,
    Scored,
    StageSeconds,
    Trimmed,
    Verified,
)
from tests.cases import ACCEPTED_ALL, DRAFT_NOISE, Unchanged, assert_equal_ids, new_pair, pair
from tests.support.tiny import make_model, ragged_prompts


def make_stats(*rounds: tuple[int, int, int]) -> SpeculationStats:
    """Make statistics for rounds given as (drafted, accepted, emitted) tokens."""
    stats = SpeculationStats(verifier="greedy")
    for num_drafted, num_accepted, num_emitted in rounds:
        stats.add_row(num_drafted, num_accepted, num_emitted)
    return stats


def full_stats() -> SpeculationStats:
    """Make statistics with a value in every field."""
    stats = make_stats((3, 3, 4), (3, 1, 2), (0, 0, 1))
    for num in (3, 3, 0):
        stats.num_batch_rounds += 1
        stats.add_draft_len(num)
    stats.prefill_s, stats.draft_s, stats.score_s, stats.verify_s, stats.bookkeeping_s = (
        0.5,
        0.25,
        1.0,
        0.5,
        0.25,
    )
    stats.plain_step_s_by_rows, stats.replaced_steps, stats.rounds_s = {2: [0.5]}, {2: 6}, 2.0
    stats.cache, stats.compiled, stats.fallbacks = (
        "dynamic",
        ["target"],
        ["first [reason]", "a <b> & c"],
    )
    return stats


def test_counts_and_rates_of_rounds_and_positions():
    """Count the first rejected token of a round as verified, and no token after it."""
    stats = make_stats((5, 2, 3), (3, 3, 4), (4, 0, 1), (0, 0, 1), (1, 1, 2))
    assert (stats.num_rounds, stats.num_drafted, stats.num_verified, stats.num_accepted) == (
        5,
        13,
        3 + 3 + 1 + 1,
        6,
    )
    assert stats.drafted_per_position == [4, 3, 3, 2, 1]
    assert stats.verified_per_position == [4, 2, 2, 0, 0]
    assert stats.accepted_per_position == [3, 2, 1, 0, 0]
    assert stats.acceptance_rate == 6 / 13
    assert stats.verified_acceptance_rate == 6 / 8
    assert stats.mean_acceptance_length == 11 / 5
    assert stats.acceptance_rate_per_position == [3 / 4, 2 / 3, 1 / 3, 0.0, 0.0]
    assert stats.verified_acceptance_rate_per_position == [3 / 4, 1.0, 1 / 2]
    # the text ended after these tokens
    stats.add_row(num_drafted=5, num_accepted=2, num_emitted=2, num_verified=2)
    assert stats.verified_per_position == [5, 3, 2, 0, 0]


def test_reset_stats_are_zero_and_readable():
    stats = full_stats()
    stats.reset()
    assert stats == SpeculationStats()
    assert (
        stats.acceptance_rate
        == stats.verified_acceptance_rate
        == stats.mean_acceptance_length
        == 0.0
    )
    assert (stats.tokens_per_s, stats.speedup) == (0.0, None)
    assert "rate" not in str(stats) and str(stats).startswith(
        "no token was decoded after the prompt\n"
    )
    assert stats.summary() == "no verification: no rounds in 0.00 s"


def test_calls_add_up():
    first, second = make_stats((3, 3, 4), (1, 0, 1)), make_stats((4, 1, 2))
    for stats, num in ((first, 3), (second, 4)):
        stats.add_draft_len(num)
        stats.add_plain_step(num / 10, 1 if num == 3 else 4)
        stats.replaced_steps = {1: 1, 2: 1} if num == 3 else {1: 3}
        stats.time_to_first_token_s = num / 4 - 0.5
        stats.score_s, stats.status, stats.compiled = 1.5, num, ["target"]
        stats.fallbacks += ["both", f"only {num}"]
        stats.add_to_row(num - 3, num, 1)
    total = first + second
    assert (total.num_rounds, total.num_drafted, total.num_accepted, total.num_emitted) == (
        3,
        8,
        4,
        7,
    )
    assert total.drafted_per_position == [3, 2, 2, 1]
    assert total.rounds_by_draft_len == {3: 1, 4: 1}
    assert (total.rounds_per_row, total.drafted_per_row, total.accepted_per_row) == (
        [1, 1],
        [3, 4],
        [1, 1],
    )
    assert (total.draft_lens, total.plain_step_s_by_rows) == ([3, 4], {1: [0.3], 4: [0.4]})
    assert (total.replaced_steps, total.time_to_first_token_s) == ({1: 4, 2: 1}, 0.75)
    assert (total.score_s, total.status, total.verifier) == (3.0, 7, "greedy")
    assert (total.compiled, total.fallbacks) == (["target"], ["both", "only 3", "only 4"])
    assert (first + SpeculationStats(verifier="block")).verifier == ""
    assert first.num_rounds == 2


def test_speedup_compares_the_call_with_plain_steps_of_its_rows():
    """Spend 4 + 1 + 1 + 4 s; plain decoding needs the first 4 s and steps with 3, 2 and 1 rows."""
    stats = make_stats((3, 3, 4), (3, 3, 4), (0, 0, 1), (0, 0, 1))
    stats.prefill_s, stats.preparation_s, stats.vocabulary_s, stats.draft_s, stats.score_s = (
        4.0,
        0.75,
        0.25,
        1.0,
        4.0,
    )
    stats.rounds_s, stats.replaced_steps = 5.0, {3: 4, 2: 2, 1: 2}
    assert stats.speedup is None
    assert "not measured (no call of this type has taken a plain step yet)" in stats.headline
    stats.earlier_plain_step_s_by_rows = {3: [9.0, 0.75]}
    assert stats.headline == (
        "about 4.3x the speed of plain decoding "
        "(estimated from only 2 plain steps, 2 of earlier calls)"
    )
    stats.earlier_plain_step_s_by_rows = {}
    stats.add_plain_step(0.75, num_rows=3)
    assert (
        stats.headline
        == "about 1.0x the speed of plain decoding (estimated from only 1 plain step)"
    )
    stats.add_plain_step(2.0, num_rows=3)
    stats.add_plain_step(1.0, num_rows=3)
    stats.add_plain_step(0.5, num_rows=1)
    assert stats.speedup == (4.0 + 4 * 1.0 + 2 * 0.75 + 2 * 0.5) / 10.0


TIMES = (
    "inputs 0.000 s (0%), preparation 0.000 s (0%), vocabulary 0.000 s (0%), "
    "prefill 0.500 s (20%), draft 0.250 s (10%), score 1.000 s (40%), verify 0.500 s (20%), "
    "bookkeeping 0.250 s (10%)"
)


def test_stats_print_readable_text():
    stats = full_stats()
    stats.num_host_syncs, stats.num_user_host_syncs, stats.lock_step = 3, 1, True
    assert str(stats).splitlines() == [
        "about 1.4x the speed of plain decoding (estimated from only 1 plain step)",
        "target forwards: 3 after the prompt, plain decoding 6",
        "mean acceptance length: 2.33 (7 tokens in 3 rounds)",
        "acceptance rate: 0.667 (4 of 6 drafted tokens)",
        "verified acceptance rate: 0.800 (4 of 5 verified tokens)",
        "acceptance rate per position: 1.00 0.50 0.50",
        "tokens per second: 3.5",
        "rounds by draft length: 0:1 3:2",
        f"time by stage: {TIMES}",
        "verifier: greedy",
        "host synchronisations: 3 ours, 1 in user code",
        "compiled: target",
        "rows: moved in lock step",
        "fallback: first [reason]",
        "fallback: a <b> & c",
    ]
    assert stats.summary() == (
        "about 1.4x the speed of plain decoding (estimated from only 1 plain step); greedy "
        "verification: "
        "7 tokens in 3 rounds, 3 target forwards (plain 6), mean acceptance length 2.33, "
        "acceptance rate 0.667, "
        "2.50 s, 3.5 tokens/s"
    )


def test_tables_escape_markup():
    out, page = io.StringIO(), full_stats()._repr_mimebundle_([], [])["text/html"]  # in a notebook
    rich.print(full_stats(), file=out)
    assert "2.33 (7 tokens in 3 rounds)" in out.getvalue() and "2.33 (7 tokens in 3 rounds)" in page
    assert "first [reason]" in out.getvalue() and "a &lt;b&gt; &amp; c" in page


def generate(batch_size: int = 3, noise: float = DRAFT_NOISE, **options) -> torch.Tensor:
    target, draft = pair("llama", noise)
    options = {"max_new_tokens": 14, "num_assistant_tokens": 3, **options}
    return target.generate(**ragged_prompts(batch_size, seed=1), assistant_model=draft, **options)


def test_call_with_a_perfect_draft_is_counted_exactly():
    """Decode twelve tokens after the first, in three rounds of three accepted tokens plus one."""
    stats = hf_speculate.SpeculationStats()
    for batch_size in (3, 2):  # each call starts at zero
        generate(batch_size, ACCEPTED_ALL, max_new_tokens=13, speculation_stats=stats)
    assert (stats.num_batch_rounds, stats.num_rounds) == (3, 2 * 3)
    assert stats.num_drafted == stats.num_verified == stats.num_accepted == 2 * 9
    assert (stats.num_emitted, stats.mean_acceptance_length, stats.status) == (2 * 12, 4.0, 0)
    assert stats.acceptance_rate_per_position == [1.0] * 3
    assert min(stats.seconds_by_stage.values()) > 0


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("is_lock_step", [False, True])
def test_verified_tokens_in_lock_step_are_those_reached(is_lock_step):
    stats, reports = SpeculationStats(), []
    processors = LogitsProcessorList([Unchanged()] if is_lock_step else [])
    generate(
        speculation_stats=stats, speculation_callback=reports.append, logits_processor=processors
    )
    assert stats.lock_step == is_lock_step
    num_verified = 0
    for report in reports:
        # no row is read past its first rejection
        max_verified = 1 + min(report.num_accepted) if is_lock_step else 3
        rows = zip(report.num_drafted, report.num_accepted, strict=True)
        num_verified += sum(
            min(num_drafted, num_accepted + 1, max_verified) for num_drafted, num_accepted in rows
        )
    assert stats.num_verified == num_verified
    assert stats.num_accepted < stats.num_verified < stats.num_drafted


NUM_LONG = 40  # new tokens: enough that a plain step is cheap in comparison


def long_call(target, draft, batch_size=1, **options):
    """Return the statistics and new tokens of a call with constant K."""
    stats = SpeculationStats()
    options = {"num_assistant_tokens": 3, "max_new_tokens": NUM_LONG, **options}
    inputs = ragged_prompts(batch_size, seed=1)
    output = target.generate(**inputs, assistant_model=draft, speculation_stats=stats, **options)
    return stats, output


def test_first_call_of_a_type_measures_a_plain_step():
    target, draft = new_pair()
    expected = target.generate(**ragged_prompts(2, seed=1), max_new_tokens=NUM_LONG)
    for batch_size, first in ((1, 0), (1, 3), (2, 0), (2, 3), (1, 3)):
        stats, _ = long_call(target, draft, batch_size)
        assert stats.draft_lens[:2] == [first, 3]
        assert f"{stats.speedup:.1f}x the speed" in stats.headline
    assert "of earlier calls" in stats.headline
    assert_equal_ids(long_call(target, draft, 2, num_assistant_tokens=2)[1], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 24},  # too short for a plain step
        {"do_sample": True, "seed": 1},  # the text depends on every draft length
        {"verifier": "typical"},
    ],
)
def test_constant_draft_length_stays_constant(options):
    stats, _ = long_call(*new_pair(), **options)
    assert 0 not in stats.draft_lens[:-1]


def test_single_slow_plain_step_counts_as_a_round_with_drafts():
    stats = SpeculationStats()
    observer = StatsObserver(stats)
    for draft_len, score_s in ((0, 9.0), (2, 2.0), (2, 1.5)):
        observer.on_round(round_record(draft_len, score_s))
    observer.on_end(4, StageSeconds())
    assert stats.plain_step_s_by_rows == {1: [1.5]}


def test_plain_steps_of_the_newest_types_are_kept():
    steps = PlainSteps.of(make_model("llama"))
    for number in range(70):
        steps.add(number, {1: [float(number)] * 20})
    assert steps.get(0) == {} and steps.get(69) == {1: [69.0] * ENOUGH_PLAIN_STEPS}


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "verifier": "coupled", "seed": 1}])
def test_call_without_draft_source_says_so(options):
    stats = full_stats()
    generate_alone(speculation_stats=stats, **options)
    assert str(stats).startswith(stats.headline) and stats.summary() == stats.headline
    assert stats.headline == "plain decoding: no draft source"
    assert "acceptance" not in str(stats) and "0 of 0" not in str(stats)


def test_source_that_drafted_nothing_shows_no_rates():
    stats = SpeculationStats()
    stats.add_row(0, 0, 1)
    assert "acceptance rate: - (nothing was drafted)" in str(stats)
    assert "0.000 (0 of 0" not in str(stats) and "nothing was drafted" in stats.summary()


def generate_alone(**options):
    return new_pair()[0].generate(**ragged_prompts(1, seed=1), max_new_tokens=8, **options)


def round_record(draft_len, score_s):
    """Make a round of one row with accepted drafts."""
    ids = torch.zeros(1, draft_len, dtype=torch.int64)
    lens = torch.full((1,), draft_len, dtype=torch.int32)
    new_ids, num_drafted = [[0] * (draft_len + 1)], [draft_len]
    verified = Verified(ids, new_ids, num_drafted, num_drafted, 0, torch.zeros(1, 1, 1))
    return RoundRecord(
        num_round=1,
        row_ids=[0],
        was_live=[True],
        is_served=[True],
        num_model_tokens=draft_len,
        num_fed=0,
        num_left=[5],
        draft=DraftOut(ids, lens, None, None),
        scored=Scored(torch.zeros(1, 1, 1)),
        verified=verified,
        trimmed=Trimmed([draft_len + 1], [False], [False], [draft_len + 1]),
        seconds=StageSeconds(draft=0.5, score=score_s),
        total_s=score_s,
    )


def test_record_names_the_source_of_each_row():
    record = round_record(2, 0.1)._replace(names=DraftNames("model", "lookup"))
    own, free = (record.draft._replace(cached=CachedDraft(1, [is_own])) for is_own in (True, False))
    plain = record.verified._replace(num_drafted=[0])
    changes = ({}, {"draft": own}, {"draft": free}, {"num_model_tokens": 0}, {"verified": plain})
    names = [record._replace(**change).drafted_by(0) for change in changes]
    assert names == ["model", "model", "lookup", "lookup", ""]


def test_dict_of_stats_survives_json():
    stats = full_stats()
    values = stats.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert {entry.name for entry in fields(stats)} < set(values)
    assert values["rounds_by_draft_len"] == {"0": 1, "3": 2}
    assert values["plain_step_s_by_rows"] == {"2": [0.5]}
    assert (values["num_target_forwards"], values["num_plain_forwards"]) == (3, 6)
    for name in (
        "speedup",
        "acceptance_rate",
        "acceptance_rate_per_position",
        "mean_acceptance_length",
        "total_s",
    ):
        assert values[name] == getattr(stats, name)
    values["fallbacks"].append("more")
    assert stats.fallbacks == ["first [reason]", "a <b> & c"]


def test_lens_and_plain_steps_in_order_stay_bounded():
    stats = SpeculationStats()
    for number in range(MAX_DRAFT_LENS + 10):
        stats.add_draft_len(number % 3)
        stats.add_plain_step(1.0)
    assert (len(stats.draft_lens), stats.draft_lens[:4]) == (MAX_DRAFT_LENS, [0, 1, 2, 0])
    assert sum(stats.rounds_by_draft_len.values()) == MAX_DRAFT_LENS + 10
    assert {num: len(steps) for num, steps in stats.plain_step_s_by_rows.items()} == {
        1: MAX_PLAIN_STEPS
    }


def test_dataframe_has_one_row_per_call():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.concat(
        [full_stats().to_pandas(), make_stats((1, 1, 2)).to_pandas()], ignore_index=True
    )
    assert list(frame["num_emitted"]) == [7, 2]
    assert frame["acceptance_rate_3"].isna().tolist() == [False, True]
    assert frame["fallbacks"][0] == "first [reason]; a <b> & c"
    assert not any(isinstance(cell, list | dict) for cell in frame.iloc[0])


def test_plot_has_three_labelled_panels():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    stats = full_stats()
    figure = stats.plot()
    assert figure.get_suptitle() == stats.headline
    figure.draw_without_rendering()  # labels the axes
    acceptance, lens, seconds = figure.axes
    assert [bar.get_height() for bar in acceptance.patches] == stats.acceptance_rate_per_position
    assert list(lens.lines[0].get_ydata()) == stats.draft_lens
    assert [bar.get_width() for bar in seconds.patches] == list(stats.seconds_by_stage.values())
    assert [text.get_text() for text in seconds.texts] == [
        "0%",
        "0%",
        "0%",
        "20%",
        "10%",
        "40%",
        "20%",
        "10%",
    ]
    stats.num_batch_rounds = 50  # more rounds than records are kept
    assert stats.plot().axes[1].get_xlabel() == "round, the first 3 of 50"
    assert SpeculationStats().plot().axes[0].texts[0].get_text() == "nothing was drafted"


@pytest.mark.parametrize(("library", "ask"), [("matplotlib", "plot"), ("pandas", "to_pandas")])
def test_missing_library_error_names_the_extra(monkeypatch, library, ask):
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        hf_speculate.MissingExtraError,
        match=rf'^{library} must .*; run pip install "hf-speculate\[plot\]"',
    ):
        getattr(full_stats(), ask)()


def test_low_acceptance_is_reported_once():
    tallies, draft, bound = AcceptanceTallies(), make_model("llama"), AcceptanceBound(0.02, 64)
    calls = [(63, 0), (37, 1), (100, 10), (1000, 0), (100, 90), (9000, 0)]
    reported = [tallies.add(draft, DraftCounts(*counts), bound) for counts in calls]
    assert reported == [False, True, False, False, False, False]


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logits_processor": LogitsProcessorList([Unchanged()])},
        {"prompt_lookup_num_tokens": 4, "eos_token_id": 5},
        {"do_sample": True, "seed": 1, "num_assistant_tokens_schedule": "heuristic"},
    ],
)
def test_callback_gets_every_round_as_counted(options):
    reports: list[RoundReport] = []
    stats = SpeculationStats()
    generate(speculation_callback=reports.append, speculation_stats=stats, **options)
    assert len(stats.draft_lens) == len(reports)
    assert [report.num_round for report in reports] == list(range(1, stats.num_batch_rounds + 1))
    assert sum(len(report.row_ids) for report in reports) == stats.num_rounds
    for name in ("num_drafted", "num_accepted", "num_emitted"):
        assert sum(sum(getattr(report, name)) for report in reports) == getattr(stats, name) > 0
    assert all(type(num) is int for report in reports for values in report[1:5] for num in values)
    assert all(
        report.draft_s > 0 and report.score_s > 0 and report.other_s > 0 for report in reports
    )
    assert all(
        report.round_s == report.draft_s + report.score_s + report.other_s for report in reports
    )
    assert sum(report.score_s for report in reports) == pytest.approx(stats.score_s)
    run_s = stats.total_s - stats.inputs_s - stats.preparation_s
    assert reports[-1].total_s <= run_s  # work after the last round is left out
    assert options or reports[-1].total_s == pytest.approx(run_s, rel=0.05)


def test_callback_names_rows_by_output_index():
    reports, quiet, stats = [], SpeculationStats(), SpeculationStats()
    options = {"eos_token_id": 5, "max_new_tokens": 60}
    generate(**options)  # the first call of a type measures a plain step
    text = generate(speculation_callback=reports.append, **options, speculation_stats=stats)
    assert_equal_ids(generate(**options, speculation_stats=quiet), text)
    assert (quiet.num_host_syncs, quiet.num_user_host_syncs) == (
        stats.num_host_syncs,
        stats.num_user_host_syncs,
    )
    ends = [(row[12:] == 5).nonzero()[:1, 0] for row in text]
    emitted = [1, 1, 1]  # the prompt's token comes before the first round
    for report in reports:
        for row, num in zip(report.row_ids, report.num_emitted, strict=True):
            emitted[row] += num
    assert emitted == [int(end) + 1 if len(end) else 60 for end in ends]
    assert len({report.row_ids for report in reports}) > 1  # some rows have left the batch


def test_call_with_drafts_logs_one_line_at_info(caplog):
    reports: list[RoundReport] = []
    with caplog.at_level(logging.INFO, logger="hf_speculate"):
        pair("llama")[0].generate(
            **ragged_prompts(1), max_new_tokens=3, speculation_callback=reports.append
        )
        assert (caplog.records, reports) == ([], [])
        generate()
    (record,) = [record for record in caplog.records if record.name == "hf_speculate"]
    assert record.levelno == logging.INFO
    assert re.search(
        r"greedy verification: 39 tokens in \d+ rounds, .* \d+\.\d tokens/s$", record.getMessage()
    )
