"""`hf-speculate generate` on the bundled pair, and commands with a draft head in place of a draft model."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_speculate.generation.mixin import SpeculativeGenerationMixin
from hf_speculate.tools.cli.arguments import arguments_of
from hf_speculate.tools.cli.loading import names_head
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.cli.options import Models, Speculation
from tests.draft.heads.designs import EAGLE3, make_weights, write_speculators
from tests.tiny import make_model
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.tools.dataset.common import save_pair

PAIR = Path(__file__).parents[3] / "examples" / "pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
PROMPTS = ["def main():\n", "class Stack:\n"]
NUM_TOKENS = 12
COMMON = ["-n", str(NUM_TOKENS), "--dtype", "float64", "--device", "cpu"]


@pytest.fixture(scope="module")
def plain_texts() -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float64)
    inputs = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]
    outputs = [target.generate(ids, max_new_tokens=NUM_TOKENS)[0, ids.shape[1] :] for ids in inputs]
    return [tokenizer.decode(output, skip_special_tokens=True) for output in outputs]


@pytest.mark.parametrize("extra", [["-d", DRAFT, "-k", "3"], []], ids=["draft", "plain"])
def test_the_text_is_that_of_plain_decoding_and_the_remarks_stand_apart(extra, plain_texts, capsys):
    assert main(["generate", TARGET, PROMPTS[0], *extra, *COMMON]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == plain_texts[0].strip()
    assert "12 tokens in" in err
    assert ("accepted" in err) is bool(extra)


def test_stop_strings_of_a_saved_config_end_the_text(tmp_path, capsys):
    words = ["generate", str(save_pair(tmp_path)[0]), "bcdefg", "-d", str(tmp_path / "draft"), *COMMON]
    assert main(words) == 0
    whole = capsys.readouterr().out.strip()
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"stop_strings": [whole[4:6]]}))
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == whole[: whole.index(whole[4:6]) + 2]


def test_a_template_begins_the_text_itself_and_a_chat_remembers(tmp_path, monkeypatch, capsys):
    tokenizer, texts, generate = byte_level_tokenizer([], bos_token="<begin>"), [], SpeculativeGenerationMixin.generate
    begin = [("<begin>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=begin)
    tokenizer.chat_template = "<begin>{% for message in messages %}[{{ message.content }}]{% endfor %}"
    make_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def noted(model, input_ids, **arguments):
        texts.append(tokenizer.decode(input_ids[0]))
        return generate(model, input_ids=input_ids, **arguments)

    monkeypatch.setattr(SpeculativeGenerationMixin, "generate", noted)
    monkeypatch.setattr("sys.stdin", io.StringIO("def main():\nclass Stack:\n"))
    for words in (["generate", "hi", "--chat"], ["generate", "hi"], ["chat"]):
        assert main([words[0], str(tmp_path), *words[1:], "--lookup", "4", *COMMON]) == 0
    assert texts[:3] == ["<begin>[hi]", "<begin>hi", "<begin>[def main():]"]
    assert texts[3].startswith(texts[2]) and texts[3].endswith("[class Stack:]")
    answer = texts[3][len(texts[2]) : -len("[class Stack:]")].strip("[]")
    assert answer and answer in capsys.readouterr().out


def test_prompts_come_from_a_pipe(plain_texts, monkeypatch, tmp_path, capsys):
    output, lines = tmp_path / "out.json", [{"prompt": prompt, "id": f"p{at}"} for at, prompt in enumerate(PROMPTS)]
    words = ["generate", TARGET, "-d", DRAFT, "-k", "adaptive:3", "--json", "--output", str(output), *COMMON]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(map(json.dumps, lines)).encode())))
    assert main([*words, "--file", "-"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["id"], one["text"]) for one in found] == [("p0", plain_texts[0]), ("p1", plain_texts[1])]
    assert json.loads(output.read_text()) == {"results": found}
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS[0]))
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["text"] == plain_texts[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(words) == 2
    assert "there must be a prompt, got none" in capsys.readouterr().err


def test_sampling_options_and_settings_of_generation_configs_reach_the_model():
    settings = {"top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2, "seed": 3, "lookup": 5}
    given = {"num_assistant_tokens": "adaptive:9", "settings": ["min_p=0.1", "verifier=block"]}
    found = arguments_of(Speculation(target="", sample=True, **settings, **given))
    settings["prompt_lookup_num_tokens"] = settings.pop("lookup")
    schedule = {"num_assistant_tokens": 9, "num_assistant_tokens_schedule": "adaptive"}
    assert found == {"max_new_tokens": 256, "do_sample": True, "min_p": 0.1, "verifier": "block"} | settings | schedule


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


DESIGN = replace(
    EAGLE3, hidden_size=64, target_hidden_size=192, vocab_size=4096, has_embeddings=True, aux_layers=(2, 8, 13)
)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return str(write_speculators(tmp_path_factory.mktemp("head") / "eagle", DESIGN, make_weights(DESIGN)))


def test_a_head_is_timed_without_transformers_own_methods(head, tmp_path):
    prompts, result = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text(PROMPTS[0])
    words = ["bench", TARGET, str(prompts), "-d", head, "-k", "2", "-v", "greedy", "--thresholds", "", *COMMON]
    assert main([*words, "--output", str(result)]) == 0
    found = json.loads(result.read_text())
    assert [method["name"] for method in found["methods"]] == ["plain, greedy", "greedy, K = 2"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "num_mtp_layers": 1}))
    assert names_head(Models(target=str(tmp_path), draft=str(tmp_path)))  # MTP layers of the target itself


def test_check_says_whether_a_head_fits(head, tmp_path, capsys):
    assert main(["check", TARGET, "-d", head]) == 0
    assert f"ok: eagle as a draft head for {TARGET}" in capsys.readouterr().out
    assert main(["check", DRAFT, "-d", head, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["level"], report["spec"]["kind"]) == ("does not fit", "eagle3")
    (tmp_path / "config.json").write_text('{"speculators_model_type": "medusa"}')
    assert main(["check", TARGET, "-d", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["level"] == "not supported"
    assert main(["check", "no/such-model", "-d", head]) == 2
    assert "target must be a folder with a config.json" in capsys.readouterr().err
