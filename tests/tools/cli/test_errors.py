"""What goes wrong on the command line is one line and exit status 2, whatever it is."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import T5Config

from hf_speculate.generation.mixin import SpeculativeGenerationMixin
from hf_speculate.tools.cli import loading
from hf_speculate.tools.cli.main import main
from tests.tools.bench.fakes import save_pair

ROOT = Path(__file__).parents[3]
CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A pair in `target` and `draft`, and copies of the target each of which lacks something."""
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder)
    for name in ("untyped", "t5", "speechless", "cut", "emptied"):
        shutil.copytree(folder / "target", folder / name)
    config = json.loads((folder / "untyped" / "config.json").read_text())
    del config["model_type"]
    (folder / "untyped" / "config.json").write_text(json.dumps(config))
    T5Config().save_pretrained(folder / "t5")
    for file in (folder / "speechless").glob("tokenizer*"):
        file.unlink()
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "emptied" / "model.safetensors").unlink()
    (folder / "emptied" / "pytorch_model.bin").touch()
    (folder / "latin.txt").write_bytes("def main():\ncafé\n".encode("latin-1"))
    (folder / "latin.jsonl").write_bytes('"def main():"\n"café"\n'.encode("latin-1"))
    (folder / "prompts.txt").write_text("def main():\n")
    (folder / "prompts.jsonl").write_text('"def main():"\n')
    return folder


@pytest.fixture
def refused(folder, tmp_path, capsys):
    """Runs a command that cannot be; returns the one line that is said of it."""

    def run(words: list[str]) -> str:
        assert main([word.format(folder=folder, out=tmp_path) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("hf-speculate: ")
        assert err.count("\n") == 1
        assert len(err) < 700
        return err

    return run


GENERATE = ["generate", "{folder}/target", "def main", "-d", "{folder}/draft", *CPU]
BATCH = ["batch", "{folder}/target", "{folder}/prompts.jsonl", "--output", "{out}/out.jsonl", *CPU]
BENCH = ["bench", "{folder}/target", "{folder}/prompts.txt", "-d", "{folder}/draft", *CPU]
TUNE = ["tune", "{folder}/target", "{folder}/prompts.txt", "-d", "{folder}/draft", *CPU]


@pytest.mark.parametrize("command", [GENERATE, BATCH, BENCH, TUNE], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample", "-t", "0"], "--temperature must be above 0 and finite, got 0.0; leave it out"),
        (["--sample", "-t", "-1"], "--temperature must be above 0 and finite, got -1.0; leave it out"),
        (["--sample", "-t", "nan"], "--temperature must be above 0 and finite, got nan; leave it out"),
        (["--sample", "--top-p", "1.5"], "--top-p must be in (0, 1], got 1.5; leave it out"),
        (["--sample", "--top-k", "-1"], "--top-k must be an int of at least 0, got -1; leave it out"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be above 0 and finite, got 0.0; leave it out"),
        (["--top-k", "5"], "--top-k must come with --sample"),
        (["--set", "top_k=5"], "--set must leave out what has an option, got top_k; use --top-k"),
        (["-n", "0"], "--max-new-tokens must be an int of at least 1, got 0; leave it out"),
        (["-n", "-3"], "--max-new-tokens must be an int of at least 1, got -3; leave it out"),
        (["--device", "foo"], "--device must be one of auto, c"),
        (["--device", "meta"], "here, got 'meta' (Tensor.item()"),
        (["--device", "xpu"], "here, got 'xpu' ("),
    ],
)
def test_an_option_that_cannot_be_is_named(command, options, message, refused):
    assert message in refused([*command, *options])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA GPU to be missing")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "nosuch", "-f", "nosuch.jsonl"], "the file of prompts must exist"),
        (["bench", "nosuch", "nosuch.jsonl", "-d", "nosuch"], "the file of prompts must exist"),
        (["tune", "nosuch", "nosuch.jsonl", "-d", "nosuch"], "the file of prompts must exist"),
        (["bench", "nosuch", "{folder}/prompts.txt", "-d", "nosuch", "-v", "nosuch"], "verifier must be one of"),
        (["batch", "nosuch", "{folder}/prompts.jsonl", "-o", "{out}/no/x.jsonl"], "x.jsonl must exist, got none"),
        (["generate", "nosuch", "x", "--json", "-o", "{out}/no/x.json"], "x.json must exist, got none"),
    ],
)
def test_options_and_files_are_checked_before_a_model_is_loaded(words, message, refused):
    assert message in refused(words)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (GENERATE, ["--file", "y"], "there must be one prompt or --file, got both"),
        (GENERATE, ["--set", "speculation_stats=1"], "--set must be name=value with a plain field"),
        (GENERATE, ["--dtype", "int8"], "dtype must be one of auto, bfloat16"),
        (GENERATE, ["--chat"], "the tokenizer must have a chat template"),
        (GENERATE, ["-v", "nonsense"], "verifier must be one of block, coupled"),
        (BATCH, ["--set", "seed=[1, 2]"], "seed must be an int"),
        (BATCH, ["-b", "0"], "Invalid value for '--rows' / '--batch-size'"),
        (BATCH, ["--engine", "ray", "--workers", "0"], "num_workers must be at least 1"),
        (BENCH, ["-k", "many"], "--num-assistant-tokens must be a number"),
        (BENCH, ["-v", "greedy", "--sample"], "verifier must be a sampling one"),
        (BENCH, ["-v", ","], "--verifiers must name at least one"),
        (BENCH, ["--thresholds", "2"], "posterior_threshold must be in (0, 1)"),
        (BENCH, ["--set", "verifier=block"], "leave out the fields in which methods differ, got verifier"),
        (BENCH, ["--output", "no/such/out.json"], "the folder of no/such/out.json must exist"),
        (TUNE, ["--quality", "agreement"], "--quality must be exact, or bounds such as agreement>=0.95"),
        (TUNE, ["--write", "{out}"], "the folder of --write must hold a generation_config.json"),
        (TUNE, ["-v", "typical"], "--verifiers must name one that --quality exact allows, got typical"),
        (TUNE, ["-v", "block", "-k", "0"], "num_assistant_tokens must be in 1..128"),
    ],
)
def test_what_one_command_cannot_do_is_named(command, options, message, refused, tmp_path):
    assert message in refused([*command, *options])
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_named(refused):
    assert "--device must be one of auto, cpu, map here, got 'cuda'" in refused([*GENERATE, "--device", "cuda"])


