"""Start a server behind a real socket on the loopback device."""

import importlib
import socket
import string
import threading

import httpx
import pytest

import hf_speculate
from hf_speculate.tools.server.engine import Engine
from tests.support.tiny import make_model, noisy_copy
from tests.support.tiny_tokenizers import letters_tokenizer
from tests.tools.server.serving import (
    MANY,
    NUM_ROWS,
    PATH,
    SLOW_S,
    WAIT_S,
    Forwards,
    body,
    wait_until,
)


@pytest.fixture(scope="module")
def engine():
    tokenizer = letters_tokenizer([*string.ascii_letters, *string.digits, " ", "#", "\n"])
    tokenizer.chat_template = (
        "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    )
    target = hf_speculate.enable(make_model("llama", vocab_size=len(tokenizer)))
    # The adaptive schedule never calls a draft of the target's size.
    target.generation_config.num_assistant_tokens = 3
    engine = Engine(
        target,
        tokenizer,
        "org/tiny",
        {"assistant_model": noisy_copy(target)},
        NUM_ROWS,
        max_queued=32,
    )
    engine.forwards = Forwards()
    target.register_forward_pre_hook(engine.forwards.begin)
    target.register_forward_hook(engine.forwards.end)
    return engine


@pytest.fixture(scope="module")
def client(engine):
    server = importlib.import_module("hf_speculate.tools.server.app").GracefulServer(
        engine, 0.1, ["name.example"]
    )
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
                assert "shutting down" in [*response.iter_lines()][-4]
        thread.join()


@pytest.fixture
def slow(engine):
    engine.forwards.seconds = SLOW_S
    yield engine.forwards
    engine.forwards.seconds = 0.0
