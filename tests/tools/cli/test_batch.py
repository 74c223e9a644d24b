"""Test `hf-speculate batch` on a tiny pair, and the progress that it prints."""

import io
import itertools
import re

import pytest
from rich.console import Console

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.decoding import Run
from hf_speculate.tools.bench.methods import Method
from hf_speculate.tools.cli.console import ProgressNotes
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.cli.measuring import progress
from hf_speculate.tools.dataset.row_decoder import RowDecoder
from tests.tools.dataset.common import (
    batch_words,
    ends_of,
    plain_results,
    prompts,
    results_in,
    write_prompts,
)

TEXTS = prompts(6)


def test_texts_equal_plain_and_remarks_go_to_stderr(folder, tmp_path, capsys):
    ids, output = write_prompts(tmp_path / "prompts.jsonl", TEXTS), tmp_path / "out.jsonl"
    assert main(batch_words(folder, output, "--ordered", "-k", "3")) == 0
    expected = plain_results(folder / "target", TEXTS)
    assert {key: ends_of(line) for key, line in results_in(output).items()} == dict(
        zip(ids, expected, strict=True)
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert f"6 rows in {output}; {sum(num for _, num, _ in expected)} tokens in" in " ".join(
        err.split()
    )


@pytest.mark.parametrize("num_finished", [0, 1])
def test_interrupted_run_names_the_finished_rows(
    folder, tmp_path, capsys, monkeypatch, num_finished
):
    write_prompts(tmp_path / "prompts.jsonl", TEXTS)
    output, decode_all = tmp_path / "out.jsonl", RowDecoder.decode_all

    def interrupted(*arguments):
        yield from itertools.islice(decode_all(*arguments), num_finished)
        raise KeyboardInterrupt

    monkeypatch.setattr(RowDecoder, "decode_all", interrupted)
    assert main(batch_words(folder, output)) == 130
    words = f"finished rows are in {output}" if num_finished else "no row was finished"
    assert (
        f"interrupted: {words}; run the same command to resume"
        in capsys.readouterr().err.replace("\n", "")
    )
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"prompts.jsonl", *(["out.jsonl", "out.jsonl.run"] if num_finished else [])}


def test_file_of_the_user_is_not_overwritten(folder, tmp_path, capsys):
    write_prompts(tmp_path / "prompts.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("mine")
    assert main(batch_words(folder, tmp_path / "README.md")) == 2
    assert "the output must be new or written by an earlier run" in capsys.readouterr().err
    assert {
        path.name: path.read_text() for path in tmp_path.iterdir() if path.name != "prompts.jsonl"
    } == {"README.md": "mine"}


def test_store_keeps_outputs_between_runs(folder, tmp_path, capsys):
    write_prompts(tmp_path / "prompts.jsonl", TEXTS)
    store, lines, texts = tmp_path / "store.safetensors", [], []
    for run in range(2):
        output = tmp_path / f"out{run}.jsonl"
        words = [
            word for word in batch_words(folder, output, "--store", str(store)) if word != "-d"
        ]
        words.remove(str(folder / "draft"))
        assert main([*words, "--set", "num_assistant_tokens_schedule=constant"]) == 0
        lines.append(capsys.readouterr().err)
        texts.append({key: ends_of(line) for key, line in results_in(output).items()})
    assert texts[0] == texts[1]
    assert f"tokens of earlier outputs in {store}" in lines[0].replace("\n", "")
    lengths = [
        float(re.search(r"mean acceptance length (\d+\.\d+)", " ".join(text.split()))[1])
        for text in lines
    ]
    assert lengths[1] > lengths[0] + 0.5
    store.write_bytes(b"something else")
    assert main(words) == 2
    assert "a suffix store must be in" in capsys.readouterr().err
    assert main(batch_words(folder, output, "--store", str(store), "--engine", "ray")) == 2
    assert "--store must come with --engine local, got --engine ray" in capsys.readouterr().err


def test_progress_lines_are_rate_limited():
    log = Console(file=io.StringIO())
    notes = ProgressNotes(
        log, "loading", every_s=60, clock=iter([0.0, 30.0, 61.0, 61.0, 90.0]).__next__
    )
    for num_done in (1, 2, 3):
        notes.show(num_done, 8, "rows", "10 tokens/s")
    assert log.file.getvalue() == "2/8 rows 10 tokens/s\n"


@pytest.mark.parametrize("width", [80, 40])
def test_bar_shows_count_and_time_on_a_narrow_terminal(width):
    screen = io.StringIO()
    notes = ProgressNotes(
        Console(file=screen, force_terminal=True, width=width, color_system=None), "loading"
    )
    with notes.bar:
        notes.show(500, 1000, "rows", f"123.4 tokens/s{', and much more' * 9}")
        notes.bar.refresh()
    lines = screen.getvalue().split("\n")
    bar, line = next(
        (first, second) for first, second in itertools.pairwise(lines) if "500/1000" in first
    )
    assert "━━━━" in bar and "-:--:--" in bar
    assert "rows 123.4 tokens/s" in line and "…" in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_tokens_per_second_and_acceptance(is_terminal):
    stats, screen = SpeculationStats(), io.StringIO()
    stats.add_row(4, 3, 4)
    with progress(
        2, Console(file=screen, force_terminal=is_terminal, width=120, color_system=None)
    ) as on_step:
        on_step(Method("plain, greedy", "plain"), None)
        on_step(Method("greedy, K = 4", "ours"), Run(0, 0, 1.0, [[1] * 30], stats))
    shown = screen.getvalue()
    assert all(words in shown for words in ("2/2", "greedy, K = 4", "30 tokens/s, 75% accepted"))
    assert ("1/2 warming up: plain, greedy\n" in shown) is not is_terminal
    assert ("; comparing outputs" in shown) is is_terminal
