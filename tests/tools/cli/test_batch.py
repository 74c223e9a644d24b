"""`hf-speculate batch` on a tiny pair, and what it says when it cannot."""

import io

import pytest
from rich.console import Console

from hf_speculate.tools.cli.batch import _Progress
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.dataset.ranks import Ranks
from hf_speculate.tools.dataset.run import DatasetReport
from tests.tools.dataset.common import batch_words, plain_results, prompts, results_in, save_pair, write_prompts

TEXTS = prompts(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    write_prompts(folder / "prompts.jsonl", TEXTS)
    return folder


def one_error(capsys):
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("hf-speculate: ")]
    assert err.rstrip().endswith(line)
    return line


@pytest.mark.parametrize("more", [["-k", "3"], ["--lookup", "4"], []], ids=["draft", "hybrid", "adaptive"])
def test_texts_are_those_of_plain_decoding_and_remarks_stand_apart(more, folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert main(batch_words(folder, output, "--ordered", *more)) == 0
    found = list(results_in(output).values())
    expected = plain_results(folder / "target", TEXTS)
    assert [(line["text"], line["num_tokens"], line["finish_reason"]) for line in found] == expected
    assert [line["id"] for line in found] == [f"p{place}" for place in range(6)]
    out, err = capsys.readouterr()
    assert out == ""
    assert f"6 rows in {output}; {sum(num for _, num, _ in expected)} tokens in" in " ".join(err.split())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_a_line_a_minute_elsewhere(is_terminal, tmp_path):
    report = DatasetReport(tmp_path, 8, num_finished=4, num_tokens=90, num_drafted=4, num_accepted=3, seconds=9.0)
    log = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    progress = _Progress(log, clock=iter([0.0, 30.0, 61.0, 61.0, 90.0]).__next__)
    with progress.bar:
        progress.load()
        for _ in range(3):
            progress.show(report)
    shown = log.file.getvalue()
    assert "10.0 tokens/s, 75% of drafted tokens accepted" in shown
    assert ("4/8" in shown) is is_terminal
    assert shown.count("4 of 8 rows") == (not is_terminal)


def test_other_settings_are_refused_unless_told(folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert main(batch_words(folder, output, "-k", "3")) == 0
    capsys.readouterr()
    assert main(batch_words(folder, output, "-k", "2")) == 2
    assert "num_assistant_tokens (2, was 3)" in one_error(capsys)
    assert main(batch_words(folder, output, "-k", "2", "--if-changed", "keep")) == 0


def test_a_bad_line_is_named_before_any_model_is_loaded(tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text('"good"\n{"id": 1}\n')
    assert main(["batch", "no/such-model", str(file), "-o", str(tmp_path / "out.jsonl")]) == 2
    assert "at bad.jsonl:2" in one_error(capsys)
    assert main(["batch", "no/such-model", str(file), "-o", str(file)]) == 2
    assert not (tmp_path / "out.jsonl.run").exists()


def test_the_prompts_are_not_written_over(folder, capsys):
    file = folder / "prompts.jsonl"
    before = file.read_bytes()
    assert main(["batch", str(folder / "target"), str(file), "-o", str(file)]) == 2
    assert "the output must not be the file of prompts" in one_error(capsys)
    assert file.read_bytes() == before


def test_ray_is_started_once(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("hf_speculate.tools.cli.batch.find_ranks", lambda is_cpu: Ranks(0, 2))
    assert main(batch_words(folder, tmp_path / "out.jsonl", "--engine", "ray")) == 2
    assert "--engine ray must be started once, got 2 ranks" in one_error(capsys)
