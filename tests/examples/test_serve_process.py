"""The serving example as the process that its page starts, asked over the loopback device."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

ROOT = Path(__file__).resolve().parents[2]
START_S = 120  # for imports and the models, on a busy machine
STOP_S = 30


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """`python examples/serve.py --tiny --port <free>`, where it answers, and what it says."""
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "examples/serve.py", "--tiny", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_server_that_the_page_starts_answers_and_stops(server: tuple[subprocess.Popen[bytes], str, Path]) -> None:
    process, address, log = server
    deadline = time.monotonic() + START_S
    while f"serving target on {address}/v1" not in log.read_text(encoding="utf-8"):
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.2)
    body = {"messages": [{"role": "user", "content": "a stack"}], "max_tokens": 16, "temperature": 0}
    with httpx.Client(base_url=address, timeout=START_S, trust_env=False) as client:
        (model,) = client.get("/v1/models").json()["data"]
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model["id"] == "target"
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"]
    usage = answer.json()["usage"]
    assert 0 < usage["completion_tokens"] <= 16
    assert 0 < usage["speculation"]["rounds"] <= usage["completion_tokens"]
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_S) == 0
    lines = log.read_text(encoding="utf-8").splitlines()  # without a traceback
    assert lines[-2:] == [
        f"serving target on {address}/v1, 8 requests at once; Ctrl-C stops",
        "stopped",
    ]  # no traceback
