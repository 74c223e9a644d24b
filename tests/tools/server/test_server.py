"""The server behind a real socket on the loopback device, asked by a real client."""

import asyncio
import importlib
import json
import socket
import string
import sys
import threading
import time

import httpx
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_speculate
from hf_speculate import register_row_wise
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.server.engine import DecodeRequest, Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.text_stream import TextStream
from tests.tiny import MAX_LEN, make_model, noisy_copy
from tests.tiny_tokenizers import byte_level_tokenizer, letters_tokenizer

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
NEUTRAL = importlib.import_module("hf_speculate.tools.server.schemas").NEUTRAL

NUM_NEW = 24
QUESTION = [{"role": "user", "content": "a word"}]
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
PATH = "/v1/chat/completions"
WAIT_S = 30  # for what takes a moment, on a busy machine too
NUM_ROWS, MAX_QUEUED = 4, 32
SLOW_S = 0.02  # of a forward, for answers that somebody can interrupt
MANY = 400  # tokens, which take several seconds so


class Forwards:
    """Counts the target's forwards, and slows them down."""

    def __init__(self):
        self.num, self.num_at_once, self.most_at_once, self.seconds = 0, 0, 0, 0.0

    def begin(self, module, args):
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        time.sleep(self.seconds)

    def end(self, module, args, output):
        self.num += 1
        self.num_at_once -= 1

    def stop_growing(self):
        """Whether they come to an end before the answer would."""
        for _ in range(int(WAIT_S / 0.5)):
            before = self.num
            time.sleep(0.5)
            if self.num == before:
                return True
        return False


class Raising(LogitsProcessor):
    """Raises an error for rows with a token, once a test has chosen one."""

    bad = None

    def __call__(self, input_ids, scores):
        if self.bad is not None and (input_ids == self.bad).any():
            raise ValueError("not allowed")
        return scores


register_row_wise(Raising)


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.fixture(scope="module")
def engine():
    tokenizer = letters_tokenizer([*string.ascii_letters, *string.digits, " ", "#", "\n"])
    tokenizer.chat_template = TEMPLATE
    target = hf_speculate.enable(make_model("llama", vocab_size=len(tokenizer)))
    target.generation_config.num_assistant_tokens = 3  # the adaptive schedule never calls a draft of the target's size
    options = {"assistant_model": noisy_copy(target), "logits_processor": LogitsProcessorList([Raising()])}
    engine = Engine(target, tokenizer, "org/tiny", options, NUM_ROWS, MAX_QUEUED)
    engine.forwards = Forwards()
    target.register_forward_pre_hook(engine.forwards.begin)
    target.register_forward_hook(engine.forwards.end)
    return engine


@pytest.fixture(scope="module")
def client(engine):
    server = importlib.import_module("hf_speculate.tools.server.graceful").GracefulServer(engine, grace_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=WAIT_S, trust_env=False) as client:
            wait_until(lambda: server.started)
            yield client
            engine.forwards.seconds = SLOW_S
            with client.stream("POST", PATH, json=body(stream=True, max_tokens=MANY)) as response:
                server.should_exit = True
                assert "shutting down" in [*response.iter_lines()][-2]
        thread.join()


@pytest.fixture
def slow(engine):
    engine.forwards.seconds = SLOW_S
    yield engine.forwards
    engine.forwards.seconds = 0.0


@pytest.fixture(scope="module")
def text(engine):
    """The greedy answer to the question, by plain decoding."""
    inputs = engine.tokenizer("# a word\n", return_tensors="pt")
    ids = engine.target.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=NUM_NEW, do_sample=False
    )
    return engine.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


def body(**options):
    return {"messages": QUESTION, "max_tokens": NUM_NEW, "temperature": 0, **options}


