"""Test `hf-speculate generate` on the bundled pair, and commands with a draft head."""

import functools
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, pipeline

from hf_speculate.tools.cli.arguments import arguments_of
from hf_speculate.tools.cli.loading import names_head, with_named_target
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.cli.options import Models, Speculation
from tests.support.tiny import make_model
from tests.support.tiny_tokenizers import byte_level_tokenizer

PAIR = Path(__file__).parents[3] / "examples" / "pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
PROMPTS = ["def main():\n", "class Stack:\n"]
NUM_TOKENS = 12
COMMON = ["-n", str(NUM_TOKENS), "--dtype", "float64", "--device", "cpu"]


@pytest.fixture(scope="module")
def plain_texts() -> list[str]:
    plain = pipeline("text-generation", TARGET, dtype=torch.float64, return_full_text=False)
    return [
        output["generated_text"]
        for (output,) in plain(PROMPTS, max_new_tokens=NUM_TOKENS, do_sample=False)
    ]


def test_text_equals_plain_and_remarks_go_to_stderr(plain_texts, capsys):
    for extra in (["-d", DRAFT, "-k", "3"], []):
        assert main(["generate", TARGET, PROMPTS[0], *extra, *COMMON]) == 0
        out, err = capsys.readouterr()
        assert out.strip() == plain_texts[0].strip()
        assert "12 tokens in" in err
        assert ("accepted" in err) is bool(extra)


