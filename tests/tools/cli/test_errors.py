"""Test errors on the command line: one line, and exit status 2."""

import functools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from transformers import AutoModelForCausalLM, GenerationMixin

from hf_speculate.tools.cli.main import main

CPU = ["--device", "cpu"]
# The useful part is on a later line, after many characters.
LACKS = f"\nFlash needs flash_attn, not found. It can be {'a long story, ' * 30}"
LACKS += "\nRun `pip install flash-attn`"


@pytest.fixture(scope="module")
def folder(folder, tmp_path_factory) -> Path:
    """Write a pair to `target` and `draft`, faulty copies of the target, and files of prompts."""
    folder = Path(shutil.copytree(folder, tmp_path_factory.mktemp("models"), dirs_exist_ok=True))
    shutil.copytree(
        folder / "target", folder / "no-tokenizer", ignore=shutil.ignore_patterns("tokenizer*")
    )
    shutil.copytree(folder / "target", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "latin.txt").write_bytes("def main():\ncafé\n".encode("latin-1"))
    (folder / "prompts.txt").write_text("def main():\n")
    for name, target in (("head", None), ("lost-head", "no/such")):
        (folder / name).mkdir()
        config = {
            "speculators_model_type": "eagle3",
            "speculators_config": {"verifier": {"name_or_path": target}},
        }
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "prompts.jsonl").write_text('"def main():"\n')
    (folder / "bad.jsonl").write_text('"good"\n{"id": 1}\n')
    return folder


@pytest.fixture
def refused(folder, tmp_path, capsys):
    """Run an invalid command and return the single line of its error."""

    def run(words: list[str]) -> str:
        assert main([word.format(folder=folder, out=tmp_path) for word in words]) == 2
        out, err = capsys.readouterr()
        assert (out, err[:14], err.count("\n")) == ("", "hf-speculate: ", 1)
        assert list(tmp_path.iterdir()) == []
        return err

    return run


