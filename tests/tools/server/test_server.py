"""Test the server behind a real socket on the loopback device with a real client."""

import asyncio
import importlib
import json
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import decoders
from transformers import StopStringCriteria

import hf_speculate
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.hosts import HostCheck
from hf_speculate.tools.server.text_stream import TextStream
from tests.support.tiny import MAX_LEN, make_model
from tests.support.tiny_tokenizers import byte_level_tokenizer, metaspace_tokenizer
from tests.tools.server.serving import MANY, NUM_NEW, PATH, WAIT_S, body

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
MESSAGE = {"role": "user", "content": ""}
Request = importlib.import_module("starlette.requests").Request
schemas = importlib.import_module("hf_speculate.tools.server.schemas")


TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


CALL = '<tool_call>{"name": "f"}</tool_call>'
TAGGED = '{"x": "</tool_call>"}'
ROW = SimpleNamespace(token_ids=[1], num_rounds=1, num_drafted=0, num_accepted=0)
NESTED = '<tool_call>{"name": "f", "arguments": ' + 3_000 * "[" + "</tool_call>"


def called(arguments):
    """Return a message of an assistant with a tool call."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture(scope="module")
def text(engine):
    """Return the greedy answer to the question, by plain decoding."""
    inputs = engine.tokenizer("# a word\n", return_tensors="pt")
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    ids = engine.target.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], **options
    )
    return engine.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


def streamed(client, **options):
    """Return the text of a streamed answer, and its events without the final "done"."""
    with client.stream("POST", PATH, json=body(stream=True, **options)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    return "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    ), *events


def answered(client, **options):
    """Return text and end reason of a whole answer, and its usage."""
    answer = client.post(PATH, json=body(**options)).json()
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]


def test_whole_answer_equals_generate(client, text):
    answer = client.post(PATH, json=body()).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "org/tiny")
    (choice,) = answer["choices"]
    assert (choice["message"], choice["finish_reason"]) == (
        {"role": "assistant", "content": text},
        "length",
    )
    counts = [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")]
    assert counts == [len("# a word\n"), NUM_NEW, len("# a word\n") + NUM_NEW]
    speculation = answer["usage"]["speculation"]
    assert 0 < speculation["rounds"] < NUM_NEW
    assert 0 < speculation["acceptance_rate"] <= 1 < speculation["mean_acceptance_length"]


def test_streamed_pieces_join_to_the_whole_answer(client, text):
    joined, *events, last, usage = streamed(client, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined == text
    assert len(events) > 3
    assert last["choices"][0]["finish_reason"] == "length"
    assert {(event["object"], event["id"]) for event in events} == {
        ("chat.completion.chunk", last["id"])
    }
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], NUM_NEW)
    assert "usage" not in streamed(client)[-1]


def test_text_ends_before_a_stop_string_and_with_its_eos(client, engine, text, monkeypatch):
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


def test_unsupported_requests_get_errors_in_the_openai_format(client, engine, monkeypatch):
    for options, status, param, words in (
        (
            {"best_of": 2},
            400,
            "best_of",
            "best_of must be 1, got 2; other values are not supported",
        ),
        (
            {"n": 99},
            400,
            "n",
            "n times the number of prompts must be at most 36, got 99; send several requests",
        ),
        ({"top_logprobs": 2}, 400, "logprobs", "logprobs must be true with top_logprobs, got 2"),
        (
            {"logprobs": True, "top_logprobs": 21},
            400,
            "top_logprobs",
            "less than or equal to 20, got 21",
        ),
        ({"n": 0}, 400, "n", "n must be greater than or equal to 1, got 0"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "logit_bias must be a valid integer"),
        (
            {"logit_bias": {"999": 1}},
            400,
            "logit_bias",
            "logit_bias must hold token ids in [0, 65), got another",
        ),
        (
            {"logit_bias": {"9": 101}},
            400,
            "logit_bias",
            "logit_bias must be less than or equal to 100, got 101",
        ),
        (
            {"stop_token_ids": [999]},
            400,
            "stop_token_ids",
            "stop_token_ids must hold token ids in [0, 65)",
        ),
        (
            {"presence_penalty": 3},
            400,
            "presence_penalty",
            "presence_penalty must be less than or equal to 2, got 3",
        ),
        (
            {"repetition_penalty": 0},
            400,
            "repetition_penalty",
            "repetition_penalty must be greater than 0, got 0",
        ),
        ({"seed": -1}, 400, "seed", "seed must be greater than or equal to 0, got -1"),
        (
            {"tools": [{"name": 99 * "x"}]},
            400,
            "tools.0.function",
            "tools.0.function must be given",
        ),
        (
            {"tool_choice": "required"},
            400,
            "tool_choice",
            'tool_choice must be "none", "auto" or a choice of tools, got "required"; add',
        ),
        (
            {"tool_choice": "any"},
            400,
            "tool_choice",
            "tool_choice must be 'none', 'auto' or 'required', or",
        ),
        (
            {"chat_template_kwargs": {"tokenize": 1}},
            400,
            "chat_template_kwargs",
            "variables of the chat template, got",
        ),
        (
            {"messages": [called(9_999 * "[")]},
            400,
            "messages",
            "arguments of tool_calls must be JSON, got '[[[",
        ),
        (
            {"temperature": 1e-45},
            400,
            "temperature",
            "temperature must be 0 or at least 1e-10, got 1e-45",
        ),
        (
            {"repetition_penalty": 1e-45},
            400,
            "repetition_penalty",
            "must be from 1e-10 to 1e10, got 1e-45",
        ),
        (
            {"repetition_penalty": 1e45},
            400,
            "repetition_penalty",
            "must be from 1e-10 to 1e10, got 1e+45",
        ),
        ({"stop": 17 * ["a"]}, 400, "stop", "stop must be up to 16 strings"),
        (
            {"messages": [called("{")]},
            400,
            "messages",
            "arguments of tool_calls must be JSON, got '{'",
        ),
        ({"model": "gpt"}, 404, "model", "model must be 'org/tiny'"),
        (
            {"temprature": 1},
            400,
            "temprature",
            (
                "temprature must be left out, got 1; this endpoint has no such field; did you mean "
                "temperature?"
            ),
        ),
        (
            {"max_tokens": 0},
            400,
            "max_tokens",
            "max_tokens must be greater than or equal to 1, got 0",
        ),
        ({"messages": None}, 400, "messages", "messages must be a valid array, got None"),
        (
            {"messages": [{"role": "user"}]},
            400,
            "messages.0.content",
            "messages.0.content must be given",
        ),
        (
            {"messages": [{"role": "user", "content": 1}]},
            400,
            "messages.0.content",
            "valid string, or a valid array",
        ),
        ({"stop": ["a", ""]}, 400, "stop", "none of them empty"),
        (
            {"stop": ["a", 513 * "b"]},
            400,
            "stop",
            "strings of at most 512 characters, got one of 513; send",
        ),
        (
            {"stop": 101 * ["a"]},
            400,
            "stop",
            "stop must have at most 100 values, got 101; send fewer",
        ),
        (
            dict.fromkeys(map(str, range(98)), 1),
            400,
            None,
            "the body must have at most 100 fields, got 102",
        ),
        (
            {"stop": "~"},
            400,
            "stop",
            "stop must be strings that the tokenizer can write, got ['~']",
        ),
        ({"max_tokens": MAX_LEN}, 400, "messages", f"at most {MAX_LEN} tokens"),
    ):
        response = client.post(PATH, json=body(**options, stream=True))
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (response.status_code, error["type"], error["param"]) == (
            status,
            "invalid_request_error",
            param,
        )
        assert words in error["message"] and len(error["message"]) < 200
    for prompt, words in (
        ([], "at least one token"),
        ([[]], "at least one token"),
        (["a", ""], "at least one token"),
        ([[3], "b"], "prompt.1 must be a valid array, got 'b'"),
        (40 * ["a"], "at most 36, got 40"),
        ([999], "token ids in [0, "),
        ("", "at least one token"),
        ([3, "b"], "prompt.1 must be a valid integer"),
    ):
        error = client.post("/v1/completions", json={"prompt": prompt}).json()["error"]
        assert error["param"].partition(".")[0] == "prompt" and words in error["message"]
    assert client.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert "must have a chat template" in client.post(PATH, json=body()).json()["error"]["message"]
    # The server draws a seed.
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_unreadable_bodies_and_headers_are_refused(client):
    for content, headers, status, words in (
        (b'{"messages": ', {}, 400, "the body must be JSON in UTF-8, got EOF"),
        (
            b'{"prompt": "\\udc00 a"}',
            {},
            400,
            "the body must be JSON in UTF-8, got lone leading surrogate",
        ),
        (b"[]", {}, 400, "the body must be an object, got []"),
        (
            b'{"prompt": "a"}',
            {"Content-Type": "text/plain"},
            415,
            "Content-Type must be application/json",
        ),
        (
            b'{"prompt": "a"}',
            {"Host": "evil.example:80"},
            400,
            "Host must be localhost, an IP address or a name that",
        ),
    ):
        response = client.post(
            "/v1/completions",
            content=content,
            headers={"Content-Type": "application/json"} | headers,
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (
            status,
            None,
            "invalid_request_error",
        )
        assert words in error["message"]
    for host in ("localhost", "127.0.0.1:80", "[::1]:80", "name.example"):
        assert client.get("/health", headers={"Host": host}).status_code == 200


def test_named_hosts_are_checked_on_an_open_server():
    assert HostCheck(None, ("0.0.0.0",))._is_allowed("evil.example")
    named = HostCheck(None, ("0.0.0.0", "localhost"))
    assert not named._is_allowed("evil.example")
    assert named._is_allowed("10.0.0.2:8000")


def test_text_far_beyond_the_context_is_refused_unread(client, engine, monkeypatch):
    monkeypatch.setattr(engine, "tokenizer", None)
    most_bytes = 2 * engine.max_chars + 2**16
    chunks = (bytes(65_536) for _ in range(64))
    json_type = {"Content-Type": "application/json"}
    for content, status, code, words in (
        (
            json.dumps({"prompt": 4_000_000 * "a"}),
            413,
            "request_too_large",
            f"at most {most_bytes} bytes, got 40000",
        ),
        (chunks, 413, "request_too_large", f"at most {most_bytes} bytes, got more"),
        (
            json.dumps({"prompt": (engine.max_chars + 1) * "a"}),
            400,
            "context_length_exceeded",
            f"got {engine.max_chars + 1};",
        ),
        (
            json.dumps(
                body(messages=2 * [{"role": "user", "content": engine.max_chars // 2 * "ab"}])
            ),
            400,
            None,
            None,
        ),
    ):
        path = PATH if words is None else "/v1/completions"
        response = client.post(path, content=content, headers=json_type)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code or "context_length_exceeded")
        assert (words or f"messages must have at most {engine.max_chars} characters") in error[
            "message"
        ]


def test_streams_continue_while_a_long_text_is_tokenised(client, engine, text, monkeypatch):
    tokenizer, may_end, is_long = engine.tokenizer, threading.Event(), "a" * (engine.max_chars - 8)

    class Slow:
        """Tokenizer that blocks on a long text until it may end."""

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, content):
            assert len(content) < len(is_long) or may_end.wait(WAIT_S)
            return tokenizer(content)

    monkeypatch.setattr(engine, "tokenizer", Slow())
    answers = []
    request = {"prompt": is_long, "note": None, "user": 65_536 * "a"}
    asking = threading.Thread(
        target=lambda: answers.append(client.post("/v1/completions", json=request).json())
    )
    with client.stream("POST", PATH, json=body(stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        asking.start()
        assert [*lines][-2] == "data: [DONE]"
    assert answered(client)[0] == text
    assert not answers
    may_end.set()
    asking.join()
    assert answers[0]["error"]["code"] == "context_length_exceeded"


def test_schema_is_compiled_while_requests_are_answered(client, engine, text, monkeypatch):
    is_compiling, may_end, answers = threading.Event(), threading.Event(), []

    def compile_slowly(schema):
        is_compiling.set()
        assert may_end.wait(WAIT_S)
        raise RequestError("not now", "response_format")

    monkeypatch.setattr(engine.grammars, "compile", compile_slowly)
    monkeypatch.setattr(engine.target.generation_config, "eos_token_id", 1)
    asked = body(response_format={"type": "json_object"})
    asking = [
        threading.Thread(target=lambda: answers.append(client.post(PATH, json=asked).json()))
        for _ in range(8)
    ]
    for thread in asking:
        thread.start()
    assert is_compiling.wait(WAIT_S)
    try:
        assert client.post(PATH, json=body(), timeout=WAIT_S / 2).json()["choices"][0]["message"][
            "content"
        ]
        assert not answers
    finally:
        may_end.set()
    for thread in asking:
        thread.join()
    assert [answer["error"]["message"] for answer in answers] == 8 * ["not now"]


def test_prompts_are_counted_before_they_are_tokenised(client, engine, monkeypatch):
    monkeypatch.setattr(engine, "tokenizer", None)
    error = client.post("/v1/completions", json={"prompt": 9_999 * ["a"]}).json()["error"]
    assert error["message"].startswith("n times the number of prompts must be at most 36, got 9999")


def test_total_bytes_of_request_bodies_are_bounded():
    engine = SimpleNamespace(num_rows=2, max_queued=1, max_chars=2**16, check_room=lambda: None)
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    intake = importlib.import_module("hf_speculate.tools.server.intake").Intake(engine)

    async def read(num_bytes, is_whole):
        chunks = iter(
            [{"type": "http.request", "body": bytes(num_bytes), "more_body": not is_whole}]
        )

        async def receive():
            return next(chunks, None) or await asyncio.Event().wait()

        return await intake.read(schemas.ChatRequest, Request(scope, receive))

    async def run():
        unfinished = [
            asyncio.create_task(read(intake.max_bytes - 4, is_whole=False)) for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        with pytest.raises(RequestError, match="too many bytes") as caught:
            await read(13, is_whole=True)
        assert caught.value.status == 429
        for num_bytes in (12, 13):
            with pytest.raises(RequestError, match="must be JSON"):
                await read(num_bytes, is_whole=True)
            unfinished.pop().cancel()
            await asyncio.sleep(0.1)

    asyncio.run(run())


def test_messages_are_counted_before_they_are_checked():
    messages = (
        [{"role": "user", "content": []}] * 3
        + 9_999 * [MESSAGE]
        + [{"role": "user", "content": 2 * [None]}]
    )
    with pytest.raises(RequestError, match="at most 10000 parts, got 10001"):
        schemas.parse(schemas.ChatRequest, json.dumps({"messages": messages}).encode())


def test_values_are_counted_before_they_are_checked():
    called_often = {**MESSAGE, "role": "assistant", "tool_calls": 10_001 * [None]}
    for fields, words in (
        (
            {"logit_bias": dict.fromkeys(range(10_001), "x")},
            "logit_bias must have at most 10000 values, got 10001",
        ),
        ({"tools": 10_001 * [None]}, "tools must have at most 10000 values, got 10001"),
        ({"stop": 101 * [None]}, "stop must have at most 100 values, got 101"),
        ({"prompt": 10_001 * [[1]]}, "prompt must have at most 10000 values, got 10001"),
        ({"messages": [called_often]}, "messages must have at most 10000 parts, got 10002"),
        ({"stop_token_ids": 100_000 * ["x"]}, "stop_token_ids.0 must be a valid integer"),
    ):
        kind = schemas.CompletionRequest if "prompt" in fields else schemas.ChatRequest
        with pytest.raises(RequestError, match=words):
            schemas.parse(
                kind,
                json.dumps(
                    fields if "prompt" in fields else {"messages": [MESSAGE]} | fields
                ).encode(),
            )
    many_ids = schemas.parse(
        schemas.CompletionRequest, json.dumps({"prompt": 20_000 * [1]}).encode()
    )
    assert len(many_ids.prompt) == 20_000


def test_api_is_described_without_pages_that_load_scripts(client):
    described = client.get("/openapi.json").json()["components"]["schemas"]
    assert "max_tokens" in described["ChatRequest"]["properties"] and "Message" in described
    assert [client.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]


def test_neutral_values_of_unsupported_fields_pass(client, text):
    neutral = {name: values[0] for name, values in schemas.NEUTRAL.items()} | {
        "user": "me",
        "metadata": {"a": "b"},
    }
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "word"}]
    for options in (
        neutral,
        dict.fromkeys(schemas.NEUTRAL),
        {"messages": [{"role": "user", "content": parts}]},
    ):
        assert answered(client, **options)[0] == text


def test_chat_template_reads_tools_and_its_own_options(client, engine, monkeypatch):
    template = (
        "{% if tools %}T{{ tools[0].function.name }}{% endif %}{{ depth }}{{ reasoning_effort }}{% "
        "for message in "
        "messages %}#{{ message.role }}{{ message.content }}{{ message.name }}{{ "
        "message.tool_call_id }}{% for call in "
        "message.tool_calls %}C{{ call.function.name }}{{ call.function.arguments.at }}{% endfor "
        "%}{% endfor %}"
    )
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    messages = [
        called('{"at": 7}'),
        {"role": "tool", "content": "ok", "tool_call_id": "c1", "name": "look"},
    ]
    options = {"chat_template_kwargs": {"depth": 3}, "reasoning_effort": "low"}
    for fields, begin in (({}, "Tlook3low"), ({"tool_choice": "none"}, "3low")):
        prompt = f"{begin}#assistantClook7#tooloklookc1"
        request = {"prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
        expected = client.post("/v1/completions", json=request).json()
        content, _, usage = answered(client, messages=messages, tools=[TOOL], **options, **fields)
        assert (content, usage["prompt_tokens"]) == (expected["choices"][0]["text"], len(prompt))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    (
        ("a <b <tool_call>{}", "a <b <tool_call>{}", []),
        (
            'so: <tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>',
            "so: ",
            [("f", '{"x": "é"}')],
        ),
        (
            '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}',
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("no call <tool_", "no call <tool_", []),
        (f"a {CALL}\n b {CALL} ", "a \n b ", [("f", "{}"), ("f", "{}")]),
        (f"{{}} in <tool_call> tags: {CALL}", "{} in <tool_call> tags: ", [("f", "{}")]),
        (f"<tool_call>{{oops}}</tool_call>{CALL}", "<tool_call>{oops}</tool_call>", [("f", "{}")]),
        (f'<tool_call>{{"a": "</tool_call>{CALL}', '<tool_call>{"a": "</tool_call>', [("f", "{}")]),
        (
            f'<tool_call>{{"name": 3}}</tool_call> {CALL}',
            '<tool_call>{"name": 3}</tool_call> ',
            [("f", "{}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            None,
            [("f", TAGGED)],
        ),
        ('<tool_call>{"name": "f"}</tool_call>, then', ", then", [("f", "{}")]),
        ('<tool_call>{"name": "f"} is one', '<tool_call>{"name": "f"} is one', []),
        ('<tool_call>{"name": "f"}</tool', None, [("f", "{}")]),
        (
            '<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>',
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        (
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            '<tool_call>{"name": "\\ud800"}</tool_call>',
            [],
        ),
        (NESTED, NESTED, []),
        (" \n", " \n", []),
    ),
)
def test_tool_calls_are_removed_from_the_text(text, content, calls):
    answers = importlib.import_module("hf_speculate.tools.server.answers")
    records = importlib.import_module("hf_speculate.tools.server.text_request")
    prompt = records.RowPrompt([1])
    asked = answers.Asked([records.TextRequest(prompt)], 1, True, False, False, True, None)

    async def pieces():
        for character in text:
            yield 0, records.Piece(character, [])
        yield 0, records.DecodeResult("stop", ROW)

    async def run():
        whole = await answers.whole_answer(asked, pieces(), {})
        source = pieces()
        stream = answers.events(asked._replace(is_streamed=True), source, await anext(source), {})
        return whole["choices"][0], [
            json.loads(line[6:])["choices"][0] async for line in stream if "DONE" not in line
        ]

    whole, streamed = asyncio.run(run())
    found = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in whole["message"].get("tool_calls", ())
    ]
    assert (whole["message"]["content"], found) == (content, calls)
    assert (
        whole["finish_reason"]
        == streamed[-1]["finish_reason"]
        == ("tool_calls" if calls else "stop")
    )
    assert "".join(choice["delta"].get("content", "") for choice in streamed) == (content or "")
    last = streamed[-1]["delta"].get("tool_calls", [])
    assert [(call["index"], call["function"]["name"]) for call in last] == [
        (at, name) for at, (name, _) in enumerate(calls)
    ]


def test_model_is_found_by_its_full_and_short_name(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("org/tiny", "model")
    for name in ("org/tiny", "tiny"):
        assert client.get(f"/v1/models/{name}").json() == model
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_generation_ends_when_its_client_leaves(client, slow, text):
    before, now = slow.num, -1
    with pytest.raises(httpx.ReadTimeout):
        client.post(PATH, json=body(max_tokens=MANY), timeout=0.3)
    while now != slow.num:
        now = slow.num
        time.sleep(0.5)
    assert now - before < MANY // 8  # a round holds four tokens at most
    slow.seconds = 0.0
    assert answered(client)[0] == text


def test_pieces_hold_whole_characters_and_no_stop_prefix():
    tokenizer = byte_level_tokenizer(["st"])
    text, stream, whole = (
        "",
        TextStream(tokenizer, ["stop", "zz"]),
        "naïve s sto 日本 stip stop, and more",
    )
    ids = tokenizer(whole)["input_ids"]
    for num_ids in range(1, len(ids) + 1):
        text += stream.read(ids[:num_ids])
        assert stream.read(ids[: num_ids - 1]) == ""  # a row that is decoded again
        assert whole.startswith(text) and not text.endswith(("s", "st", "sto", "z"))
    assert text + stream.read(ids, is_end=True) == "naïve s sto 日本 stip "
    assert stream.is_cut
    stream, ids = TextStream(tokenizer, ["stop"]), tokenizer("a sto")["input_ids"]
    # The end gives the held text.
    assert (stream.read(ids), stream.read(ids, is_end=True)) == ("a ", "sto")
    assert not stream.is_cut


def test_special_tokens_match_stops_and_are_not_sent():
    tokenizer = byte_level_tokenizer(["st", "end"], eos_token="<|end|>", pad_token="<tool_call>")
    ids = tokenizer("a <tool_call> <|end|> end<|end|>\nmore")["input_ids"]
    for stop, text in (
        ("<|end|>\n", "a <tool_call>  end"),
        ("> <|", "a <tool_call"),
        (" <|end|> ", "a <tool_call>"),
    ):
        stream, read, criterion = (
            TextStream(tokenizer, [stop]),
            "",
            StopStringCriteria(tokenizer, [stop]),
        )
        for num_ids in range(1, len(ids) + 1):
            read += stream.read(ids[:num_ids])
            # Both stop at the same token.
            assert stream.is_cut or not criterion(torch.tensor([ids[:num_ids]]), None)
        assert (read, stream.is_cut) == (text, True)
    stream = TextStream(tokenizer, ["<|end|>!"])
    assert stream.read(ids[:-6]) + stream.read(ids, is_end=True) == "a <tool_call>  end\nmore"


def test_invalid_utf8_bytes_are_sent_at_linear_cost():
    tokenizer = byte_level_tokenizer([])
    (byte,) = {tokenizer("日")["input_ids"][1]}
    num_decoded = []
    decode = tokenizer.decode
    counted = SimpleNamespace(
        decode=lambda ids, **options: (num_decoded.append(len(ids)), decode(ids, **options))[1]
    )
    stream, text = TextStream(counted, ["stop"]), ""
    for num_ids in range(1, 201):
        text += stream.read(200 * [byte][:num_ids])
        assert len(text) >= num_ids - 3
    assert text + stream.read(200 * [byte], is_end=True) == tokenizer.decode(200 * [byte])
    assert sum(num_decoded) < 50 * 200


def test_error_in_a_stream_is_an_event_before_the_last_one():
    answers = importlib.import_module("hf_speculate.tools.server.answers")
    records = importlib.import_module("hf_speculate.tools.server.text_request")
    asked = answers.Asked(
        [records.TextRequest(records.RowPrompt([1]))], 1, True, True, False, False, None
    )

    async def pieces():
        yield 0, records.Piece("a", [])
        raise RecursionError("too deep")

    async def run():
        source = pieces()
        return [event async for event in answers.events(asked, source, await anext(source), {})]

    *_, error, done = asyncio.run(run())
    assert (
        json.loads(error.removeprefix("data: "))["error"]["message"] == "RecursionError: too deep"
    )
    assert done == "data: [DONE]\n\n"


def test_message_without_content_and_calls_is_empty(client):
    empty, null = (
        {"role": "assistant", "content": content, "tool_calls": []} for content in ("", None)
    )
    assert answered(client, messages=[null])[0] == answered(client, messages=[empty])[0]


def test_nested_arguments_of_any_depth_are_served_or_refused(client, engine, monkeypatch):
    template = "{% for message in messages %}"
    template += "{{ message.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    for chat_template in (engine.tokenizer.chat_template, template):
        monkeypatch.setattr(engine.tokenizer, "chat_template", chat_template)
        for depth in (20, 300, *range(500, 1_000, 100), 3_000):
            response = client.post(
                PATH, json=body(messages=[called(depth * "[" + depth * "]")], max_tokens=1)
            )
            assert response.status_code in (200, 400), (depth, response.text)


def test_extreme_numbers_are_served_or_refused(client):
    small = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (1e-45, 1e-10))
    large = {
        "repetition_penalty": (1e10, 10**40),
        **dict.fromkeys(("top_k", "max_tokens", "seed"), (10**40, 2**63 - 129)),
    }
    for field, value in (
        (name, value) for fields in (small, large) for name in fields for value in fields[name]
    ):
        options = {"temperature": 1e-10, "max_tokens": 3, field: value}
        assert client.post(PATH, json=body(**options)).status_code in (200, 400), options


def test_error_is_not_replaced_by_later_tokens():
    records = importlib.import_module("hf_speculate.tools.server.text_request")

    async def run():
        answer = records.Answer(records.TextRequest(records.RowPrompt([1])))
        answer.put(RequestError("shutting down"))
        answer.put([3])  # its thread had checked before if the text is wanted
        await asyncio.sleep(0)
        return await answer.get()

    assert isinstance(asyncio.run(run()), RequestError)


def test_body_in_tiny_chunks_does_not_block_the_server():
    uvicorn, reading = (
        importlib.import_module(name)
        for name in ("uvicorn", "hf_speculate.tools.server.fair_reading")
    )
    num_read, is_read = [], asyncio.Event()

    async def application(scope, receive, send):
        is_more = True
        while is_more:
            message = await receive()
            num_read.append(len(message["body"]))
            is_more = message["more_body"]
        is_read.set()

    async def run():
        config = uvicorn.Config(application, lifespan="off", log_config=None)
        config.load()
        protocol = reading.FairProtocol(
            config, importlib.import_module("uvicorn.server").ServerState(), {}
        )
        protocol.connection_made(Mock(is_closing=lambda: False, get_extra_info=lambda name: None))
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        protocol.data_received(head + 30_000 * b"1\r\na\r\n" + b"0\r\n\r\n")
        await asyncio.wait_for(is_read.wait(), WAIT_S)

    asyncio.run(run())
    assert sum(num_read) == 30_000 and max(num_read) < 2_000


def test_stop_string_may_begin_with_a_dropped_space():
    tokenizer = metaspace_tokenizer([" a"], "abcdef")
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    ids = tokenizer.convert_tokens_to_ids(["\N{LOWER ONE EIGHTH BLOCK}a", "b"])
    assert tokenizer.decode(ids) == "ab" and StopStringCriteria(tokenizer, [" ab"])(
        torch.tensor([ids]), None
    )
    for stop, text in ((" ab", ""), ("b", "a"), ("  a", "ab")):
        stream = TextStream(tokenizer, [stop])
        assert stream.read(ids[:1]) + stream.read(ids, is_end=True) == text
        assert stream.is_cut == (text != "ab")


def test_peft_target_is_served_with_its_adapter(engine):
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    wrapped = hf_speculate.enable(
        get_peft_model(make_model("llama", vocab_size=engine.vocab_size), lora).eval()
    )
    served = Engine(wrapped, engine.tokenizer, "org/tiny", {"prompt_lookup_num_tokens": 2})
    assert served.target is wrapped.get_base_model()
    assert not served.obstacle