def test_stop_strings_of_a_saved_config_end_the_text(plain_texts, tmp_path, capsys):
    shutil.copytree(TARGET, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(
        json.dumps({"stop_strings": ["event"]})
    )
    assert main(["generate", str(tmp_path / "target"), PROMPTS[0], "-d", DRAFT, *COMMON]) == 0
    assert (
        capsys.readouterr().out.rstrip("\n")
        == plain_texts[0].partition("event")[0] + "event"
        != plain_texts[0]
    )


def test_template_begins_the_text_and_a_chat_remembers(tmp_path, monkeypatch, capsys):
    tokenizer, texts, generate = (
        byte_level_tokenizer([], bos_token="<begin>"),
        [],
        GenerationMixin.generate,
    )
    begin = [("<begin>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=begin
    )
    tokenizer.chat_template = (
        "<begin>{% for message in messages %}[{{ message.content }}]{% endfor %}"
    )
    make_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    @functools.wraps(generate)
    def noted(model, **arguments):
        texts.append(tokenizer.decode(arguments["input_ids"][0]))
        return generate(model, **arguments)

    monkeypatch.setattr(GenerationMixin, "generate", noted)
    monkeypatch.setattr("sys.stdin", io.StringIO("def main():\nclass Stack:\n"))
    for words in (["generate", "hi", "--chat"], ["generate", "hi"], ["chat"]):
        assert main([words[0], str(tmp_path), *words[1:], "--lookup", "4", *COMMON]) == 0
    assert texts[:3] == ["<begin>[hi]", "<begin>hi", "<begin>[def main():]"]
    assert texts[3].startswith(texts[2]) and texts[3].endswith("[class Stack:]")
    answer = texts[3][len(texts[2]) : -len("[class Stack:]")].strip("[]")
    assert answer and answer in capsys.readouterr().out


def test_prompts_are_read_from_a_pipe(plain_texts, monkeypatch, tmp_path, capsys):
    output, lines = (
        tmp_path / "out.json",
        [{"prompt": prompt, "id": prompt[:3]} for prompt in PROMPTS],
    )
    words = [
        "generate",
        TARGET,
        "-d",
        DRAFT,
        "-k",
        "adaptive:3",
        "--json",
        "--output",
        str(output),
        *COMMON,
    ]
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(map(json.dumps, lines)).encode()))
    )
    assert main([*words, "--file", "-"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(result["id"], result["text"]) for result in results] == list(
        zip(["def", "cla"], plain_texts, strict=True)
    )
    assert json.loads(output.read_text()) == {"results": results}
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(f"\ufeff{PROMPTS[0]}".encode()), encoding="utf-8")
    )
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["text"] == plain_texts[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(words) == 2
    assert "there must be a prompt, got none" in capsys.readouterr().err


def test_sampling_options_and_saved_settings_reach_the_model():
    settings = {"top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2, "seed": 3, "lookup": 5}
    options = {"num_assistant_tokens": "adaptive:9", "settings": ["min_p=0.1", "verifier=block"]}
    arguments = arguments_of(Speculation(target="", sample=True, **settings, **options))
    settings["prompt_lookup_num_tokens"] = settings.pop("lookup")
    schedule = {"num_assistant_tokens": 9, "num_assistant_tokens_schedule": "adaptive"}
    assert (
        arguments
        == {"max_new_tokens": 256, "do_sample": True, "min_p": 0.1, "verifier": "block"}
        | settings
        | schedule
    )


def test_help_and_version_load_neither_torch_nor_transformers():
    code = "import sys; from hf_speculate.tools.cli.main import main; "
    code += "[main(words) for words in "
    code += "(['--help'], ['-h'], ['bench', '-h'], ['--version'], ['generate'])]; "
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


HEAD = str(PAIR.parent / "heads" / "eagle3")


def test_named_target_of_a_head_is_loaded(plain_texts, monkeypatch, capsys):
    monkeypatch.chdir(PAIR.parents[1])  # the head's config names a folder there
    assert main(["generate", HEAD, PROMPTS[0], "-k", "3", *COMMON]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == plain_texts[0].strip()
    assert (
        "accepted" in err
        and f"{HEAD} is a draft head for examples/pair/target, which is loaded" in err
    )
    assert main(["check", HEAD]) == 0
    assert "warning: eagle3 as a draft head for examples/pair/target" in capsys.readouterr().out


def cached(cache: Path, name: str, revisions: dict[str, Path]) -> None:
    """Write a repository to a cache of the Hub, with one folder per revision."""
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    for number, (revision, folder) in enumerate(revisions.items()):
        commit = 40 * str(number)
        shutil.copytree(folder, root / "snapshots" / commit)
        (root / "refs" / revision).write_text(commit)


def test_revision_and_trust_are_not_a_named_targets(plain_texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "config.json").write_text('{"speculators_model_type": "medusa"}')
    shutil.copytree(HEAD, tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = TARGET
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    cached(tmp_path / "hub", "org/head", {"main": tmp_path / "main", "old": tmp_path / "old"})
    load, loaded = AutoModelForCausalLM.from_pretrained, []

    def noted(name, **options):
        loaded.append(options)
        return load(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    words = ["org/head", "--revision", "old", "--trust-remote-code"]
    assert main(["generate", *words, PROMPTS[0], "-k", "3", *COMMON]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == plain_texts[0].strip()
    assert "accepted" in err and "but none of its code" in err
    assert not {"revision", "trust_remote_code"} & loaded[0].keys()
    assert main(["check", *words]) == 0
    assert "kind: eagle3, speculators format" in capsys.readouterr().out
    cached(tmp_path / "hub", "org/draft", {"main": tmp_path / "main", "old": Path(DRAFT)})
    for words in (["check", TARGET], ["generate", TARGET, PROMPTS[0], *COMMON]):
        assert main([*words, "-d", "org/draft", "--draft-revision", "old"]) == 0


def test_named_target_costs_a_cached_model_no_look_up(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path, "org/model", {"main": Path(TARGET)})
    read, asked = PreTrainedConfig.get_config_dict, []

    def noted(name, **options):
        asked.append(options)
        return read(name, **options)

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", noted)
    models = Models(target="org/model")
    assert with_named_target(models) is models
    assert [options["local_files_only"] for options in asked] == [True]


def test_head_is_timed_without_transformers_methods(tmp_path, monkeypatch):
    monkeypatch.chdir(PAIR.parents[1])  # the head's config names its target by a folder there
    prompts, result = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text(PROMPTS[0])
    words = ["bench", HEAD, str(prompts), "-k", "2", "-v", "greedy", "--thresholds", "", *COMMON]
    assert main([*words, "--output", str(result)]) == 0
    results = json.loads(result.read_text())
    assert [results["environment"][name] for name in ("target", "draft")] == [
        "examples/pair/target",
        HEAD,
    ]
    assert [method["name"] for method in results["methods"]] == ["plain, greedy", "greedy, K = 2"]
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "glm4_moe", "num_mtp_layers": 1})
    )
    # MTP layers of the target itself.
    assert names_head(Models(target=str(tmp_path), draft=str(tmp_path)))


def test_check_reports_whether_a_head_fits(tmp_path, capsys):
    assert main(["check", TARGET, "-d", HEAD]) == 0
    report = capsys.readouterr().out
    assert f"warning: eagle3 as a draft head for {TARGET}" in report
    assert "its context is 2048 tokens, and the target's is 8192" in report
    assert main(["check", DRAFT, "-d", HEAD, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["level"], report["spec"]["kind"]) == ("does not fit", "eagle3")
    (tmp_path / "config.json").write_text('{"speculators_model_type": "medusa"}')
    assert main(["check", TARGET, "-d", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["level"] == "not supported"
    assert main(["check", "no/such-model", "-d", HEAD]) == 2
    assert "target must be a folder with a config.json" in capsys.readouterr().err


def save_chat_model(folder: Path) -> None:
    """Save a tiny model with a context of 64 byte tokens.

    Its template puts each message in [].
    """
    tokenizer = byte_level_tokenizer([])
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    make_model("llama", vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


def chat(folder, typed: bytes, monkeypatch, num_new: int = 8) -> list[int]:
    """Chat with a saved model; return the length of prompt plus answer for each call."""
    lens, generate = [], GenerationMixin.generate

    @functools.wraps(generate)
    def noted(model, **arguments):
        lens.append(arguments["input_ids"].shape[1] + arguments["max_new_tokens"])
        if b"fail" in typed and len(lens) == 1:
            raise RuntimeError("out of order")
        return generate(model, **arguments)

    monkeypatch.setattr(GenerationMixin, "generate", noted)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    assert main(["chat", str(folder), "--lookup", "4", *COMMON, "-n", str(num_new)]) == 0
    return lens


def test_chat_goes_on_after_an_error_of_a_turn(tmp_path, monkeypatch, capsys):
    save_chat_model(tmp_path)
    # The first turn is left out.
    assert chat(tmp_path, b"fail\nok\n", monkeypatch) == [len("[fail]") + 8, len("[ok]") + 8]
    assert "RuntimeError: out of order; the turn is left out, /clear" in capsys.readouterr().err


def test_chat_points_to_clear_once_the_context_is_full(tmp_path, monkeypatch, capsys):
    save_chat_model(tmp_path)
    lines = [b"a" * 62, b"b" * 50, b"c", b"/clear", b"d", b""]
    lens = chat(tmp_path, b"\n".join(lines), monkeypatch, num_new=20)
    err = capsys.readouterr().err
    assert lens == [64, len("[d]") + 20]
    assert (
        "fewer tokens than the model's context of 64, got 64; the turn is left out, /clear starts "
        "over" in err
    )
    assert err.count("fewer tokens than") == 2
    assert "context of 64 tokens is full; /clear starts over" in err


def test_chat_sends_no_command_to_the_model(tmp_path, monkeypatch, capsys):
    save_chat_model(tmp_path)
    lens = chat(tmp_path, b"/help\n/hlep\n /help\n/etc/hosts\n/quit \nleft\n", monkeypatch)
    assert len(lens) == 2 and lens[0] == len("[ /help]") + 8
    notes = capsys.readouterr().err
    assert "no such command: /hlep; /clear starts over" in notes
    assert notes.count("/exit or Ctrl-D ends the chat") == 2


def test_settings_of_a_line_apply_to_its_prompt(tmp_path, capsys):
    lines = [{"prompt": PROMPTS[0], "max_new_tokens": 3}, {"prompt": PROMPTS[0]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert (
        main(
            [
                "generate",
                TARGET,
                "-f",
                str(tmp_path / "p.jsonl"),
                "--json",
                *COMMON,
                "-k",
                "0",
                "-d",
                DRAFT,
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert [json.loads(line)["num_tokens"] for line in out.splitlines()] == [3, NUM_TOKENS]
    assert "nothing was drafted" in err


def test_chat_continues_after_a_line_of_invalid_utf8(tmp_path, monkeypatch, capsys):
    save_chat_model(tmp_path)
    typed = "\ufeffä\n".encode() + b"\xe4\n" + "ö\r\n".encode()
    lens = chat(tmp_path, typed, monkeypatch)
    err = capsys.readouterr().err
    assert lens[0] == len("[ä]".encode()) + 8 and len(lens) == 2
    assert err.count("must be UTF-8, got other bytes in the standard input") == 1
