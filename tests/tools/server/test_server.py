"""The server behind a real socket on the loopback device, asked by a real client."""

import importlib
import json
import string
import sys
import threading
import time

import httpx
import pytest

import hf_speculate
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.text_stream import TextStream
from tests.tiny import MAX_LEN, make_model, noisy_copy
from tests.tiny_tokenizers import byte_level_tokenizer, letters_tokenizer

pytest.importorskip("fastapi", reason="fastapi is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
NEUTRAL = importlib.import_module("hf_speculate.tools.server.schemas").NEUTRAL

NUM_NEW = 24
QUESTION = [{"role": "user", "content": "a word"}]
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
PATH = "/v1/chat/completions"
WAIT_S = 30  # for what takes a moment, on a busy machine too
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


@pytest.fixture(scope="module")
def engine():
    tokenizer = letters_tokenizer([*string.ascii_letters, *string.digits, " ", "#", "\n"])
    tokenizer.chat_template = TEMPLATE
    target = hf_speculate.enable(make_model("llama", vocab_size=len(tokenizer)))
    target.generation_config.num_assistant_tokens = 3  # the adaptive schedule never calls a draft of the target's size
    engine = Engine(target, tokenizer, "org/tiny", {"assistant_model": noisy_copy(target)})
    engine.forwards = Forwards()
    target.register_forward_pre_hook(engine.forwards.begin)
    target.register_forward_hook(engine.forwards.end)
    return engine


@pytest.fixture(scope="module")
def client(engine):
    app = importlib.import_module("hf_speculate.tools.server.app").make_app(engine)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False) as client:
        yield client
    server.should_exit = True
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


def test_what_generate_refuses_is_an_error_too(client, engine, monkeypatch):
    monkeypatch.setattr(engine, "options", {"assistant_model": object()})
    for is_streamed in (False, True):
        response = client.post(PATH, json=body(stream=is_streamed))
        assert response.status_code == 400
        assert "assistant_model must be" in response.json()["error"]["message"]


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


def test_answers_come_one_at_a_time_and_the_event_loop_stays_free(client, slow, text):
    slow.most_at_once, found = 0, []

    def ask():
        found.append(client.post(PATH, json=body()).json()["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert client.get("/v1/models").status_code == 200
    assert len(found) < 3  # the list came while answers were under way
    for thread in threads:
        thread.join()
    assert found == [text] * 3
    assert slow.most_at_once == 1


def test_pieces_hold_whole_characters_and_no_beginning_of_a_stop_string():
    tokenizer = byte_level_tokenizer(["st"])
    pieces, stops = [], ["stop", "zz"]
    streamer = TextStream(tokenizer, stops, pieces.append)
    whole = "naïve s sto 日本 stip stop, and more"
    ids = tokenizer(whole, return_tensors="pt")["input_ids"]
    streamer.put(ids)  # the prompt, which is not text of the answer
    for token_id in ids[0]:
        streamer.put(token_id[None])
        text = "".join(pieces)
        assert whole.startswith(text)
        assert not any(text.endswith(stop[:num]) for stop in stops for num in range(1, len(stop)))
    streamer.end()
    assert "".join(pieces) == "naïve s sto 日本 stip "
    assert streamer.is_cut


def test_pieces_give_at_the_end_what_they_held():
    tokenizer = byte_level_tokenizer([])
    pieces = []
    streamer = TextStream(tokenizer, ["stop"], pieces.append)
    ids = tokenizer("a sto", return_tensors="pt")["input_ids"]
    streamer.put(ids)
    for token_id in ids[0]:
        streamer.put(token_id[None])
    assert "".join(pieces) == "a "
    streamer.end()
    assert "".join(pieces) == "a sto"
    assert not streamer.is_cut