def test_models_are_not_spread_without_accelerate(monkeypatch, refused):
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: False)
    line = refused([*GENERATE, "--device", "map"])
    assert "accelerate must be installed for --device map, got none; run pip install accelerate" in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("untyped", "(ValueError: Unrecognized model in"),
        ("t5", "(ValueError: Unrecognized configuration class"),
        ("speechless", "a tokenizer must be one that transformers can read, got"),
        ("cut", "(SafetensorError: "),
        ("emptied", "(EOFError: "),
        ("none", "a model must be a folder, or a name on the Hub"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_cannot_be_read_is_named(role, name, message, refused):
    words = [word.replace(f"/{role}", f"/{name}") for word in GENERATE]
    line = refused(words)
    assert message in line
    assert f"/{name}'" in line


@pytest.mark.parametrize("command", [GENERATE, BENCH, TUNE], ids=lambda words: words[0])
@pytest.mark.parametrize("name", ["latin.txt", "latin.jsonl"])
def test_a_line_of_another_encoding_is_named(command, name, refused):
    words = [word.replace("prompts.txt", name) for word in command]
    if command is GENERATE:
        words[2:3] = ["--file", f"{{folder}}/{name}"]
    assert f"each line must be UTF-8, got other bytes at {name}:2; save the file as UTF-8" in refused(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--nope"], "No such option: --nope"),
        (["generate"], "Missing argument"),
        (["chek"], "No such command 'chek'"),
        (["--nope"], "No such option: --nope"),
        (["bench", "a", "b", "--repeats", "0"], "Invalid value for '--repeats': "),
        (["batch", "a", "b", "-o", "c", "--engine", "spark"], "'spark' is not one of 'local', 'ray'"),
        (["generate", "a", "-n", "many"], "Invalid value for '--max-new-tokens' / '-n': "),
    ],
)
def test_words_that_are_no_command_are_one_line(words, message, refused):
    assert message in refused(words)