GENERATE = ["generate", "{folder}/target", "def main", "-d", "{folder}/draft", *CPU]
BATCH = ["batch", "{folder}/target", "{folder}/prompts.jsonl", "--output", "{out}/out.jsonl", *CPU]
BENCH = ["bench", "{folder}/target", "{folder}/prompts.txt", "-d", "{folder}/draft", *CPU]
TUNE = ["tune", "{folder}/target", "{folder}/prompts.txt", "-d", "{folder}/draft", *CPU]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # Errors before a model is loaded.
        (
            ["generate", "nosuch", "-f", "nosuch.jsonl"],
            "the file of prompts must exist, got nosuch.jsonl",
        ),
        (
            ["batch", "nosuch", "{folder}/prompts.jsonl", "-o", "{out}/no/x.jsonl"],
            "x.jsonl must exist, got none",
        ),
        (
            ["bench", "nosuch", "{folder}/prompts.txt", "-d", "no", "--html", "{out}"],
            " is a directory",
        ),
        (
            ["bench", "nosuch", "{folder}/latin.txt", "-d", "no"],
            "prompts must be UTF-8, got other bytes in ",
        ),
        (["batch", "nosuch", "{folder}/bad.jsonl", "-o", "{out}/x.jsonl"], "at bad.jsonl:2"),
        (
            [*BATCH[:3], "-o", "{folder}/prompts.jsonl"],
            "the output must not be the file of prompts",
        ),
        (["serve", "nosuch", "-k", "129"], "num_assistant_tokens"),
        (["serve", "nosuch", "--port", "0"], "a causal language model must be in a folder"),
        (
            ["serve", "nosuch", "--host", "203.0.113.1"],
            "--host and --port must be free on this machine",
        ),
        # A draft head given as the target.
        (["serve", "{folder}/head", "--port", "0"], "TARGET must be a model, got the draft head "),
        (
            ["generate", "{folder}/head", "x"],
            "/head, whose config names no target; pass the target as TARGET, and --draft",
        ),
        (
            ["bench", "{folder}/lost-head", "{folder}/prompts.txt"],
            "/lost-head names must be in a folder, or on the Hub",
        ),
        (
            [*GENERATE[:1], "{folder}/lost-head", *GENERATE[2:]],
            "/lost-head, which needs no --draft; pass",
        ),
        # Invalid options.
        (
            [*GENERATE, "--sample", "-t", "0"],
            "--temperature must be above 0 and finite, got 0.0; leave it out",
        ),
        ([*BENCH, "--top-k", "5"], "--top-k must come with --sample"),
        (
            [*TUNE, "--set", "top_k=5"],
            "--set must leave out what has an option, got top_k; use --top-k",
        ),
        (
            [*GENERATE, "--device", "foo"],
            "a device of this machine, got 'foo' (torch knows no such device); leave it out",
        ),
        (
            [*GENERATE, "--attn-implementation", "foo"],
            "choose another --attn-implementation, or leave it out",
        ),
        ([*BENCH, "--device", "meta"], "of this machine, got 'meta' (Tensor.item()"),
        (
            [*GENERATE, "--file", "{folder}/prompts.txt"],
            "there must be one prompt or --file, got both",
        ),
        (
            [*GENERATE, "--set", "speculation_stats=1"],
            "--set must be name=value with a plain field",
        ),
        (
            [*GENERATE, "--set", "num_beams=4"],
            "num_beams must be 1, got 4; beam search cannot be decoded speculatively",
        ),
        (
            [*BENCH, "--set", "eos_token_id=abc"],
            "eos_token_id must be a token id or a list of them, got 'abc'",
        ),
        ([*TUNE, "--set", "sequence_bias=[[3, 1]]"], "sequence_bias must be a list of pairs"),
        ([*BATCH, "--set", "max_length=x"], "max_length must be an int of at least 0, got 'x'"),
        (
            [*GENERATE, "--set", "early_stopping=3"],
            "--set must name values that transformers takes, got early_stopping: ",
        ),
        ([*GENERATE, "--chat"], "the tokenizer must have a chat template"),
        (
            [*BATCH, "--ray-address", "1"],
            "--ray-address must come with --engine ray, got --engine local",
        ),
        ([*BENCH, "-v", "greedy", "--sample"], "verifier must be a sampling one"),
        (
            [*BENCH, "--set", "verifier=block"],
            "leave out the fields in which methods differ, got verifier",
        ),
        ([*TUNE, "--write", "{out}"], "the folder of --write must hold a generation_config.json"),
        (
            [*TUNE, "-v", "typical"],
            "--verifiers must name one that --quality exact allows, got typical",
        ),
        # Unknown commands.
        (["chek"], "No such command 'chek'"),
        (
            [*GENERATE, "--assistant-model", "x"],
            "No such option: --assistant-model; did you mean --draft?",
        ),
        (
            [*GENERATE, "--assistant_model=x"],
            "No such option: --assistant_model; did you mean --draft?",
        ),
        ([*BENCH, "--prompt-lookup-num-tokens", "4"], "did you mean --lookup?"),
        (
            ["serve", "nosuch", "--batch-size", "4"],
            "No such option: --batch-size; did you mean --rows?",
        ),
        ([*GENERATE, "--min-p", "0.1"], "No such option: --min-p; did you mean --set min_p=VALUE?"),
        ([*GENERATE, "--top_k", "4"], "No such option: --top_k; did you mean --top-k?"),
        ([*GENERATE, "--max-new-token", "4"], "did you mean --max-new-tokens?"),
        ([*GENERATE, "--zzz"], "No such option: --zzz; see --help"),
        ([*GENERATE, "--set", "min_pp=0.1"], "got 'min_pp=0.1'; did you mean min_p?"),
        ([*BATCH, "--engine", "spark"], "'spark' is not one of 'local', 'ray'"),
        # Unreadable models.
        (
            ["generate", "{folder}/no-tokenizer", "x", *CPU],
            "a tokenizer must be in a folder, or on the Hub",
        ),
        ([*GENERATE, "-d", "{folder}/cut"], "/cut' (SafetensorError: "),
        (
            [*GENERATE, "-d", "{folder}/none"],
            "a causal language model must be in a folder, or on the Hub",
        ),
    ],
)
def test_invalid_command_prints_one_line(words, message, refused):
    assert message in refused(words)


