"""Test that random invalid requests get errors in OpenAI's form and leave others unchanged."""

import importlib
import json
import random
from collections import Counter

import pytest

from tests.tools.server.serving import body

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
NUM_REQUESTS = 300
NUM_BETWEEN = 50  # invalid requests between two valid ones
NUMBERS = (0, -1, 1, 2, 3.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**40)
TEXTS = ("", "a", "\ud800", "\x00", "a" * 300, "日本")
LISTS = ([], [[]], [None], [0], [-1], ["a"], [[3]], [{}], [{"role": "tool", "content": "x"}])
OBJECTS = (
    {},
    {"1": 1},
    {"a": {}},
    {"tokenizer": 1},
    {"include_usage": True},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    [{"type": "function", "function": {}}],
)
VALUES = (None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS)
UNKNOWN = ("best_of", "user", "unknown")
RIGHT = {"prompt": "a", "max_tokens": 5, "temperature": 0}


def wrong_request(draw):
    """Return the path and body of a request in which one to three fields have random values."""
    is_chat = draw.random() < 0.5
    schemas = importlib.import_module("hf_speculate.tools.server.schemas")
    schema = schemas.ChatRequest if is_chat else schemas.CompletionRequest
    names = [*schema.model_fields, *UNKNOWN]
    start = {**(body() if is_chat else RIGHT), "max_tokens": 3}
    fields = {draw.choice(names): draw.choice(VALUES) for _ in range(draw.randint(1, 3))}
    return f"/v1/{'chat/' if is_chat else ''}completions", json.dumps({**start, **fields})


def test_invalid_requests_end_only_themselves(client):
    draw, statuses = random.Random(7), Counter()
    expected = client.post("/v1/completions", json=RIGHT).json()["choices"]
    for number in range(NUM_REQUESTS):
        path, content = wrong_request(draw)
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404, 429), (answer.text, content)
        statuses[answer.status_code] += 1
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        if number % NUM_BETWEEN == NUM_BETWEEN - 1:
            assert client.post("/v1/completions", json=RIGHT).json()["choices"] == expected
    assert statuses[200] > NUM_REQUESTS // 20 and statuses[400] > NUM_REQUESTS // 2, statuses
    assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
