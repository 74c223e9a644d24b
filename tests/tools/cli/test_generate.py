"""`hf-speculate generate` on the bundled pair, and what it says when it cannot."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_speculate.generation.mixin import SpeculativeGenerationMixin
from hf_speculate.tools.cli import main as cli
from hf_speculate.tools.cli.arguments import decoding_of
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.cli.options import Generation, Speculation
from tests.tiny import make_model
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.tools.dataset.common import save_pair

PAIR = Path(__file__).parents[3] / "examples" / "pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
PROMPTS = ["def main():\n", "class Stack:\n"]
LETTERS_PROMPT = "bcdefg"
NUM_TOKENS = 12
COMMON = ["-n", str(NUM_TOKENS), "--dtype", "float64", "--device", "cpu"]


@pytest.fixture(scope="module")
def plain_texts() -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float64)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = target.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=NUM_TOKENS
        )
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("extra", [["-d", DRAFT, "-k", "3"], ["--lookup", "4"], []], ids=["draft", "lookup", "plain"])
def test_the_text_is_that_of_plain_decoding_and_the_remarks_stand_apart(extra, plain_texts, capsys):
    assert main(["generate", TARGET, PROMPTS[0], *extra, *COMMON]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == plain_texts[0].strip()
    assert "12 tokens in" in err
    assert ("accepted" in err) is bool(extra)


def test_the_prompts_of_a_file_are_decoded_in_order(plain_texts, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": prompt, "id": f"p{index}"}) for index, prompt in enumerate(PROMPTS))
    )
    assert main(["generate", TARGET, "--file", str(file), "-d", DRAFT, *COMMON]) == 0
    out, err = capsys.readouterr()
    assert [text in out for text in plain_texts] == [True, True]
    assert out.index(plain_texts[0]) < out.index(plain_texts[1])
    assert err.index("p0") < err.index("p1")


@pytest.fixture
def stopping_pair(tmp_path) -> tuple[str, str, str]:
    """A tiny pair whose target's generation config has a stop string, with that string."""
    save_pair(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    target.generation_config.eos_token_id = None
    ids = tokenizer(LETTERS_PROMPT, return_tensors="pt")["input_ids"]
    text = tokenizer.decode(target.generate(ids, max_new_tokens=NUM_TOKENS)[0, ids.shape[1] :])
    stop = text[4:6]
    target.generation_config.stop_strings = [stop]
    target.generation_config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target"), str(tmp_path / "draft"), text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize("with_draft", [True, False])
def test_stop_strings_of_a_saved_config_end_the_text(with_draft, stopping_pair, capsys):
    target, draft, expected = stopping_pair
    assert main(["generate", target, LETTERS_PROMPT, *(["-d", draft] if with_draft else []), *COMMON]) == 0
    assert capsys.readouterr().out.strip() == expected.strip()


@pytest.fixture
def chat_target(tmp_path) -> str:
    """A tiny model whose tokenizer begins every text with a token, as its chat template does too."""
    tokenizer = byte_level_tokenizer([], eos_token="<end>", bos_token="<begin>", pad_token="<pad>")
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", begin)]
    )
    tokenizer.chat_template = "<begin>{% for message in messages %}[{{ message.content }}]{% endfor %}"
    make_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    return str(tmp_path / "chat")


@pytest.fixture
def read_texts(monkeypatch) -> list[str]:
    """What models are given to read, as text."""
    texts, generate = [], SpeculativeGenerationMixin.generate

    def noted(model, input_ids, **arguments):
        texts.append(AutoTokenizer.from_pretrained(model.name_or_path).decode(input_ids[0]))
        return generate(model, input_ids=input_ids, **arguments)

    monkeypatch.setattr(SpeculativeGenerationMixin, "generate", noted)
    return texts


def test_a_chat_answers_every_line_and_remembers(chat_target, monkeypatch, read_texts, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("def main():\nclass Stack:\n"))
    assert main(["chat", chat_target, "--lookup", "4", *COMMON]) == 0
    first, second = read_texts
    assert first == "<begin>[def main():]"
    assert second.startswith(first)
    assert second.endswith("[class Stack:]")
    answer = second[len(first) : -len("[class Stack:]")].strip("[]")
    assert answer
    assert answer in capsys.readouterr().out


