"""The benchmark of real models: what its cells hold, how they are measured, and that finished ones are kept."""

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FEW = ["--pairs", "2", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def scripts() -> Iterator[ModuleType]:
    """`real_models.py`, which finds its neighbours by name."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("real_models")
    sys.path[:] = before


def test_the_cells_hold_every_pair_of_choices_within_the_time(scripts: ModuleType) -> None:
    cells = scripts.CELLS
    assert len(set(cells)) == len(cells) <= 40
    assert sum(scripts.estimate_s(cell, 128, 8) for cell in cells) <= 90 * 60
    choices = [(cell[:2], *cell[2:]) for cell in cells]  # a source is one of its target
    for first, second in itertools.combinations(range(len(choices[0])), 2):
        values = itertools.product(*({choice[at] for choice in choices} for at in (first, second)))
        assert set(values) == {(choice[first], choice[second]) for choice in choices}
    for name in scripts.NAMES:  # drafts that cannot help meet every choice with each target
        useless = [cell for cell in cells if cell.target == name and cell.is_useless]
        assert [len({cell[at] for cell in useless}) for at in range(1, 6)] == [2] * 5


def test_an_interval_holds_the_mean_and_narrows_with_more_values(scripts: ModuleType) -> None:
    intervals = importlib.import_module("_intervals")
    assert intervals.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    few, many = (intervals.bootstrap_interval([0.9, 1.0, 1.1, 1.2] * num) for num in (2, 50))
    mean = intervals.geometric_mean([0.9, 1.0, 1.1, 1.2])
    assert few[0] < many[0] < mean < many[1] < few[1]
    summary = intervals.ratio_summary([2.0, 2.0], [1.0, 1.0])
    assert list(summary.values()) == pytest.approx([2.0] * len(summary))


@pytest.fixture
def load(scripts: ModuleType) -> Any:
    """The bundled pair in place of the real models, drafts with early exits and heads left out."""
    loaded: list[str] = []
    folders = {"smollm2": "target", "gemma3": "draft"}

    def load_bundled(name: str, dtype: str) -> Any:
        loaded.append(name)
        folder = importlib.import_module("_real_models").load_folder(
            BENCHMARKS.parent / "examples" / "pair" / folders[name], dtype
        )
        folder.tokenizer.chat_template = "{{ messages[0]['content'] }}"
        return folder

    load_bundled.loaded = loaded
    return load_bundled


@pytest.mark.fallback("gains nothing")  # the pair's draft is a target too
def test_cells_are_measured_once_and_again_after_a_change(
    scripts: ModuleType, load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*FEW, "--results", str(tmp_path), "--lock", str(tmp_path / "lock")]
    assert scripts.main(["--only", "foreign", "float32", *words], load) == 0
    assert load.loaded == ["smollm2", "gemma3", "gemma3", "smollm2"]
    printed = capsys.readouterr().out
    assert "Geometric mean of the 2 cells of useless drafts" in printed
    batch, alone = json.loads((tmp_path / "real_models.json").read_text())["rows"]
    assert (alone["batch_size"], batch["batch_size"]) == (1, 8)
    assert alone["rival"].startswith("transformers") and batch["rival"] is None
    assert alone["checked"]["ours, adaptive"] == "2 of 2 rows equal"
    assert batch["checked"]["ours, adaptive"] == "16 of 16 rows equal"
    assert all(len(values) == 2 for values in alone["seconds"].values())
    assert alone["over_plain"]["low"] <= alone["over_plain"]["mean"] <= alone["over_plain"]["high"]
    assert alone["first"]["vocabulary_s"] > 0
    assert scripts.main(["--only", "foreign", *words, "--minutes", "0"], load) == 0  # the others have no time
    assert scripts.main(["--only", "foreign", "float32", *words], load) == 0
    assert len(load.loaded) == 4
    assert scripts.main(["--cells", "1", *words, "--pairs", "3"], load) == 0
    assert len(load.loaded) == 6
    rows = json.loads((tmp_path / "real_models.json").read_text())["rows"]
    assert {row["batch_size"]: row["settings"]["pairs"] for row in rows} == {8: 3, 1: 2}


def test_a_wrong_text_is_a_fault_in_float32_and_a_near_tie_is_none_in_bfloat16(scripts: ModuleType) -> None:
    checked = {"ours, adaptive": "wrong: 1 of 2 rows equal, 1 differ at a near-tie"}
    assert scripts.faults_of({"checked": checked}) == ["ours, adaptive: " + checked["ours, adaptive"]]
    assert scripts.faults_of({"checked": {"ours, adaptive": "1 of 2 rows equal, 1 differ at a near-tie"}}) == []


def test_the_list_measures_nothing(scripts: ModuleType, load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.main(["--list", "--only", "gemma3", "lookup"], load) == 0
    assert "16 " in (printed := capsys.readouterr().out) and "2 cells" in printed
    assert load.loaded == []
