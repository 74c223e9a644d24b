"""Test the metrics of a server as scraped by Prometheus."""

import asyncio
import importlib
import json
import sys
from concurrent.futures import Future

import httpx
import pytest

import hf_speculate
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.metrics import Metrics, RequestTimer
from hf_speculate.tools.server.text_request import DecodeResult, Piece
from tests.support.tiny import make_model
from tests.support.tiny_tokenizers import letters_tokenizer
from tests.tools.server.serving import NUM_NEW, PATH, body, wait_until

pytest.importorskip("fastapi", reason="fastapi is not installed")
NAME = "hf_speculate_"


def scraped(client):
    """Return the values by name and labels."""
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="prometheus-client is not installed"
    )
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = parser.text_string_to_metric_families(response.text)
    samples = [sample for family in families for sample in family.samples]
    return {(each.name.removeprefix(NAME), *each.labels.values()): each.value for each in samples}


def test_scrape_counts_requests_tokens_and_times(client, engine):
    before = scraped(client)
    usages = [client.post(PATH, json=body(user="somebody")).json()["usage"]]
    with client.stream(
        "POST", PATH, json=body(stream=True, stream_options={"include_usage": True})
    ) as response:
        usages += [
            json.loads(line[6:])["usage"] for line in response.iter_lines() if '"usage"' in line
        ]
    assert client.post(PATH, json=body(temperature=3)).status_code == 400
    wait_until(lambda: engine.num_running == 0)
    after = scraped(client)
    more = {key: value - before.get(key, 0) for key, value in after.items()}
    outcomes = {
        outcome: more["requests_total", outcome]
        for outcome in ("answered", "refused", "busy", "failed")
    }
    assert outcomes == {"answered": 2, "refused": 1, "busy": 0, "failed": 0}
    assert more["prompt_tokens_total",] == sum(usage["prompt_tokens"] for usage in usages)
    assert more["generated_tokens_total",] == 2 * NUM_NEW
    drafted, accepted = (
        more[f"{name}_tokens_total", "model LlamaForCausalLM"] for name in ("drafted", "accepted")
    )
    num_rounds = sum(usage["speculation"]["rounds"] for usage in usages)
    assert more["target_forwards_total",] == num_rounds == 2 * (NUM_NEW - 1) - accepted < drafted
    assert [more[f"{name}_seconds_count",] for name in ("time_to_first_token", "request")] == [2, 2]
    assert 0 < more["time_to_first_token_seconds_sum",] < more["request_seconds_sum",]
    assert (after["rows_running",], after["rows_waiting",]) == (0, 0)
    assert "somebody" not in client.get("/metrics").text


def test_forwards_are_counted_once_when_a_decoder_is_replaced(engine, monkeypatch):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    metrics, scrapes, make = Metrics(engine), [], engine._make_decoder
    prompt = RowPrompt([3, 4, 5], None, {"max_new_tokens": NUM_NEW, "do_sample": False})
    list(engine._decoder.decode(iter([prompt, None, None, None]).__next__))

    def scrape():
        lines = metrics.text().decode().splitlines()
        name = "hf_speculate_target_forwards_total "
        scrapes.extend(float(line[len(name) :]) for line in lines if line.startswith(name))

    def scraped_make():
        scrape()
        return make()

    scrape()
    monkeypatch.setattr(engine, "_make_decoder", scraped_make)
    failed = Future()
    failed.set_exception(RuntimeError("broken"))
    engine._on_end(failed)
    scrape()
    assert scrapes[0] > 0 and scrapes == 3 * scrapes[:1]


def test_draft_source_is_that_of_a_call():
    tokenizer = letters_tokenizer([*"abcdefgh"])
    target = make_model("llama", vocab_size=len(tokenizer))

    def source_of(options):
        return Engine(target, tokenizer, "tiny", options, num_rows=1).draft_source

    hf_speculate.enable(target)
    assert source_of({}) == "none"
    assert source_of({"assistant_early_exit": 1}) == "model LlamaForCausalLM"
    assert source_of({"assistant_early_exit": 99}) == "none"  # requests fail
    target.generation_config.assistant_early_exit = 1
    assert source_of({}) == "model LlamaForCausalLM"
    target.generation_config.assistant_early_exit = None
    hf_speculate.enable(target, prompt_lookup_num_tokens=3)
    assert source_of({}) == "prompt lookup"


def test_server_without_prometheus_client_names_the_extra(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    app = importlib.import_module("hf_speculate.tools.server.app").make_app(engine)

    async def get(path):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    refused, healthy = asyncio.run(get("/metrics")), asyncio.run(get("/health"))
    assert (refused.status_code, healthy.status_code) == (501, 200)
    assert 'pip install "hf-speculate[metrics]"' in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "num_taken", "outcome"),
    [
        (None, 9, "answered"),
        (None, 1, "cancelled"),
        (RequestError("later", status=429), 9, "busy"),
        (RequestError("cannot be"), 9, "refused"),
        (RuntimeError("broken"), 9, "failed"),
    ],
)
def test_request_ends_once_with_its_outcome(error, num_taken, outcome):
    ended_calls, seconds = [], iter(range(9))

    async def pieces():
        yield 0, Piece("a", [])
        if error is not None:
            raise error
        yield 0, DecodeResult("stop", None)

    async def run():
        with RequestTimer(lambda *ended: ended_calls.append(ended), lambda: next(seconds)) as timer:
            followed = timer.follow(pieces(), 1)
            for _ in range(num_taken):
                if await anext(followed, None) is None:
                    break
            await followed.aclose()

    if error is None:
        asyncio.run(run())
    else:
        with pytest.raises(type(error)):
            asyncio.run(run())
    assert ended_calls == [(outcome, 2, 1)]
