"""Test streams that report the origin of each token: the target or the draft source."""

import asyncio
import importlib
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

import hf_speculate
from hf_speculate.options.refill.row_prompts import RowPrompt, RowResult
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.text_request import DecodeResult, Piece, TextRequest
from hf_speculate.tools.server.text_stream import TextStream
from hf_speculate.tools.server.token_origins import (
    TARGET,
    SpeculationTotals,
    TokenPiece,
    TokenTexts,
)
from tests.support.tiny import make_model, noisy_copy
from tests.support.tiny_tokenizers import byte_level_tokenizer, letters_tokenizer
from tests.tools.server.serving import NUM_NEW, PATH, body

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
DRAFT = "model LlamaForCausalLM"


def streamed(client, word="a word", **options):
    """Return the text, tokens and totals of a streamed answer; chunks must match their tokens."""
    messages = [{"role": "user", "content": word}]
    fields = body(stream=True, speculation=True, messages=messages, **options)
    text, tokens, totals = "", [], None
    with client.stream("POST", PATH, json=fields) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    for event in map(json.loads, lines[:-1]):
        content = "".join(choice["delta"].get("content", "") for choice in event["choices"])
        news = event.get("speculation", {"tokens": []})
        assert content == "".join(token["text"] for token in news["tokens"])
        text, tokens = text + content, tokens + news["tokens"]
        totals = news if "drafted" in news else totals
    return text, tokens, totals


