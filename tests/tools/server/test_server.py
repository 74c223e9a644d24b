"""The server behind a real socket on the loopback device, asked by a real client."""

import importlib
import json
import time

import httpx
import pytest

from hf_speculate.tools.server.text_stream import TextStream
from tests.tiny import MAX_LEN
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.tools.server.serving import MANY, NUM_NEW, PATH, body

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
NEUTRAL = importlib.import_module("hf_speculate.tools.server.schemas").NEUTRAL


@pytest.fixture(scope="module")
def text(engine):
    """The greedy answer to the question, by plain decoding."""
    inputs = engine.tokenizer("# a word\n", return_tensors="pt")
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    ids = engine.target.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
    return engine.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


def streamed(client, **options):
    """The text of a streamed answer, and its events, without the last one, which says that it is done."""
    with client.stream("POST", PATH, json=body(stream=True, **options)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"]), *events


def answered(client, **options):
    """Text and reason of the end of a whole answer, and its usage."""
    answer = client.post(PATH, json=body(**options)).json()
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]


def test_a_whole_answer_is_that_of_generate(client, text):
    answer = client.post(PATH, json=body()).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "org/tiny")
    (choice,) = answer["choices"]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": text}, "length")
    counts = [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")]
    assert counts == [len("# a word\n"), NUM_NEW, len("# a word\n") + NUM_NEW]
    speculation = answer["usage"]["speculation"]
    assert 0 < speculation["rounds"] < NUM_NEW
    assert 0 < speculation["acceptance_rate"] <= 1 < speculation["mean_acceptance_length"]


def test_streamed_pieces_join_to_the_same_answer_and_are_counted_when_asked(client, text):
    joined, *events, last, usage = streamed(client, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined == text
    assert len(events) > 3
    assert last["choices"][0]["finish_reason"] == "length"
    assert {(event["object"], event["id"]) for event in events} == {("chat.completion.chunk", last["id"])}
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], NUM_NEW)
    assert "usage" not in streamed(client)[-1]


def test_the_text_ends_before_a_stop_string_and_with_its_eos(client, engine, text, monkeypatch):
    stop = text[9:12]
    cut = text[: text.index(stop)]
    *answer, usage = answered(client, stop=[stop, "never in the text"])
    assert answer == [cut, "stop"]
    assert usage["completion_tokens"] == len(cut) + len(stop)  # a token is a character here
    joined, *_, last = streamed(client, stop=stop)
    assert (joined, last["choices"][0]["finish_reason"]) == (cut, "stop")
    eos = engine.tokenizer.convert_tokens_to_ids(text[5])
    monkeypatch.setattr(engine.target.generation_config, "eos_token_id", eos)
    assert answered(client)[:2] == (text[: text.index(text[5]) + 1], "stop")


def test_what_cannot_be_served_is_refused_in_openais_form(client, engine, monkeypatch):
    for options, status, param, words in (
        ({"n": 2}, 400, "n", "n must be 1, got 2; other values are not supported"),
        ({"model": "gpt"}, 404, "model", "model must be 'org/tiny'"),
        ({"temprature": 1}, 400, "temprature", "Extra inputs are not permitted"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"stop": ["a", ""]}, 400, "stop", "none of them empty"),
        ({"max_tokens": MAX_LEN}, 400, "messages", f"at most {MAX_LEN} tokens"),
    ):
        response = client.post(PATH, json=body(**options, stream=True))
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (response.status_code, error["type"], error["param"]) == (status, "invalid_request_error", param)
        assert words in error["message"]
    for prompt, words in ((["a", "b"], "one prompt, got 2"), ([999], "token ids in [0, "), ("", "at least one token")):
        error = client.post("/v1/completions", json={"prompt": prompt}).json()["error"]
        assert error["param"] == "prompt" and words in error["message"]
    assert client.post(PATH, content=b'{"messages": ').json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert "must have a chat template" in client.post(PATH, json=body()).json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200  # draws a seed


def test_neutral_values_of_fields_that_are_not_supported_pass(client, text):
    neutral = {name: values[0] for name, values in NEUTRAL.items()} | {"user": "me", "metadata": {"a": "b"}}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "word"}]
    for options in (neutral, dict.fromkeys(NEUTRAL), {"messages": [{"role": "user", "content": parts}]}):
        assert answered(client, **options)[0] == text


def test_the_model_is_listed_and_found_by_its_full_and_its_short_name(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("org/tiny", "model")
    for name in ("org/tiny", "tiny"):
        assert client.get(f"/v1/models/{name}").json() == model
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_client_that_leaves_ends_its_generation(client, slow, text):
    before, now = slow.num, -1
    with pytest.raises(httpx.ReadTimeout):
        client.post(PATH, json=body(max_tokens=MANY), timeout=0.3)
    while now != slow.num:
        now = slow.num
        time.sleep(0.5)
    assert now - before < MANY // 8  # a round holds four tokens at most
    slow.seconds = 0.0
    assert answered(client)[0] == text


def test_pieces_hold_whole_characters_and_no_beginning_of_a_stop_string():
    tokenizer = byte_level_tokenizer(["st"])
    text, stream, whole = "", TextStream(tokenizer, ["stop", "zz"]), "naïve s sto 日本 stip stop, and more"
    ids = tokenizer(whole)["input_ids"]
    for num_ids in range(1, len(ids) + 1):
        text += stream.read(ids[:num_ids])
        assert stream.read(ids[: num_ids - 1]) == ""  # a row that is decoded again
        assert whole.startswith(text) and not text.endswith(("s", "st", "sto", "z"))
    assert text + stream.read(ids, is_end=True) == "naïve s sto 日本 stip "
    assert stream.is_cut
    stream, ids = TextStream(tokenizer, ["stop"]), tokenizer("a sto")["input_ids"]
    assert (stream.read(ids), stream.read(ids, is_end=True)) == ("a ", "sto")  # the end gives what was held
    assert not stream.is_cut
