"""Every pair of two choices of a call: the rows of `tests/pairs.json` over the axes of `tests/cases.py`."""

from typing import Any

import pytest
import torch

import hf_speculate
from tests.cases import AXES, EXCLUDED, assert_equal_ids
from tests.pairs import Row, pairs_in, pairs_of, read
from tests.random_calls import Case, cache_of, draft_options, options_of, prompts_of, target_of
from tests.random_search import eos_ids, run_case
from tests.tiny import KINDS, SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

ROWS = read()
DRAFTED = 3


def case_of(row: Row) -> Case:
    """The call of a row."""
    samples = row["verifier"] not in ("greedy", "typical, argmax")
    drafter = {"argmax": "model"}.get(row["drafter"], row["drafter"])
    warpers = ("temperature", "top_k") if samples else ("min_new_tokens",)
    processors = {"pure": ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens"), "warpers": warpers}
    return Case(
        family=row["kind"],
        prompt_seed=1 + sum(map(ord, "".join(row.values()))),
        batch_size=int(row["batch"]),
        padding=row["padding"],
        max_new_tokens=14,
        num_turns=2 if row["outputs"] == "passed cache" else 1,
        passed="with config" if row["outputs"] == "passed cache" else "no",
        cache=row["cache"],
        drafter=drafter,
        num_assistant_tokens=DRAFTED,
        samples=samples,
        verifier=row["verifier"].partition(",")[0] if row["verifier"] not in ("greedy", "coupled") else "",
        draft_sampling="argmax" if row["drafter"] == "argmax" else "",
        ends={"eos": (6,), "two eos": (4, 9)}.get(row["stops"], ()),
        own_processor=row["processors"] == "custom",
        own_criterion=row["stops"] == "criterion",
        processors=processors.get(row["processors"], ()),
        outputs={"scores": ("scores", "logits"), "states": ("hidden_states",)}.get(row["outputs"], ()),
    )


def id_of(row: Row) -> str:
    return ", ".join(row.values())


def decode(case: Case, row: int | None = None, **more: Any) -> Any:
    """Ids of a speculative call with a seed per row, or of one row of it alone."""
    model, inputs = target_of(case.family)[0], prompts_of(case)
    options = options_of(case, eos_ids(case, inputs)) | draft_options(case) | more
    if case.passed != "no":
        options["past_key_values"] = cache_of(case) if row is None else None
    seeds = [case.prompt_seed + index for index in range(case.batch_size)]
    if row is not None:
        inputs = {name: value[row : row + 1] for name, value in inputs.items()}
    return model.generate(**inputs, **options | {"seed": seeds if row is None else seeds[row]}).sequences


@pytest.mark.parametrize("row", [row for row in ROWS if row["verifier"] in ("greedy", "coupled")], ids=id_of)
def test_ids_scores_states_and_cache_are_those_of_plain_generate(row: Row) -> None:
    """In float64, where the row asks for them. The plain twin of coupled verification is itself without a draft."""
    result = run_case(case_of(row))
    assert result.kind == "equal", result


@pytest.mark.parametrize("row", [row for row in ROWS if row["verifier"] not in ("greedy", "coupled")], ids=id_of)
def test_a_row_of_a_batch_is_drawn_as_alone_and_every_token_is_counted(row: Row) -> None:
    case, stats = case_of(row), hf_speculate.SpeculationStats()
    ours = decode(case, speculation_stats=stats)
    if stats.lock_step:  # rounds end where the slowest row ends, so that a row alone takes others
        assert torch.equal(ours, decode(case))
    else:
        for index in {0, case.batch_size - 1}:
            (alone,) = decode(case, index)
            assert torch.equal(ours[index, : len(alone)], alone)
    assert 0 <= stats.num_accepted <= stats.num_verified <= stats.num_drafted
    assert stats.num_drafted == sum(stats.drafted_per_position)
    assert stats.num_accepted == sum(stats.accepted_per_position)
    assert stats.num_accepted <= stats.num_emitted <= stats.num_accepted + stats.num_rounds
    assert sum(stats.rounds_by_draft_len.values()) == stats.num_batch_rounds


def test_the_rows_hold_every_pair_that_is_not_refused() -> None:
    held = set().union(*map(pairs_in, ROWS))
    assert held == pairs_of(AXES, EXCLUDED), "run python -m tests.pairs"


def test_a_row_without_tokens_follows_a_draft_model_that_missed_several() -> None:
    """Rows that copied made the draft model lag behind by more tokens than the row without a prompt has."""
    case = Case(family="ctrl", batch_size=3, padding="empty row", drafter="model and lookup", noise=10.0)
    assert run_case(case).kind == "equal"


@pytest.mark.parametrize("pair", EXCLUDED, ids=str)
def test_what_the_rows_leave_out_is_refused(pair: Any) -> None:
    plainest = {name: values[0] for name, values in AXES.items()} | {"batch": "2" if "padding" in pair[0] else "1"}
    assert run_case(case_of({**plainest, **dict(pair)})).kind not in ("equal", "tie")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_of_many_models_is_plain(kind: str) -> None:
    """2,016 sequences of the six kinds together; the targets have different weights."""
    for seed in range(6):
        target = hf_speculate.enable(make_model(kind, seed=seed))
        draft = noisy_copy(target, 0.02, seed=seed + 1)
        for batch_size in (1, 2, 3, 8):
            inputs = ragged_prompts(batch_size, seed=seed, max_len=2 * SLIDING_WINDOW)
            options = {**inputs, "max_new_tokens": 3 * SLIDING_WINDOW}
            plain = target.generate(**options)
            for num in (1, 3, 5, 8):
                assert_equal_ids(plain, target.generate(**options, assistant_model=draft, num_assistant_tokens=num))