def rounds_of(engine):
    """Return the origins of the greedy answer's tokens, from the rounds of a `generate()` call."""
    reports, options = [], {"max_new_tokens": NUM_NEW, "do_sample": False, **engine.options}
    inputs = engine.tokenizer("# a word\n", return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    engine.target.generate(**inputs, **options)  # the first call of a type measures a plain step
    engine.target.generate(**inputs, **options, speculation_callback=reports.append)
    origins = [TARGET]
    for report in reports:
        (num_accepted,), (num_emitted,) = report.num_accepted, report.num_emitted
        origins += [DRAFT] * min(num_accepted, num_emitted) + [TARGET] * (
            num_emitted > num_accepted
        )
    return origins


def test_tokens_have_the_origins_of_their_rounds(client, engine):
    text, tokens, totals = streamed(client)
    origins = [token["origin"] for token in tokens]
    assert origins == rounds_of(engine)
    assert 0 < origins.count(DRAFT) == totals["accepted"] < totals["drafted"]
    assert totals["rounds"] == origins.count(TARGET) - 1
    assert totals["seconds"] > 0
    with client.stream("POST", PATH, json=body(stream=True)) as response:
        events = [
            json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
        ]
    assert (
        "".join(
            choice["delta"].get("content", "") for event in events for choice in event["choices"]
        )
        == text
    )
    assert not any("speculation" in event for event in events)


def test_held_and_cut_text_stays_with_its_tokens(client):
    whole, tokens, _ = streamed(client)
    stop = whole[9:12]
    # A prefix of the second stop string is held back.
    text, cut, totals = streamed(client, stop=[stop, 2 * whole[2:4]])
    assert text == whole[: whole.index(stop)]
    # Here, a token is a character.
    assert [token["text"] for token in cut] == [*text, *[""] * len(stop)]
    assert [token["origin"] for token in cut] == [token["origin"] for token in tokens[: len(cut)]]
    assert totals["accepted"] == sum(token["origin"] != TARGET for token in cut)


def test_plain_decoding_has_no_drafted_tokens(client):
    _, tokens, totals = streamed(client, num_assistant_tokens=0)
    assert {token["origin"] for token in tokens} == {TARGET}
    assert (totals["drafted"], totals["accepted"], len(tokens)) == (0, 0, NUM_NEW)


def test_concurrent_streams_keep_their_tokens(client, slow):
    words = ["a word", "two words", "Another", "z"]
    slow.most_at_once, alone = 0, [streamed(client, word) for word in words]
    with ThreadPoolExecutor(len(words)) as pool:
        together = list(pool.map(lambda word: streamed(client, word), words))
    assert [(text, tokens) for text, tokens, _ in together] == [
        (text, tokens) for text, tokens, _ in alone
    ]
    assert len({text for text, _, _ in alone}) == len(words)


def test_speculation_field_needs_a_streamed_chat(client):
    for path, fields, words in (
        (PATH, body(speculation=True), "stream must be true with speculation, got false"),
        ("/v1/completions", {"prompt": "a", "speculation": True}, "speculation must be left out"),
    ):
        response = client.post(path, json=fields)
        assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_requests_decoded_one_by_one_have_origins():
    tokenizer = letters_tokenizer([chr(ord("0") + index) for index in range(60)])
    target = hf_speculate.enable(make_model("llama", vocab_size=len(tokenizer)))
    options = {"assistant_model": noisy_copy(target), "num_assistant_tokens": 3}
    engine = Engine(target, tokenizer, "tiny", options, num_rows=1)
    prompt = RowPrompt([3, 4, 5], None, {"max_new_tokens": NUM_NEW, "do_sample": False})
    found = []

    async def run():
        async def is_gone():
            return False

        async for _, piece in engine.stream([TextRequest(prompt, has_origins=True)], is_gone):
            found.append(piece)

    for _ in range(2):  # the first call of a type measures a plain step
        found.clear()
        asyncio.run(run())
    *pieces, result = found
    tokens = [token for piece in pieces for token in piece.tokens]
    assert all(piece.text == "".join(token.text for token in piece.tokens) for piece in pieces)
    assert "".join(token.text for token in tokens) == tokenizer.decode(result.row.token_ids)
    assert 0 < sum(token.origin == DRAFT for token in tokens) == result.totals.num_accepted
    assert sum(token.origin == TARGET for token in tokens) == result.totals.num_rounds + 1
    assert result.totals.seconds > 0 and result.totals.speedup > 0
    engine.close()


def test_special_tokens_for_a_template_have_no_text():
    tokenizer = byte_level_tokenizer([], eos_token="<|end|>")
    target = hf_speculate.enable(make_model("llama", vocab_size=len(tokenizer)))
    engine = Engine(target, tokenizer, "tiny", {}, num_rows=1)
    always = {(tokenizer.eos_token_id,): 100.0}
    options = {"max_new_tokens": 2, "do_sample": False, "sequence_bias": always}
    prompt = RowPrompt([3, 4, 5], None, options)

    async def run():
        async def is_gone():
            return False

        request = TextRequest(prompt, shows_special=True, has_origins=True)
        return [piece async for _, piece in engine.stream([request], is_gone)][:-1]

    pieces = asyncio.run(run())
    engine.close()
    assert {piece.text for piece in pieces} == {""}  # one piece or two, depending on the event loop
    assert [token.text for piece in pieces for token in piece.tokens] == ["", ""]
    assert "".join(piece.marked.text for piece in pieces) == 2 * "<|end|>"


def test_tokens_of_tool_calls_are_shown():
    answers, row = importlib.import_module("hf_speculate.tools.server.answers"), RowPrompt([1])
    asked = answers.Asked([TextRequest(row, has_origins=True)], 1, True, True, False, True, None)
    text, totals = 'so <tool_call>{"name": "f"}</tool_call>', SpeculationTotals(5, 4, 3, 0.5, None)
    result = RowResult(row, [1], 3, 5, 4)

    async def pieces():
        for character in text:
            yield 0, Piece(character, [], [TokenPiece(character, TARGET)])
        yield 0, DecodeResult("stop", result, totals)

    async def run():
        source = pieces()
        lines = [line async for line in answers.events(asked, source, await anext(source), {})]
        return [json.loads(line[6:]) for line in lines[:-1]]

    events = asyncio.run(run())
    tokens = [
        token for event in events for token in event.get("speculation", {"tokens": []})["tokens"]
    ]
    assert "".join(token["text"] for token in tokens) == text
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "so "
    counts = {"drafted": 5, "accepted": 4, "rounds": 3, "seconds": 0.5, "speedup": None}
    assert events[-1]["speculation"] == {"tokens": [], **counts}
    assert events[-1]["choices"][0]["delta"]["tool_calls"]


WHOLE = "naïve s sto 日本 stip <|end|> stop, and more"


@pytest.mark.parametrize("stop", ["stop", "e <|end|>", "\N{SNOWMAN}"])
def test_token_texts_join_to_the_text_in_any_chunks(stop):
    tokenizer = byte_level_tokenizer(["st", "and"], eos_token="<|end|>")
    ids, draw = tokenizer(WHOLE)["input_ids"], random.Random(0)
    ids += tokenizer("日")["input_ids"][:1]  # part of a character
    expected = TextStream(tokenizer, [stop]).read(ids, is_end=True)
    for _ in range(20):
        texts, found, num = TokenTexts(TextStream(tokenizer, [stop])), [], 0
        while num < len(ids):
            num = min(num + draw.randint(1, 5), len(ids))
            found += [text.shown for text in texts.read(ids[:num])]
            assert expected.startswith("".join(found))
        found += [text.shown for text in texts.read(ids, is_end=True)]
        assert "".join(found) == expected
        assert len(found) == len(ids)
    if "日" in expected:
        assert {"ï", "日", "本", "st"} <= set(found)
