"""The chat example: the answers of a chat that reads everything anew, and far fewer tokens read."""

import io
import string
from pathlib import Path

import pytest
import torch

import hf_speculate
from tests.tiny import make_model, noisy_copy
from tests.tiny_tokenizers import letters_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "chat.py"
LINES = ["a first turn", "and then", "one more"]
OPTIONS = {"max_new_tokens": 12, "num_assistant_tokens": 3, "do_sample": False}


@pytest.fixture
def models():
    tokenizer = letters_tokenizer([*string.ascii_letters, *string.digits, " ", "#", "\n", "(", ")"])
    target = hf_speculate.enable(make_model("llama", vocab_size=len(tokenizer)))
    return target, noisy_copy(target), tokenizer


def query_lens(model):
    """Tokens that each of the model's forwards reads, as they come."""
    lens = []
    model.register_forward_pre_hook(lambda _, args, kwargs: lens.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    return lens


def fresh_answer(models, messages):
    target, draft, tokenizer = models
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **OPTIONS)
    return tokenizer.decode(output[0, ids.shape[1] :]), ids.shape[1]


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_kept_cache_gives_the_answers_of_a_fresh_one(import_example, models, rewrites):
    example = import_example("chat")
    target, draft, tokenizer = models
    tokenizer.chat_template = example.TEMPLATE
    if rewrites:  # answers stand in later prompts otherwise than they were generated
        tokenizer.chat_template = example.TEMPLATE.replace(
            "{% else %}{{ message['content'] }}", "{% else %}({{ message['content'] | upper }})"
        )
    chat = example.Chat(*models, **OPTIONS)
    lens, draft_lens = query_lens(target), query_lens(draft)
    for number, line in enumerate(LINES):
        lens.clear()
        draft_lens.clear()
        num_known = chat.cache.get_seq_length()
        answer = chat.say(line)
        num_read, num_read_by_draft = lens[0], draft_lens[0]
        expected, num_prompt = fresh_answer(models, chat.messages[:-1])
        assert answer == expected
        assert chat.stats.num_drafted > 0
        if number and not rewrites:
            assert num_read == num_prompt - num_known
            assert num_read_by_draft < num_prompt - num_known + 8
        if number and rewrites:
            assert num_prompt - num_known < num_read < num_prompt


@pytest.mark.slow
def test_the_script_answers_every_line(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a function that sorts\nand its test\n"))
    assert run("chat.py", "--tiny", "--max-new-tokens", "8").count("mean acceptance length") == 2
