"""`pipeline(..., assistant_model=draft)` hands the fields through, for one prompt and for batches."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TextStreamer, pipeline

import hf_speculate
from tests.cases import each_value, pair
from tests.generation.test_pipelines_of_speech_and_images import readers_of_images  # noqa: F401  # a fixture
from tests.tiny import make_model
from tests.tiny_tokenizers import letters_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"  # one for each of the 64 ids
PROMPTS = ["bcd", "efghij", "kl", "mnopq"]


@pytest.fixture(scope="module")
def pipelines():
    target, draft = pair("llama")
    backend = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(CHARACTERS)}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="a", padding_side="left")
    make = {"task": "text-generation", "model": target, "tokenizer": tokenizer}
    return pipeline(**make), pipeline(**make, assistant_model=draft)


def texts(outputs) -> list[str]:
    return [output[0]["generated_text"] if isinstance(output, list) else output["generated_text"] for output in outputs]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_greedy_texts_equal_those_of_the_plain_pipeline(pipelines, batch_size):
    plain, ours = pipelines
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "batch_size": batch_size}
    assert texts(plain(PROMPTS, **options)) == texts(ours(PROMPTS, **options, speculation_stats=stats))
    assert stats.verifier == "greedy"


@pytest.mark.parametrize(
    ("verifier", "do_sample"),
    [("rejection", True), ("block", True), ("coupled", True), ("typical", False), ("typical", True)],
)
def test_the_fields_reach_the_decoder(pipelines, verifier, do_sample):
    _, ours = pipelines
    stats = hf_speculate.SpeculationStats()
    outputs = ours(
        PROMPTS,
        batch_size=4,
        max_new_tokens=8,
        verifier=verifier,
        do_sample=do_sample,
        num_assistant_tokens=3,
        seed=1,
        speculation_stats=stats,
    )
    assert len(outputs) == 4
    assert stats.verifier == verifier
    assert len(stats.verified_per_position) == 3


class Streamed(TextStreamer):
    """Keeps the pieces that it would print."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.pieces = []

    def on_finalized_text(self, text, stream_end=False):
        self.pieces.append(text)


@each_value(prompt=["bcd", "kl"], do_sample=[False, True])
def test_a_streamer_is_given_the_plain_pipelines_pieces(pipelines, prompt, do_sample):
    plain, ours = pipelines
    options = {"max_new_tokens": 12, "return_full_text": False}
    if do_sample:
        options |= {"do_sample": True, "verifier": "coupled", "seed": 3}
    streamers = [Streamed(plain.tokenizer) for _ in range(2)]
    stats = hf_speculate.SpeculationStats()
    own = {"num_assistant_tokens": 3, "speculation_stats": stats}
    expected = plain(prompt, streamer=streamers[0], **options)
    assert ours(prompt, streamer=streamers[1], **options, **own) == expected
    assert streamers[1].pieces == streamers[0].pieces
    assert len(streamers[0].pieces) > 12  # a token each, and the end
    assert "".join(streamers[1].pieces).split() == expected[0]["generated_text"].split()
    assert 0 < stats.num_rounds < stats.num_emitted


CHATS = [
    [{"role": "user", "content": "bcd"}],
    [{"role": "user", "content": "efgh"}, {"role": "assistant", "content": "ij"}, {"role": "user", "content": "kl"}],
]


@each_value(batch_size=[1, 2], do_sample=[False, True])
def test_chats_are_answered_as_by_the_plain_pipeline(batch_size, do_sample):
    target, draft = pair("llama")
    tokenizer = letters_tokenizer(CHARACTERS, pad_token="a")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}.{% endfor %}"
    make = {"task": "text-generation", "model": target, "tokenizer": tokenizer}
    plain, ours = pipeline(**make), pipeline(**make, assistant_model=draft)
    options = {"max_new_tokens": 12, "batch_size": batch_size}
    if do_sample:
        options |= {"do_sample": True, "verifier": "coupled", "seed": 3}
    stats = hf_speculate.SpeculationStats()
    outputs = ours(copy.deepcopy(CHATS), **options, num_assistant_tokens=3, speculation_stats=stats)
    assert outputs == plain(copy.deepcopy(CHATS), **options)
    assert 0 < stats.num_rounds < stats.num_emitted
    answers = [output[0]["generated_text"][-1] for output in outputs]
    assert {answer["role"] for answer in answers} == {"assistant"}
    rendered = plain(["bcd.", "efgh.ij.kl."], **options, return_full_text=False)
    assert [answer["content"] for answer in answers] == texts(rendered)