@pytest.mark.parametrize("option", ["--workers", "--cpus-per-worker", "--gpus-per-worker", "--ray-address"])
def test_options_of_ray_come_with_ray(option, refused, tmp_path):
    line = refused([*BATCH, option, "1"])
    assert f"{option} must come with --engine ray, got --engine local; add --engine ray" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [BENCH, TUNE], ids=lambda words: words[0])
def test_results_go_into_a_file(command, refused, monkeypatch):
    monkeypatch.setattr("hf_speculate.tools.cli.measuring.load_pair", None)  # nothing is loaded for it
    options = ["--output", "--html"] if command is BENCH else ["--output"]
    for option in options:
        assert "results must go into a file, got the folder" in refused([*command, option, "{out}"])


@pytest.mark.parametrize("command", [BENCH, TUNE], ids=lambda words: words[0])
def test_what_was_measured_is_shown_where_it_cannot_be_written(command, folder, tmp_path, monkeypatch, capsys):
    def write_json(path, result):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_speculate.tools.cli.measuring.write_json", write_json)
    words = [*command, "-n", "2", "-k", "2", "-v", "greedy", "--output", str(tmp_path / "out.json")]
    assert main([word.format(folder=folder) for word in words]) == 2
    out, err = capsys.readouterr()
    assert "greedy, K = 2" in out
    assert err.endswith("hf-speculate: [Errno 28] No space left on device\n")


class Strange(Exception):
    """What nobody foresaw."""


@pytest.fixture
def broken(monkeypatch):
    """Lets every decoding raise."""

    def set_error(error: BaseException) -> None:
        def generate(model, **arguments):
            raise error

        monkeypatch.setattr(SpeculativeGenerationMixin, "generate", generate)

    return set_error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Strange("\nfirst\nsecond"), "Strange: first (--debug prints the traceback)"),
        (Strange(), "Strange (--debug prints the traceback)"),
        (AssertionError("[red]not so[/red] :sob:"), "AssertionError: [red]not so[/red] :sob: (--debug"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device\n"),
    ],
)
def test_what_nobody_foresaw_is_one_line_with_its_kind(error, line, broken, refused):
    broken(error)
    assert refused(GENERATE).startswith(f"hf-speculate: {line}")


def test_an_end_of_a_file_is_an_error_and_an_interrupt_is_none(folder, broken, capsys):
    words = [word.format(folder=folder) for word in GENERATE]
    broken(EOFError("Ran out of input"))
    assert main(words) == 2
    assert "hf-speculate: EOFError: Ran out of input (--debug" in capsys.readouterr().err
    broken(KeyboardInterrupt())
    assert main(words) == 130
    assert capsys.readouterr().err.strip() == "interrupted: 0 of 1 prompts are finished"
    broken(SystemExit(3))
    assert main(words) == 3


def test_ctrl_c_outside_of_decoding_is_one_line(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def read(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["generate", "nosuch", "-"]) == 130
    assert capsys.readouterr() == ("", "hf-speculate: interrupted\n")


@pytest.mark.parametrize("place", [0, 1, 3, 7])
def test_debug_may_stand_anywhere(place, folder, broken):
    broken(Strange("first"))
    words = [word.format(folder=folder) for word in GENERATE]
    words.insert(place, "--debug")
    with pytest.raises(Strange, match="first"):
        main(words)


def test_behind_two_dashes_debug_is_a_prompt(folder, capsys):
    words = ["generate", *CPU, "--dtype", "float64", "-n", "2", "--", str(folder / "target"), "--debug"]
    assert main(words) == 0
    assert "2 tokens in" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_else_stands_on_the_standard_error_of_a_process(folder, tmp_path):
    script = tmp_path / "hf-speculate"  # as an installer writes it
    script.write_text("import sys\nfrom hf_speculate.tools.cli.main import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "check", str(folder / "target"), "-d", str(folder / "none")]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("hf-speculate: draft must be a folder with a config.json")
    assert result.stderr.count("\n") == 1
