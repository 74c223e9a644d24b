"""Choose rows that contain every pair of values of two axes; `python -m tests.pairs` writes them.

Run it again after adding a value or an axis. Existing rows stay, and rows are added for missing
pairs; from an empty list, all rows are chosen anew. The seed of a row is the first one whose
prompts lead to an accepted and a rejected token, so the call rolls back the drafter and the cache.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from tests.cases import AXES, EXCLUDED, VERIFIERS, Pair
from tests.random_calls import Case, cache_of, draft_options, options_of, prompts_of, target_of
from tests.random_search import eos_ids, run_case

ROWS = Path(__file__).with_name("pairs.json")
NUM_TRIES = 60  # random rows for each chosen row
NUM_SEEDS = 200  # seeds tried for each row
NUM_DRAFTED = 3  # tokens per round
Row = dict[str, str]


def pairs_of(axes: Mapping[str, Sequence[str]], excluded: Mapping[Pair, str]) -> set[Pair]:
    """Return every required pair."""
    pairs = {
        ((axis, value), (later_axis, another))
        for axis, later_axis in itertools.combinations(axes, 2)
        for value in axes[axis]
        for another in axes[later_axis]
    }
    return pairs - set(excluded)


def pairs_in(row: Row) -> set[Pair]:
    """Return the pairs that one row contains."""
    return set(itertools.combinations(row.items(), 2))


def cover(
    axes: Mapping[str, Sequence[str]],
    excluded: Mapping[Pair, str],
    seed: int = 0,
    kept: Sequence[Row] = (),
) -> list[Row]:
    """Add rows to `kept` for all required pairs, taking the best of some random rows each time."""
    draw, rows = random.Random(seed), list(kept)
    missing = pairs_of(axes, excluded).difference(*map(pairs_in, rows))
    while missing:
        start = dict(draw.choice(sorted(missing)))
        tried = [
            row for _ in range(NUM_TRIES) if (row := _filled(axes, excluded, start, missing, draw))
        ]
        if not tried:
            raise ValueError(f"no row holds {start}: exclude it, or exclude fewer pairs beside it")
        best = max(tried, key=lambda row: len(pairs_in(row) & missing))
        missing -= pairs_in(best)
        rows.append(best)
    return rows


def _filled(
    axes: Mapping[str, Sequence[str]],
    excluded: Mapping[Pair, str],
    row: Row,
    missing: set[Pair],
    draw: random.Random,
) -> Row | None:
    """Fill all axes of the row with the values that add the most missing pairs.

    Returns:
        The row, or None if every value of an axis is excluded.
    """
    for name in draw.sample(sorted(axes.keys() - row.keys()), len(axes) - len(row)):
        rows = []
        for value in draw.sample(axes[name], len(axes[name])):
            longer = {
                axis: {**row, name: value}[axis] for axis in axes if axis in row or axis == name
            }
            if not pairs_in(longer) & excluded.keys():
                rows.append(longer)
        if not rows:
            return None
        row = max(rows, key=lambda one: len(pairs_in(one) & missing))
    return row


def case_of(row: Row, seed: int) -> Case:
    """Return the call for a row, with a seed for its prompts and its sampling."""
    samples = VERIFIERS[row["verifier"]]["do_sample"]
    drafter = {"argmax": "model"}.get(row["drafter"], row["drafter"])
    warpers = ("temperature", "top_k") if samples else ("min_new_tokens",)
    processors = {
        "pure": ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens"),
        "warpers": warpers,
    }
    return Case(
        family=row["family"],
        prompt_seed=seed,
        batch_size=int(row["batch"]),
        padding=row["padding"],
        max_new_tokens=14,
        num_turns=2 if row["outputs"] == "passed cache" else 1,
        passed="with config" if row["outputs"] == "passed cache" else "no",
        cache=row["cache"],
        drafter=drafter,
        num_assistant_tokens=NUM_DRAFTED,
        samples=samples,
        verifier=row["verifier"].partition(",")[0]
        if row["verifier"] not in ("greedy", "coupled")
        else "",
        draft_sampling="argmax" if row["drafter"] == "argmax" else "",
        ends={"eos": (6,), "two eos": (4, 9)}.get(row["stops"], ()),
        own_processor=row["processors"] == "custom",
        has_grammar=row["processors"] == "grammar",
        own_criterion=row["stops"] == "criterion",
        processors=processors.get(row["processors"], ()),
        outputs={"scores": ("scores", "logits"), "states": ("hidden_states",)}.get(
            row["outputs"], ()
        ),
    )


def has_plain_twin(row: Row) -> bool:
    """Return True if plain decoding gives the text of the row.

    For coupled verification, plain decoding means coupled decoding without a draft.
    """
    return row["verifier"] in ("greedy", "coupled")


def decode(case: Case, row: int | None = None, **more: Any) -> Any:
    """Return the ids of a speculative call with a seed per row, or of a single row."""
    model, inputs = target_of(case.family)[0], prompts_of(case)
    options = options_of(case, eos_ids(case, inputs)) | draft_options(case) | more
    if case.passed != "no":
        options[CACHE_NAME] = cache_of(case) if row is None else None
    seeds = [case.prompt_seed + index for index in range(case.batch_size)]
    if row is not None:
        inputs = {name: value[row : row + 1] for name, value in inputs.items()}
    return model.generate(
        **inputs, **options | {"seed": seeds if row is None else seeds[row]}
    ).sequences


def find_seed(row: Row) -> int:
    """Return the first seed with accepted and rejected tokens."""
    for seed in range(NUM_SEEDS):
        if all(_count(row, case_of(row, seed))):
            return seed
    raise ValueError(f"no seed below {NUM_SEEDS} makes {row} accept a drafted token and reject one")


def _count(row: Row, case: Case) -> tuple[int, int]:
    """Count the accepted and the rejected draft tokens in the call for a row."""
    if has_plain_twin(row):
        result = run_case(case)
        return result.num_accepted, result.num_rejected
    decode(case, speculation_stats=(stats := hf_speculate.SpeculationStats()))
    return stats.num_accepted, stats.num_verified - stats.num_accepted


def read() -> list[tuple[Row, int]]:
    """Read the rows of the file, each with its seed."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    return [(row, row.pop("seed")) for row in rows]


def main() -> None:
    torch.set_num_threads(1)
    required = pairs_of(AXES, EXCLUDED)
    kept = [row for row, _ in read() if pairs_in(row) <= required]
    rows = min((cover(AXES, EXCLUDED, seed, kept) for seed in range(20)), key=len)
    lines = ",\n".join(json.dumps({**row, "seed": find_seed(row)}) for row in rows)
    ROWS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"wrote {len(rows)} rows")


if __name__ == "__main__":
    main()