def test_every_invalid_line_is_named(folder, tmp_path, capsys):
    lines = ['{"id": 1}', '"good"', "{", '{"prompt": "a", "top_k": -1}', '{"prompt": "b", "id": 2}']
    for values, named in (
        (lines, [":1; write", ":3; write", ":4; leave", ":2 and at p.jsonl:5; give"]),
        (["{"] * 30, [*(f":{number};" for number in range(1, 21)), "and 10 further errors"]),
        (
            ['{"prompt": "a", "temperature": 0.7, "top_p": 0.9}', '{"prompt": "b", "min_p": 0.1}'],
            [":1", ":1", ":2"],
        ),
    ):
        (tmp_path / "p.jsonl").write_text("\n".join(values))
        assert (
            main(["batch", "nosuch", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "out.jsonl")])
            == 2
        )
        shown = capsys.readouterr().err.splitlines()
        assert len(shown) == len(named)
        assert all(
            part in line and line.startswith("hf-speculate: ")
            for part, line in zip(named, shown, strict=True)
        )
    assert (
        "temperature of a prompt must come with sampling, got 0.7 with greedy decoding at p.jsonl:1"
        in shown[0]
    )
    assert shown[0].endswith("; add --sample, or leave temperature out")
    (tmp_path / "p.jsonl").write_text('""\n"good"\n""\n')
    words = [
        "batch",
        str(folder / "target"),
        str(tmp_path / "p.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        *CPU,
    ]
    assert main(words) == 2
    shown = capsys.readouterr().err.splitlines()
    assert [line.rpartition("none at ")[2] for line in shown] == [
        f"p.jsonl:{num}; leave the row out" for num in (1, 3)
    ]


def test_measurements_are_printed_if_writing_fails(folder, tmp_path, capsys):
    output = tmp_path / (254 * "x")  # too long with the suffix for a file being written
    words = [*BENCH, "-n", "2", "-k", "2", "-v", "greedy", "--output", str(output)]
    assert main([word.format(folder=folder) for word in words]) == 2
    out, err = capsys.readouterr()
    assert "greedy, K = 2" in out
    assert "hf-speculate: [Errno 36] File name too long" in err


def test_missing_library_and_second_rank_are_named(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # importing it fails
    assert (
        'uvicorn must be installed for this, got none; run pip install "hf-speculate[serve]", or '
        "pip install" in (refused(["serve", "nosuch"]))
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "accelerate", None)
        assert "accelerate must be installed for this" in refused(
            ["generate", "nosuch", "x", "--device", "map"]
        )
        patch.setattr(AutoModelForCausalLM, "from_pretrained", Mock(side_effect=ImportError(LACKS)))
        line = refused([*GENERATE, "--attn-implementation", "flash"])
    assert (
        "/target needs must be installed, got an error: Flash needs flash_attn, not found. It can "
        "be " in line
    )
    assert (
        "Run `pip install flash-attn`; choose another --attn-implementation, or leave it out"
        in line
    )
    state = Mock(process_index=0, num_processes=2)
    monkeypatch.setitem(
        sys.modules, "accelerate", SimpleNamespace(PartialState=lambda **options: state)
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--engine ray must be started once, got 2 ranks" in refused([*BATCH, "--engine", "ray"])


class Strange(Exception):
    """Unexpected error."""


def failing(error):
    """Return a replacement for transformers' `generate` that raises the error."""

    @functools.wraps(GenerationMixin.generate)
    def generate(model, **arguments):
        raise error

    return generate


def test_decoding_error_prints_one_line_without_debug(folder, monkeypatch, capsys):
    words = [word.format(folder=folder) for word in GENERATE]
    for error, status, line in (
        (KeyboardInterrupt(), 130, "interrupted: 0 of 1 prompts are finished"),
        (SystemExit(3), 3, ""),
        (
            Strange("\n[red]first[/red] :sob:\nsecond"),
            2,
            "hf-speculate: Strange: [red]first[/red] :sob: (--debug prints",
        ),
    ):
        monkeypatch.setattr(GenerationMixin, "generate", failing(error))
        assert main(words) == status
        err = capsys.readouterr().err.strip()
        assert err.startswith(line) and "\n" not in err
    for at in (0, len(words)):
        with pytest.raises(Strange):
            main([*words[:at], "--debug", *words[at:]])


def test_debug_after_two_dashes_is_a_prompt(folder, capsys):
    assert main(["generate", *CPU, "-n", "2", "--", str(folder / "target"), "--debug"]) == 0
    assert "2 tokens in" in capsys.readouterr().err


def test_ctrl_c_outside_decoding_prints_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.stdin", SimpleNamespace(read=Mock(side_effect=KeyboardInterrupt), isatty=lambda: False)
    )
    assert main(["generate", "nosuch", "-"]) == 130
    assert capsys.readouterr() == ("", "hf-speculate: interrupted\n")
