"""The short examples run as their pages say, and say what they claim."""

import ast
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_NEW = 12
SAID = ("a stack", "a queue of jobs", "the main function")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script of the examples as `python examples/<name> <arguments>` does; returns what it printed."""

    def run_script(name: str, *arguments: str, said: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def tokens_per_round(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"(\d+\.\d\d) (?:tokens )?a round", printed)]


def test_the_page_names_every_example_and_no_other():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([^`]+)` \|", page, re.M))
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts <= named
    assert [name for name in named if not (EXAMPLES / name).exists()] == []


def test_every_script_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert re.search(rf"^    (\w.* )?(examples/)?{path.name}", docstring, re.M), path.name


def test_quickstart_decodes_a_batch_with_drafts(run):
    printed = run("quickstart.py")
    assert "class Stack:\n    def push(self, item):\n" in printed
    assert float(re.search(r"^tokens a round (\S+),", printed, re.M)[1]) > 1


def test_hub_config_picks_up_what_was_saved(run):
    printed = run("hub_config.py")
    assert "saved: verifier=typical, num_assistant_tokens=4" in printed
    assert "loaded: verifier=typical, " in printed
    assert "custom_generate: verifier=typical, " in printed
    assert min(tokens_per_round(printed)) > 1


def test_whisper_hears_what_it_hears_without_a_draft(run):
    printed = run("whisper.py")
    assert "ids equal plain decoding's: True" in printed
    assert min(tokens_per_round(printed)) > 1
    sounds = re.findall(r"^sound \d: \[(.*)\]$", printed, re.M)
    assert len(set(sounds)) == 2  # the text depends on what was read
    assert all(len(set(ids.split(", "))) > 8 for ids in sounds)


def test_chat_answers_every_line(run):
    printed = run("chat.py", "--max-new-tokens", str(NUM_NEW), said="\n".join([*SAID, ""]))
    num_read = [int(number) for number in re.findall(r"^\[(\d+) tokens read, \d", printed, re.M)]
    assert len(num_read) == len(SAID)
    assert max(num_read) < 2 * NUM_NEW  # what came before is not read again


def test_chat_with_what_was_kept_answers_as_if_it_read_everything(import_example):
    chat_module = import_example("chat")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pair" / "target")
    tokenizer.chat_template = chat_module.TEMPLATE
    target, draft = (
        AutoModelForCausalLM.from_pretrained(EXAMPLES / "pair" / name, dtype=torch.float64)
        for name in ("target", "draft")
    )
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    chat = chat_module.Chat(hf_speculate.enable(target), draft, tokenizer, num_assistant_tokens=4, **options)
    num_whole = 0
    for number, text in enumerate(SAID):
        if number == 2:  # a message that was changed is read again, with what follows it
            chat.messages[2]["content"] = "a list of jobs"
        answer = chat.answer(text)
        prompt = tokenizer.apply_chat_template(chat.messages[:-1], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert answer == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
        num_whole += ids.shape[1]
        assert 0 < chat.num_read <= ids.shape[1]
        assert (chat.num_read < ids.shape[1]) == (number > 0)
        assert chat.stats.num_accepted > 0