def streamed(client, **options):
    """The events of a streamed answer, without the last one, which says that it is done."""
    with client.stream("POST", PATH, json=body(stream=True, **options)) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(events):
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_a_whole_answer_is_that_of_generate(client, text):
    answer = client.post(PATH, json=body()).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "org/tiny")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    counts = [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")]
    assert counts == [len("# a word\n"), NUM_NEW, len("# a word\n") + NUM_NEW]
    assert 0 < usage["speculation"]["rounds"] < NUM_NEW
    assert 0 < usage["speculation"]["acceptance_rate"] <= 1
    assert usage["speculation"]["mean_acceptance_length"] > 1


def test_streamed_pieces_join_to_the_same_answer(client, text):
    *events, last = streamed(client)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(events) == text
    assert len(events) > 3
    assert last["choices"][0]["finish_reason"] == "length"
    assert {event["object"] for event in (*events, last)} == {"chat.completion.chunk"}
    assert len({event["id"] for event in (*events, last)}) == 1


def test_a_stream_counts_where_that_is_asked_for(client):
    *events, last = streamed(client, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_NEW
    assert last["usage"]["speculation"]["rounds"] > 0
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize("is_list", [False, True])
def test_the_text_ends_before_a_stop_string(client, text, is_list):
    stop = text[9:12]
    cut = text[: text.index(stop)]
    options = {"stop": [stop, "never in the text"] if is_list else stop}
    answer = client.post(PATH, json=body(**options)).json()
    assert answer["choices"][0]["message"]["content"] == cut
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(cut) + len(stop)  # a token is a character here
    *events, last = streamed(client, **options)
    assert joined(events) == cut
    assert last["choices"][0]["finish_reason"] == "stop"


def test_the_answer_ends_with_its_eos(client, engine, text):
    config = engine.target.generation_config
    config.eos_token_id = engine.tokenizer.convert_tokens_to_ids(text[5])
    try:
        answer = client.post(PATH, json=body()).json()
    finally:
        config.eos_token_id = None
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == text[: text.index(text[5]) + 1]


def test_a_seed_repeats_its_text(client):
    def drawn(seed):
        options = {"temperature": 1.0, "top_p": 0.9, "seed": seed}
        return client.post(PATH, json=body(**options)).json()["choices"][0]["message"]["content"]

    texts = [drawn(seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "status", "param", "words"),
    [
        ({"n": 2}, 400, "n", "n must be 1, got 2; other values are not supported"),
        ({"model": "gpt"}, 404, "model", "model must be 'org/tiny'"),
        ({"logprobs": True}, 400, "logprobs", "logprobs must be false or 0, got true"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "presence_penalty must be 0, got 0.5"),
        ({"temprature": 1}, 400, "temprature", "Extra inputs are not permitted"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages.0.role", "Input should be"),
        ({"temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ({"stop": ["a", ""]}, 400, "stop", "none of them empty"),
        ({"max_tokens": MAX_LEN}, 400, "messages", f"at most {MAX_LEN} tokens"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_cannot_be_served_is_refused_in_openais_form(client, options, status, param, words, is_streamed):
    response = client.post(PATH, json=body(**{**options, "stream": is_streamed}))
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_broken_json_and_unknown_paths_are_refused_in_the_same_form(client):
    broken = client.post(PATH, content=b'{"messages": ', headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    unknown = client.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["error"]["message"]) == (404, "Not Found")


def test_the_model_is_listed_and_found_by_its_full_and_its_short_name(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("org/tiny", "model")
    for name in ("org/tiny", "tiny"):
        assert client.get(f"/v1/models/{name}").json() == model
        assert client.post(PATH, json=body(model=name, max_tokens=1)).status_code == 200
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert client.get("/health").status_code == 200


def test_neutral_values_of_fields_that_are_not_supported_pass(client, text):
    neutral = {name: values[0] for name, values in NEUTRAL.items()} | {"user": "me", "metadata": {"a": "b"}}
    for options in (neutral, dict.fromkeys(NEUTRAL)):
        answer = client.post(PATH, json=body(**options))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_continue_a_prompt(client, engine, text, as_ids):
    prompt = engine.tokenizer("# a word\n")["input_ids"] if as_ids else "# a word\n"
    options = {"prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "logprobs": None}
    answer = client.post("/v1/completions", json=options).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["completion_tokens"] == NUM_NEW
    with client.stream("POST", "/v1/completions", json=options | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == text


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(["a", "b"], "one prompt, got 2"), ([10_000], "token ids in [0, "), ([], "at least one token"), ("", "token")],
)
def test_prompts_that_cannot_be_completed(client, prompt, words):
    error = client.post("/v1/completions", json={"prompt": prompt}).json()["error"]
    assert error["param"] == "prompt"
    assert words in error["message"]


def test_a_model_without_a_chat_template_still_completes(client, engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    assert "must have a chat template" in client.post(PATH, json=body()).json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "library", "words"),
    [
        (["nosuch"], "uvicorn", "uvicorn must be installed for this, got none; run pip install"),
        (["nosuch", "-k", "0"], None, "num_assistant_tokens"),
        (["nosuch", "--host", "203.0.113.1"], None, "--host and --port must be free on this machine"),
        (["nosuch", "--port", "0"], None, "a model must be a folder"),
    ],
)
def test_the_command_checks_before_it_loads(arguments, library, words, monkeypatch, capsys):
    if library is not None:
        monkeypatch.setitem(sys.modules, library, None)  # an import of it fails
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_parts_of_a_message_are_one_text(client, text):
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "word"}]
    answer = client.post(PATH, json=body(messages=[{"role": "user", "content": parts}])).json()
    assert answer["choices"][0]["message"]["content"] == text


def test_a_client_that_leaves_a_stream_ends_its_generation(client, slow, text):
    before = slow.num
    with client.stream("POST", PATH, json=body(stream=True, max_tokens=MANY)) as response:
        next(response.iter_lines())
    assert slow.stop_growing()
    assert slow.num - before < MANY // 8  # a round holds four tokens at most
    slow.seconds = 0.0
    assert client.post(PATH, json=body()).json()["choices"][0]["message"]["content"] == text


def test_a_client_that_leaves_before_its_answer_ends_the_generation(client, slow):
    before = slow.num
    with pytest.raises(httpx.ReadTimeout):
        client.post(PATH, json=body(max_tokens=MANY), timeout=0.3)
    assert slow.stop_growing()
    assert slow.num - before < MANY // 8


def prompts_of(engine, num, most):
    """Requests of different lengths, every second one sampled with a seed."""
    random = torch.Generator().manual_seed(5)
    lens = torch.randint(1, 40, (num,), generator=random).tolist()
    size = engine.target.config.vocab_size
    return [
        {
            "prompt": torch.randint(1, size, (length,), generator=random).tolist(),
            "max_tokens": 1 + (7 * index) % most,
            **({"temperature": 0.9, "top_p": 0.8, "seed": index} if index % 2 else {"temperature": 0}),
        }
        for index, length in enumerate(lens)
    ]


def alone(engine, request):
    """The text of a request in a call of its own."""
    ids = torch.tensor([request["prompt"]])
    options = {name: value for name, value in request.items() if name in ("top_p", "seed")}
    if request["temperature"]:
        options |= {"temperature": request["temperature"], "verifier": "coupled", "top_k": 0}
    output = engine.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request["max_tokens"],
        do_sample=bool(request["temperature"]),
        pad_token_id=0,
        assistant_model=engine.options["assistant_model"],
        **options,
    )
    return engine.tokenizer.decode(output[0, ids.shape[1] :])


def asks(client, ask):
    """Run a coroutine of OpenAI's asynchronous client."""
    openai = pytest.importorskip("openai", reason="openai is not installed")

    async def run():
        http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
        address = str(client.base_url.join("/v1"))
        async with openai.AsyncOpenAI(
            api_key="none", base_url=address, http_client=http_client, max_retries=0, timeout=WAIT_S
        ) as asked:
            return await ask(openai, asked)

    return asyncio.run(run())


def test_requests_at_once_get_the_texts_that_they_get_alone(client, engine):
    requests = prompts_of(engine, 32, most=30)

    async def ask(openai, asked):
        async def one(index, request):
            create = asked.completions.create(model="tiny", **request, stream=index % 4 > 0)
            if not index % 4:
                return (await create).choices[0].text
            text = ""
            async for chunk in await create:
                text += chunk.choices[0].text
                if index % 4 == 3:
                    return None  # leaves
            return text

        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(requests)))

    texts = asks(client, ask)
    assert engine.forwards.most_at_once == 1
    assert [text for text in texts if text is not None] == [
        alone(engine, request) for request, text in zip(requests, texts, strict=True) if text is not None
    ]
    assert texts.count(None) == 8
    wait_until(lambda: client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0})


def test_a_full_queue_answers_429_until_a_client_leaves(client, engine, slow, monkeypatch):
    monkeypatch.setattr(engine, "max_queued", 1)
    request = {"model": "tiny", "prompt": [3, 4], "temperature": 0}

    async def ask(openai, asked):
        create = asked.completions.create
        streams = [await create(**request, max_tokens=MANY, stream=True) for _ in range(NUM_ROWS)]
        waiting = asyncio.create_task(create(**request, max_tokens=2))
        while not engine.num_waiting:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            await create(**request, max_tokens=2)
        assert (engine.num_running, engine.num_waiting) == (NUM_ROWS, 1)
        await streams[0].close()
        answer = await waiting  # in the row of the client that has left, long before the others end
        assert engine.num_running == NUM_ROWS - 1
        for stream in streams[1:]:
            await stream.close()
        return caught.value, answer

    error, answer = asks(client, ask)
    assert error.status_code == 429
    assert error.body == {
        "message": "at most 1 requests may wait, got one more; try again later",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert answer.usage.completion_tokens == 2


def test_a_row_that_fails_answers_its_own_client(client, engine, monkeypatch):
    requests = [{**one, "prompt": one["prompt"][:3], "max_tokens": 12} for one in prompts_of(engine, 6, most=2)]
    texts = [alone(engine, one) for one in requests]
    used = [{*engine.tokenizer.decode(one["prompt"]), *text} for one, text in zip(requests, texts, strict=True)]
    bad = next(one for one in texts[0][4:] if one not in texts[0][:4] and sum(one in chars for chars in used) < 4)
    fails = [bad in chars for chars in used]
    (processor,) = engine.options["logits_processor"]

    async def ask(openai, asked):
        async def one(request, is_streamed):
            text = ""
            try:
                answer = await asked.completions.create(model="tiny", **request, stream=is_streamed)
                if not is_streamed:
                    return answer.choices[0].text
                async for chunk in answer:
                    text += chunk.choices[0].text
            except openai.APIError as error:
                return error
            return text

        return await asyncio.gather(*(one(request, index % 2 == 0) for index, request in enumerate(requests)))

    monkeypatch.setattr(processor, "bad", engine.tokenizer.convert_tokens_to_ids(bad))
    answers = asks(client, ask)
    assert fails[0]
    assert [not isinstance(one, str) for one in answers] == fails
    for answer, text, is_error in zip(answers, texts, fails, strict=True):
        assert "not allowed" in str(answer) if is_error else answer == text


def collect(engine, request, most=None):
    """What an engine's stream yields."""

    async def run():
        async def is_gone():
            return most is not None and len(found) >= most

        found = []
        async for piece in engine.stream(request, is_gone):
            found.append(piece)
        return found

    return asyncio.run(run())


def test_what_generate_refuses_is_an_error_of_the_request(engine):
    request = DecodeRequest([3], [], {"max_new_tokens": 2, "do_sample": False, "speculation_cache": "none"}, None)
    with pytest.raises(RequestError, match="speculation_cache must be") as caught:
        collect(engine, request)
    assert caught.value.status == 400


def test_closing_ends_requests(engine):
    engine = Engine(engine.target, engine.tokenizer, "tiny", engine.options, NUM_ROWS)
    request, pieces = DecodeRequest([3], [], {"max_new_tokens": MANY, "do_sample": False}, None), []

    async def run():
        async def is_gone():
            return False

        async for piece in engine.stream(request, is_gone):
            if not pieces:
                await asyncio.to_thread(engine.close)
            pieces.append(piece)

    for _ in range(2):  # also a request that comes later
        with pytest.raises(RequestError, match="shutting down") as caught:
            asyncio.run(run())
        assert caught.value.status == 503
    assert len("".join(pieces)) < MANY


def test_what_cannot_be_refilled_is_decoded_one_by_one():
    target = hf_speculate.enable(make_model("bloom"))
    tokenizer = letters_tokenizer([chr(ord("0") + index) for index in range(60)])
    engine = Engine(target, tokenizer, "bloom", {"assistant_model": noisy_copy(target), "num_assistant_tokens": 3})
    assert "dynamic" in engine.obstacle
    assert engine.num_rows == 1
    request = DecodeRequest([3, 4, 5], [], {"max_new_tokens": 12, "do_sample": False}, None)
    *pieces, result = collect(engine, request)
    ids = target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=12, do_sample=False)
    assert "".join(pieces) == tokenizer.decode(ids[0, 3:])
    assert (result.num_new_tokens, result.finish_reason) == (12, "length")
    assert result.num_accepted > 0
    assert collect(engine, request, most=1) == pieces[:1]
    engine.close()


def test_pieces_hold_whole_characters_and_no_beginning_of_a_stop_string():
    tokenizer = byte_level_tokenizer(["st"])
    stops, text = ["stop", "zz"], ""
    stream = TextStream(tokenizer, stops)
    whole = "naïve s sto 日本 stip stop, and more"
    for token_id in tokenizer(whole)["input_ids"]:
        text += stream.add([token_id])
        assert whole.startswith(text)
        assert not any(text.endswith(stop[:num]) for stop in stops for num in range(1, len(stop)))
    assert text + stream.end() == "naïve s sto 日本 stip "
    assert stream.is_cut


def test_pieces_give_at_the_end_what_they_held():
    tokenizer = byte_level_tokenizer([])
    stream = TextStream(tokenizer, ["stop"])
    assert "".join(stream.add([token_id]) for token_id in tokenizer("a sto")["input_ids"]) == "a "
    assert stream.end() == "sto"
    assert not stream.is_cut
