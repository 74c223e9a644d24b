"""Test token bytes: they spell the text of an answer, and stops match as in transformers."""

import random

import pytest
import torch
from tokenizers import decoders
from transformers import StopStringCriteria

from hf_speculate.tools.server.logprobs import (
    TokenLogprob,
    chat_format,
    completion_format,
    num_chars,
)
from hf_speculate.tools.server.token_bytes import StopTexts, TokenBytes
from tests.support.tiny_tokenizers import (
    WORD_MARK,
    byte_level_tokenizer,
    letters_tokenizer,
    metaspace_tokenizer,
)

WORDS = ["st", "op", " the", "top", "pp"]
TEXT = "the stop, na\u00efve \u65e5\u672c stopp the the\n \U0001f600"
END = "</s>"


def sentencepiece_tokenizer(strips):
    """Make a tokenizer like Llama 2's; if it `strips`, it drops the first space of a text."""
    tokenizer = metaspace_tokenizer(WORDS, "abcdefghijklmnopqrstuvwxyz,", eos_token=END)
    if strips:
        parts = (
            decoders.Replace(WORD_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        )
        tokenizer.backend_tokenizer.decoder = decoders.Sequence([*parts])
    return tokenizer


TOKENIZERS = {
    "byte-level": lambda: byte_level_tokenizer(WORDS, eos_token=END),
    "sentencepiece": lambda: sentencepiece_tokenizer(strips=False),
    "stripped": lambda: sentencepiece_tokenizer(strips=True),
}


def logprobs_of(tokenizer, text):
    """Return the tokens of a text and its EOS, with alternatives.

    The alternatives are the token, the token before it, and a one-byte token.
    """
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    byte = tokenizer.convert_tokens_to_ids("<0x61>") if "<0x61>" in tokenizer.get_vocab() else 3
    return [
        TokenLogprob(
            own, -1.0, [(other, -0.5 - other / 1e6) for other in dict.fromkeys((own, before, byte))]
        )
        for before, own in zip([ids[-1], *ids], ids, strict=False)
    ]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bytes_of_log_probabilities_join_to_the_text(kind):
    tokenizer = TOKENIZERS[kind]()
    text = " " + TEXT if kind == "stripped" else TEXT
    tokens, token_bytes = logprobs_of(tokenizer, text), TokenBytes(tokenizer)
    shown = tokenizer.decode([token.token_id for token in tokens], skip_special_tokens=True)
    content = chat_format(tokens, token_bytes)["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == shown == TEXT
    assert any(entry["token"].startswith("bytes:\\x") for entry in content)
    for token, entry in zip(tokens, content, strict=True):
        first, *others = entry["top_logprobs"]
        assert (entry["bytes"], entry["token"]) == (first["bytes"], first["token"])
        assert len(others) == len(token.top) - 1


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_alternatives_of_equal_text_stay_apart(kind):
    tokenizer = TOKENIZERS[kind]()
    tokens, token_bytes = logprobs_of(tokenizer, "a" + TEXT), TokenBytes(tokenizer)
    answer = completion_format(tokens, token_bytes, is_begin=True)
    for token, name, top in zip(tokens, answer["tokens"], answer["top_logprobs"], strict=True):
        assert sorted(top.values()) == sorted(logprob for _, logprob in token.top)
        assert top[name] == dict(token.top)[token.token_id]
    letter = tokenizer("b")["input_ids"][-1]
    byte_id = tokenizer.get_vocab().get("<0x62>")
    if byte_id is not None:
        (top,) = completion_format([TokenLogprob(byte_id, -3.0, [(letter, -1.0)])], token_bytes)[
            "top_logprobs"
        ]
        assert sorted(top.values()) == [-3.0, -1.0] and top["b"] == -3.0


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_offsets_count_the_characters_of_the_text(kind):
    tokenizer = TOKENIZERS[kind]()
    tokens, token_bytes = logprobs_of(tokenizer, TEXT), TokenBytes(tokenizer)
    whole = completion_format(tokens, token_bytes, 5)
    shown = b"".join(token_bytes(token.token_id) for token in tokens[:-1]).decode()
    for at, (name, offset) in enumerate(zip(whole["tokens"], whole["text_offset"], strict=True)):
        if not name.startswith("bytes:") and name != END:
            assert shown[offset - 5 :].startswith(name), at
    assert (
        num_chars(tokens, token_bytes, is_begin=False) == len(shown) == whole["text_offset"][-1] - 5
    )


@pytest.mark.parametrize("kind", [*TOKENIZERS, "letters"])
def test_stops_are_found_as_in_transformers(kind):
    tokenizer = (
        letters_tokenizer([*"abcdefstop ,", END], eos_token=END)
        if kind == "letters"
        else TOKENIZERS[kind]()
    )
    draw, stops = random.Random(2), ("stop", "pp", "t" + END, " the ", "a")
    likely = [
        number
        for word in ("stop", "pptop", " the ", "a", END)
        for number in tokenizer(word)["input_ids"]
    ]
    criterion = StopStringCriteria(tokenizer, list(stops[:4]))
    own = StopTexts(TokenBytes(tokenizer), stops[:4], 0)
    rows = torch.tensor([draw.choices(likely, k=9) for _ in range(400)])
    found = own(rows).tolist()
    assert found == criterion(rows, None).tolist()
    assert 20 < sum(found) < 380


def test_stop_does_not_begin_in_the_prompt():
    tokenizer = byte_level_tokenizer(WORDS)
    ids = torch.tensor([tokenizer("st")["input_ids"] + tokenizer("op")["input_ids"]])
    token_bytes = TokenBytes(tokenizer)
    assert [StopTexts(token_bytes, ("stop",), num)(ids).item() for num in (0, 1)] == [True, False]


def test_stops_must_be_spellable_by_tokens():
    cases = {
        "letters": ("ab", "a~"),
        "byte-level": ("\u65e5", None),
        "sentencepiece": ("\u65e5\n", None),
    }
    for kind, (right, wrong) in cases.items():
        tokenizer = letters_tokenizer([*"ab"]) if kind == "letters" else TOKENIZERS[kind]()
        token_bytes = TokenBytes(tokenizer)
        assert token_bytes.can_write(right)
        assert wrong is None or not token_bytes.can_write(wrong)
