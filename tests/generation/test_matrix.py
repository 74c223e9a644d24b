"""Test every pair of option values in a call.

The rows are in `tests/pairs.json`; `tests/cases.py` defines their axes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import hf_speculate
from tests.cases import AXES, EXCLUDED, SERVED_NOW, assert_equal_ids
from tests.compatibility import pinned_version
from tests.pairs import Row, case_of, decode, has_plain_twin, pairs_in, pairs_of, read
from tests.random_calls import Case, draw_case
from tests.random_search import run_case
from tests.support.tiny import SLIDING_WINDOW, TINY_FAMILIES, make_model, noisy_copy, ragged_prompts

ROWS = read()


def rows_where(keep: Callable[[Row], bool]) -> pytest.MarkDecorator:
    """Parametrize a test with the rows that meet a condition."""
    rows = [(row, seed) for row, seed in ROWS if keep(row)]
    return pytest.mark.parametrize(
        ("row", "seed"), rows, ids=[", ".join(row.values()) for row, _ in rows]
    )


def assert_accepts_and_rejects(num_accepted: int, num_rejected: int) -> None:
    """Assert that some tokens were accepted and some rejected.

    The seeds are chosen so that both occur. Another version of transformers may draw other weights.
    """
    if transformers.__version__ == pinned_version():
        assert num_accepted > 0 and num_rejected > 0, "run python -m tests.pairs"


@pytest.mark.fallback("lock step", "because of candidate_generator")
@rows_where(has_plain_twin)
def test_ids_scores_states_and_cache_equal_plain_generate(row: Row, seed: int) -> None:
    """Decode in float64 if the row says so."""
    result = run_case(case_of(row, seed))
    assert result.outcome == "equal", result
    assert_accepts_and_rejects(result.num_accepted, result.num_rejected)


@pytest.mark.fallback("lock step", "rejection in place of block", "because of candidate_generator")
@rows_where(lambda row: not has_plain_twin(row))
def test_row_of_a_batch_is_drawn_as_alone(row: Row, seed: int) -> None:
    case, stats = case_of(row, seed), hf_speculate.SpeculationStats()
    ours = decode(case, speculation_stats=stats)
    if stats.lock_step:  # a round ends with its slowest row, so a single row has other rounds
        assert torch.equal(ours, decode(case))
    else:
        for index in {0, case.batch_size - 1}:
            (alone,) = decode(case, index)
            assert torch.equal(ours[index, : len(alone)], alone)
    assert_accepts_and_rejects(stats.num_accepted, stats.num_verified - stats.num_accepted)
    assert 0 <= stats.num_accepted <= stats.num_verified <= stats.num_drafted
    assert stats.num_drafted == sum(stats.drafted_per_position)
    assert stats.num_accepted == sum(stats.accepted_per_position)
    assert stats.num_accepted <= stats.num_emitted <= stats.num_accepted + stats.num_rounds
    assert sum(stats.rounds_by_draft_len.values()) == stats.num_batch_rounds


def test_rows_hold_every_supported_pair() -> None:
    covered = set().union(*(pairs_in(row) for row, _ in ROWS))
    assert covered == pairs_of(AXES, EXCLUDED), "run python -m tests.pairs"


def test_empty_row_follows_a_draft_model_that_lags_behind() -> None:
    """Let rows copy, so that the draft model lags by more tokens than the empty row has."""
    case = Case(
        family="ctrl", batch_size=3, padding="empty row", drafter="model and lookup", noise=10.0
    )
    result = run_case(case)
    assert result.outcome == "equal", result


@pytest.mark.parametrize("pair", [pair for pair in EXCLUDED if pair not in SERVED_NOW], ids=str)
def test_pairs_left_out_of_the_rows_are_refused(pair: Any) -> None:
    plainest = {name: values[0] for name, values in AXES.items()} | {
        "batch": "2" if "padding" in pair[0] else "1"
    }
    assert run_case(case_of({**plainest, **dict(pair)}, seed=1)).outcome not in ("equal", "tie")


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_greedy_text_of_many_models_equals_plain(family: str) -> None:
    """Decode 2,016 sequences with six kinds of models; the targets differ in their weights."""
    for seed in range(6):
        target = hf_speculate.enable(make_model(family, seed=seed))
        draft = noisy_copy(target, 0.02, seed=seed + 1)
        for batch_size in (1, 2, 3, 8):
            inputs = ragged_prompts(batch_size, seed=seed, max_len=2 * SLIDING_WINDOW)
            options = {**inputs, "max_new_tokens": 3 * SLIDING_WINDOW}
            plain = target.generate(**options)
            for num in (1, 3, 5, 8):
                assert_equal_ids(
                    plain,
                    target.generate(**options, assistant_model=draft, num_assistant_tokens=num),
                )


FAMILIES = ("llama", "mistral_window", "gpt2")
# Plain decoding first reads the whole text again behind a cache of the same text.
READS_IN_PIECES = Version(transformers.__version__) >= Version("5.21")


@pytest.mark.fallback("lock step", "because a draft model as large as its target")
@pytest.mark.parametrize(
    "numbers",
    [*(range(at, at + 4) for at in (0, 4, 8)), pytest.param(range(12, 60), marks=pytest.mark.slow)],
)
def test_text_scores_and_cache_of_every_turn_equal_plain(numbers):
    outcomes: Counter[str] = Counter()
    for number in numbers:
        case = draw_case(7, number, FAMILIES)
        cache = "preallocated" if case.cache == "static" else case.cache
        chat = replace(
            case,
            num_turns=3,
            passed="with config",
            cache=cache,
            embeds=False,
            num_return_sequences=1,
        )
        chat = chat if READS_IN_PIECES else replace(chat, prefill_chunk_size=0)
        result = run_case(chat)
        assert result.outcome in ("equal", "refused", "both fail"), (chat, result)
        outcomes[result.outcome] += 1
    assert outcomes["equal"] >= 0.7 * len(numbers)