def test_a_template_begins_the_text_itself_and_the_tokenizer_a_bare_prompt(chat_target, read_texts):
    assert main(["generate", chat_target, "hi", "--chat", "--lookup", "4", *COMMON]) == 0
    assert main(["generate", chat_target, "hi", "--lookup", "4", *COMMON]) == 0
    assert read_texts == ["<begin>[hi]", "<begin>hi"]


@pytest.mark.parametrize("words", [[], ["-"]])
def test_a_piped_prompt_is_decoded_to_json(words, plain_texts, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS[0]))
    output = tmp_path / "out.json"
    options = ["-d", DRAFT, "-k", "adaptive:3", "--json", "--output", str(output)]
    assert main(["generate", TARGET, *words, *options, *COMMON]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["text"], found["num_tokens"]) == (1, plain_texts[0], NUM_TOKENS)
    assert 0 <= found["acceptance_rate"] <= 1
    assert json.loads(output.read_text()) == {"results": [found]}


def test_prompts_come_from_a_pipe_as_json_lines(plain_texts, monkeypatch, capsys):
    lines = "\n".join(json.dumps({"prompt": prompt, "id": f"p{place}"}) for place, prompt in enumerate(PROMPTS))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert main(["generate", TARGET, "--file", "-", "--lookup", "4", "--json", *COMMON]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["id"], one["text"]) for one in found] == [("p0", plain_texts[0]), ("p1", plain_texts[1])]


def test_sampling_options_and_settings_of_generation_configs_reach_the_model():
    generation = Generation(
        sample=True, top_p=0.9, top_k=7, repetition_penalty=1.2, seed=3, settings=["min_p=0.1", "verifier=block"]
    )
    decoding = decoding_of(generation, Speculation(num_assistant_tokens="adaptive:9", lookup=5))
    assert decoding.sampling == {"top_p": 0.9, "top_k": 7}
    assert decoding.options == {"repetition_penalty": 1.2, "min_p": 0.1}
    speculation = {"num_assistant_tokens": 9, "num_assistant_tokens_schedule": "adaptive", "seed": 3}
    assert decoding.fields == speculation | {"prompt_lookup_num_tokens": 5, "verifier": "block"}
    assert decoding.arguments["max_new_tokens"] == 256


def test_help_and_version_load_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "from hf_speculate.tools.cli.main import main\n"
        "for words in (['--help'], ['-h'], ['bench', '-h'], ['--version'], ['generate']):\n"
        "    main(words)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_prompt_must_be_given(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", TARGET]) == 2
    assert "there must be a prompt, got an empty one" in capsys.readouterr().err


def test_every_command_is_helped_with(capsys):
    for name in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        assert main([name, "--help"]) == 0
        assert f"Usage: hf-speculate {name}" in capsys.readouterr().out


class _Screen(io.StringIO):
    """A standard output that notes what is written, and when among other events."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def write(self, text: str) -> int:
        if text:
            self.events.append(text)
        return super().write(text)


def test_text_is_written_as_it_comes(monkeypatch):
    events, outputs, generate = [], [], SpeculativeGenerationMixin.generate
    returned, told = "generate() has returned", "a round has ended"

    def noted(model, **arguments):
        output = generate(model, speculation_callback=lambda report: events.append(told), **arguments)
        outputs.append(output[0, arguments["input_ids"].shape[1] :])
        events.append(returned)
        return output

    monkeypatch.setattr(SpeculativeGenerationMixin, "generate", noted)
    screen = _Screen(events)
    monkeypatch.setattr("sys.stdout", screen)
    assert main(["generate", TARGET, PROMPTS[0], "-d", DRAFT, "-k", "2", *COMMON, "-n", "48"]) == 0
    assert screen.getvalue().strip() == AutoTokenizer.from_pretrained(TARGET).decode(outputs[0]).strip()
    before = events[: events.index(returned)]
    rounds_at_pieces = {before[:place].count(told) for place, event in enumerate(before) if event != told}
    assert len(rounds_at_pieces) >= 3, events  # pieces in several rounds, not all at the end
    assert events[len(before) + 1 :] == []