@each_value(field=["eos_token_id", "pad_token_id", "bos_token_id"], do_sample=[False, True])
def test_fault_h_a_draft_of_other_special_ids_drafts(pipelines, field, do_sample):
    """transformers asks for the assistant's tokenizer in the constructor, then raises at the call because of it."""
    plain, _ = pipelines
    target, draft = pair("llama")
    other = copy.deepcopy(draft)
    setattr(other.config, field, 7)
    setattr(other.generation_config, field, 7)
    make = {"task": "text-generation", "model": target, "tokenizer": plain.tokenizer}
    in_constructor = pipeline(**make, assistant_model=other, assistant_tokenizer=copy.deepcopy(plain.tokenizer))
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "batch_size": 4, "speculation_stats": stats, "num_assistant_tokens": 3, "seed": 1}
    if do_sample:
        options |= {"do_sample": True, "verifier": "coupled"}
    expected = texts(plain(PROMPTS, **options))
    assert texts(in_constructor(PROMPTS, **options)) == expected
    assert stats.num_accepted > 0
    assert texts(plain(PROMPTS, assistant_model=other, **options)) == expected
    assert stats.num_accepted > 0


def test_fault_h_a_pipeline_of_images_takes_the_draft_with_the_call_alone(readers_of_images):  # noqa: F811
    """transformers' constructor takes `assistant_model` there, and no call hears of it."""
    plain, ours, draft = readers_of_images
    make = {"task": "image-text-to-text", "processor": ours.processor, "dtype": ours.model.dtype}
    in_constructor = pipeline(model=ours.model, assistant_model=draft, **make)
    inputs = {"images": [Image.new("RGB", (8, 8), (9, 90, 200))], "text": ["a<image>bc"]}
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = plain(**inputs, generate_kwargs=dict(options))
    stats = hf_speculate.SpeculationStats()
    own = {"num_assistant_tokens": 3, "speculation_stats": stats}
    assert in_constructor(**inputs, generate_kwargs=options | own) == expected
    assert stats.num_rounds == 0
    assert in_constructor(**inputs, generate_kwargs=options | own | {"assistant_model": draft}) == expected
    assert stats.num_drafted > 0


@pytest.mark.slow
def test_the_example_runs():
    example = Path(__file__).parents[2] / "examples" / "pipeline.py"
    result = subprocess.run([sys.executable, example, "--tiny"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    labels = re.findall(r"^(a batch|drawn|a chat): .*plain decoding", result.stdout, re.M)
    verifiers = re.findall(r"^verifier: (\w+)$", result.stdout, re.M)
    assert list(zip(labels, verifiers, strict=True)) == [
        ("a batch", "greedy"),
        ("drawn", "coupled"),
        ("a chat", "greedy"),
    ]
    lengths = re.findall(r"^mean acceptance length: ([\d.]+) ", result.stdout, re.M)
    assert len(lengths) == 3
    assert all(float(length) > 1 for length in lengths)
    (streamed,) = re.findall(r"drawn: .*?finished rows: [^\n]*\n(.*?)\na chat: ", result.stdout, re.S)
    assert len(streamed.split()) > 1


def test_a_draft_of_another_tokenizer_drafts_from_the_constructor(pipelines):
    """Its letters have other ids, and some it lacks."""
    plain, _ = pipelines
    target, _ = pair("llama")
    tokenizer = letters_tokenizer(CHARACTERS[40::-1], pad_token="a")
    make = {"task": "text-generation", "model": target, "tokenizer": plain.tokenizer}
    ours = pipeline(**make, assistant_model=make_model("qwen2", vocab_size=41), assistant_tokenizer=tokenizer)
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "batch_size": 4}
    own = {"speculation_stats": stats, "num_assistant_tokens": 3}
    assert texts(ours(PROMPTS, **options, **own)) == texts(plain(PROMPTS, **options))
    assert stats.num_drafted > 0
