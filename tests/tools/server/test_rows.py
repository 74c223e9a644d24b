"""Compare several simultaneous requests with each request on its own."""

import asyncio
import functools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import decoders
from transformers import LogitsProcessor

import hf_speculate
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.prompts import text_requests
from hf_speculate.tools.server.schemas import CompletionRequest, parse
from hf_speculate.tools.server.text_request import Piece, TextRequest
from tests.support.tiny import make_model, noisy_copy
from tests.support.tiny_tokenizers import WORD_MARK, letters_tokenizer, metaspace_tokenizer
from tests.tools.server.serving import MANY, NUM_ROWS, WAIT_S, wait_until

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")


# Request fields other than prompt, length and sampling, with the matching arguments of generate().
FIELDS = (
    ({}, {}),
    ({"logit_bias": {"7": -100, "9": 3.5}}, {"sequence_bias": {(7,): -100.0, (9,): 3.5}}),
    (
        {"extra_body": {"repetition_penalty": 1.4, "num_assistant_tokens": 2}},
        {"repetition_penalty": 1.4},
    ),
    (
        {"extra_body": {"stop_token_ids": [11, 12, 13, 14, 15]}},
        {"eos_token_id": [11, 12, 13, 14, 15]},
    ),
    ({"extra_body": {"num_assistant_tokens": 0}}, {}),
    ({"frequency_penalty": 0.9, "presence_penalty": -0.4}, {"penalties": (0.9, -0.4)}),
    ({"extra_body": {"min_p": 0.2}}, {"min_p": 0.2}),
)


class Penalties(LogitsProcessor):
    """Penalties computed token by token from OpenAI's formula."""

    def __init__(self, prompt_len, frequency, presence):
        self.prompt_len, self.frequency, self.presence = prompt_len, frequency, presence

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            for token_id, num in Counter(ids[self.prompt_len :]).items():
                scores[row, token_id] -= num * self.frequency + self.presence
        return scores


def requests_of(engine, num):
    """Make requests with different lengths and fields, every second one sampled with a seed.

    The prompts are text or ids.
    """
    random, size = torch.Generator().manual_seed(5), engine.target.config.vocab_size
    for index in range(num):
        ids = torch.randint(1, size, (1 + 7 * index % 40,), generator=random).tolist()
        sampling = (
            {"temperature": 0.9, "top_p": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        )
        yield {
            "prompt": ids if index % 3 else engine.tokenizer.decode(ids),
            "max_tokens": 1 + 7 * index % 30,
            **sampling,
            **FIELDS[index % len(FIELDS)][0],
        }


def alone(engine, request):
    """Return the text of a request from a separate call, without a draft if it is greedy."""
    given = next(
        arguments for fields, arguments in reversed(FIELDS) if fields.items() <= request.items()
    )
    ids, options = request["prompt"], {"do_sample": False}
    ids = torch.tensor([ids if isinstance(ids, list) else engine.tokenizer(ids)["input_ids"]])
    if request["temperature"]:
        options = {"do_sample": True, "verifier": "coupled", "top_k": 0}
        options |= {name: request[name] for name in ("temperature", "top_p", "seed")}
    else:
        given = {name: value for name, value in given.items() if name != "min_p"}
    options |= {"max_new_tokens": request["max_tokens"], **given}
    if penalties := options.pop("penalties", None):
        options["logits_processor"] = [Penalties(ids.shape[1], *penalties)]
    output = engine.target.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
    )
    return engine.tokenizer.decode(output[0, ids.shape[1] :])


@pytest.fixture
def create(client):
    """Request a completion with OpenAI's client."""
    options = {
        "api_key": "none",
        "base_url": str(client.base_url.join("/v1")),
        "max_retries": 0,
        "timeout": WAIT_S,
    }
    return functools.partial(
        openai.OpenAI(http_client=client, **options).completions.create, model="tiny"
    )


@pytest.mark.fallback("lock step, because of Penalties")
def test_concurrent_requests_get_the_texts_of_requests_alone(client, create, engine):
    requests = list(requests_of(engine, 32))

    def ask(index):
        answer = create(**requests[index], stream=index % 4 > 0)
        if not index % 4:
            return answer.choices[0].text
        if index % 4 < 3:
            return "".join(chunk.choices[0].text for chunk in answer)
        next(answer)
        return answer.close()  # the client disconnects

    with ThreadPoolExecutor(len(requests)) as pool:
        texts = list(pool.map(ask, range(len(requests))))
    assert engine.forwards.most_at_once == 1
    assert texts == [
        None if at % 4 == 3 else alone(engine, request) for at, request in enumerate(requests)
    ]
    wait_until(lambda: client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0})


@pytest.mark.parametrize("is_streamed", (False, True))
def test_choices_of_several_prompts_equal_requests_alone(create, engine, is_streamed):
    prompts, sampling = ["a word", "# b"], {"temperature": 0.9, "max_tokens": 7}
    expected = [
        prompt + create(prompt=prompt, seed=seed, **sampling).choices[0].text
        for prompt in prompts
        for seed in (5, 6, 7)
    ]
    assert len(set(expected)) == 6
    ids = [engine.tokenizer(prompt)["input_ids"] for prompt in prompts]
    for given in (prompts, ids):
        texts, reasons = [""] * 6, [None] * 6
        request = {"prompt": given, "seed": 5, "n": 3, "extra_body": {"echo": True}, **sampling}
        answer = create(**request, stream=is_streamed)
        for choice in (
            one for chunk in (answer if is_streamed else [answer]) for one in chunk.choices
        ):
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        assert (texts, reasons) == (expected, ["length"] * 6)
    if not is_streamed:
        counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
        assert counts == (sum(map(len, ids)), 6 * 7)


def logprobs_of(target, token_ids):
    """Return the log probabilities [T - 1, V] of the token after each token, from one forward."""
    with torch.no_grad():
        return (
            target(torch.tensor([token_ids]), use_cache=False)
            .logits[0, :-1]
            .float()
            .log_softmax(-1)
        )


def test_logprobs_equal_a_forward_over_the_whole_text(create, engine):
    def ask(index):
        sampling = (
            {"temperature": 0.9, "seed": index, "presence_penalty": 1}
            if index % 2
            else {"temperature": 0}
        )
        prompt = engine.tokenizer.decode([3 + index] * (index + 1))
        fields = {
            "prompt": prompt,
            "max_tokens": 9 + index,
            "logprobs": 2,
            "echo": index % 3 > 0,
            **sampling,
        }
        chunks = create(**fields, stream=True) if index % 4 > 1 else [create(**fields)]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        parts = [choice.logprobs for choice in choices if choice.logprobs]
        joined = [
            [value for piece in parts for value in getattr(piece, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        ]
        return prompt, fields, "".join(choice.text for choice in choices), joined

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(12)))
    letters = list(engine.tokenizer.convert_ids_to_tokens(range(engine.target.config.vocab_size)))
    for prompt, fields, text, (tokens, chosen, tops, offsets) in answers:
        whole = text if fields["echo"] else prompt + text
        ids = [letters.index(token) for token in whole]
        expected = logprobs_of(engine.target, ids)
        if fields["echo"]:
            assert (chosen.pop(0), tops.pop(0), len(tokens)) == (None, None, len(text))
        expected, ids = expected[len(expected) - len(chosen) :], ids[len(ids) - len(chosen) :]
        assert ("".join(tokens), offsets) == (text, list(range(len(text))))
        assert chosen == pytest.approx(
            expected.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist(), abs=1e-4
        )
        for token_id, row, top in zip(ids, expected, tops, strict=True):
            best = {letters[best_id] for best_id in row.topk(2).indices.tolist()} | {
                letters[token_id]
            }
            assert top.keys() == best
            assert list(top.values()) == pytest.approx(
                [row[letters.index(token)].item() for token in top], abs=1e-4
            )


def test_logprobs_of_a_chat_equal_those_of_a_completion(client, create, engine):
    chat = openai.OpenAI(
        api_key="none", base_url=str(client.base_url.join("/v1")), http_client=client
    ).chat
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 12, "stop": ["9"]}
    messages = [{"role": "user", "content": "a word"}]
    expected = (
        create(prompt="# a word\n", temperature=0, max_tokens=12, logprobs=3).choices[0].logprobs
    )
    whole = chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=3, **fields
    ).choices[0]
    stream = chat.completions.create(messages=messages, logprobs=True, stream=True, **fields)
    streamed = [
        one
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for one in choice.logprobs.content
    ]
    for content in (whole.logprobs.content, streamed):
        assert [one.token for one in content] == expected.tokens
        assert [one.logprob for one in content] == pytest.approx(expected.token_logprobs, abs=1e-5)
        assert (
            bytes(byte for one in content for byte in one.bytes).decode() == whole.message.content
        )
    assert [{one.token for one in each.top_logprobs} for each in whole.logprobs.content] == [
        set(top) for top in expected.top_logprobs
    ]
    assert not any(one.top_logprobs for one in streamed)


def test_stop_ids_of_a_request_join_or_replace_the_eos(create, engine, monkeypatch):
    def ask(**fields):
        (choice,) = create(prompt="a word", temperature=0, max_tokens=12, extra_body=fields).choices
        return choice.text, choice.finish_reason

    whole, _ = ask()
    first, second = whole[6], whole[4]
    assert first not in whole[:6] and second not in whole[:4]
    first_id, second_id = engine.tokenizer.convert_tokens_to_ids([first, second])
    monkeypatch.setattr(engine.target.generation_config, "eos_token_id", first_id)
    assert ask() == ask(stop_token_ids=[]) == (whole[:7], "stop")
    assert ask(stop_token_ids=[second_id]) == (whole[:5], "stop")
    assert ask(ignore_eos=True) == (whole, "length")
    assert ask(ignore_eos=True, stop_token_ids=[second_id]) == (whole[:5], "stop")


def test_full_queue_answers_429_until_a_client_leaves(create, engine, slow, monkeypatch):
    monkeypatch.setattr(engine, "max_queued", 1)
    request = {"prompt": [3, 4], "temperature": 0}
    streams = [create(**request, max_tokens=MANY, stream=True) for _ in range(NUM_ROWS)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, **request, max_tokens=2)
        wait_until(lambda: engine.num_waiting)
        with pytest.raises(openai.RateLimitError) as caught:
            create(**request, max_tokens=2)
        assert (engine.num_running, engine.num_waiting) == (NUM_ROWS, 1)
        streams[0].close()
        # The row of the disconnected client is free long before the others end.
        answer = waiting.result()
    assert engine.num_running == NUM_ROWS - 1
    for stream in streams[1:]:
        stream.close()
    assert (caught.value.status_code, caught.value.body["code"]) == (429, "rate_limit_exceeded")
    assert answer.usage.completion_tokens == 2


def collect(engine, request, most=None, on_piece=lambda: None, as_text=True):
    """Return the items in an engine's stream for a client that leaves after `most` pieces."""
    found, request = [], TextRequest(request) if isinstance(request, RowPrompt) else request

    async def run():
        async def is_gone():
            return most is not None and len(found) >= most

        async for _, piece in engine.stream([request], is_gone):
            found.append(piece.text if as_text and isinstance(piece, Piece) else piece)
            await asyncio.to_thread(on_piece)

    asyncio.run(run())
    return found


def collect_all(engine, requests):
    """Return the result of each request; all are sent at the same time."""
    results = {}

    async def run():
        async def is_gone():
            return False

        async for index, piece in engine.stream(requests, is_gone):
            if not isinstance(piece, Piece):
                results[index] = piece

    asyncio.run(run())
    return [results[index] for index in range(len(requests))]


def test_short_request_overtakes_an_echoed_prompt(engine, monkeypatch):
    monkeypatch.setattr(engine.target.generation_config, "prefill_chunk_size", 32)
    random = torch.Generator().manual_seed(1)
    ids, events = torch.randint(1, 60, (320,), generator=random).tolist(), []
    long = TextRequest(
        RowPrompt(ids, None, {"max_new_tokens": 2, "do_sample": False}), "x", num_top=2
    )
    short = TextRequest(RowPrompt([3, 4], None, {"max_new_tokens": 2, "do_sample": False}))
    pieces = []

    async def run():
        async def is_gone():
            return False

        async def read(request, name):
            async for _, piece in engine.stream([request], is_gone):
                events.append(name)
                pieces.append(piece) if name == "long" else None

        reading = asyncio.create_task(read(long, "long"))
        while "chunk" not in events:
            await asyncio.sleep(0.001)
        events.append("asked")
        await read(short, "short")
        await reading

    def count(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 16:
            events.append("chunk")
            time.sleep(0.05)

    hook = engine.target.register_forward_pre_hook(count, with_kwargs=True)
    asyncio.run(run())
    hook.remove()
    between = events[events.index("asked") : events.index("short")]
    assert between.count("chunk") <= 2  # one of them may have started before
    assert events.count("chunk") == 2 * 10  # for the log probabilities, and for the row
    expected = (
        logprobs_of(engine.target, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    )
    assert [one.logprob for one in pieces[0].logprobs[1:]] == pytest.approx(expected, abs=1e-4)


def test_completion_keeps_the_space_before_its_first_word(engine):
    tokenizer = metaspace_tokenizer([" the", " of"], "theof", eos_token="</s>")
    parts = (
        decoders.Replace(WORD_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([*parts])
    target = hf_speculate.enable(make_model("llama", vocab_size=len(tokenizer)))
    engine = Engine(target, tokenizer, "tiny", {}, NUM_ROWS)
    bias = {(token_id,): 90.0 for token_id in tokenizer.convert_tokens_to_ids([f"{WORD_MARK}of"])}
    row = RowPrompt([5, 6], None, {"max_new_tokens": 3, "do_sample": False, "sequence_bias": bias})
    for continues, expected in ((True, " of of of"), (False, "of of of")):
        pieces = collect(engine, TextRequest(row, continues=continues))
        assert "".join(pieces[:-1]) == expected
    engine.close()


def test_slow_client_gets_the_newest_text_only(engine):
    request, pieces = RowPrompt([3], None, {"max_new_tokens": 40, "do_sample": False}), []
    *pieces, result = collect(
        engine, request, on_piece=lambda: wait_until(lambda: not engine._is_decoding)
    )
    assert len(pieces) <= 2
    assert "".join(pieces) == engine.tokenizer.decode(result.row.token_ids)


def test_rows_wait_for_room_in_the_cache_in_order_of_arrival(engine):
    engine = Engine(
        engine.target, engine.tokenizer, "tiny", engine.options, NUM_ROWS, max_cache_tokens=80
    )
    begun, counts = [], []
    engine._decoder.on_begin = begun.extend
    hook = engine.target.register_forward_pre_hook(
        lambda *_: counts.append(sum(one.max_tokens for one in engine._begun))
    )
    lens = (40, 10, 70, 10, 10, 10, 10)
    prompts = [
        RowPrompt([3] * 4, None, {"max_new_tokens": num - 4, "do_sample": False}, index)
        for index, num in enumerate(lens)
    ]
    results = collect_all(engine, [TextRequest(prompt) for prompt in prompts])
    hook.remove()
    assert [len(result.row.token_ids) for result in results] == [num - 4 for num in lens]
    assert [prompt.key.request.prompt.key for prompt in begun] == list(range(len(lens)))
    assert (
        {50, 70, 40} <= set(counts) <= {10, 20, 30, 40, 50, 70}
        # The third has to wait. The last four begin together.
    )
    assert engine.max_length == 80  # longer texts can never fit
    with pytest.raises(RequestError, match="at most 80 tokens, got 4 \\+ 77"):
        text_requests(
            parse(CompletionRequest, b'{"prompt": [3, 3, 3, 3], "max_tokens": 77}'), engine
        )
    engine.close()


def test_request_refused_by_generate_gets_its_error(engine):
    request = RowPrompt(
        [3], None, {"max_new_tokens": 2, "do_sample": False, "speculation_cache": "none"}
    )
    with pytest.raises(RequestError, match="speculation_cache must be"):
        collect(engine, request)


def test_closing_the_engine_ends_its_requests(engine):
    engine = Engine(engine.target, engine.tokenizer, "tiny", engine.options, NUM_ROWS)
    request = RowPrompt([3], None, {"max_new_tokens": MANY, "do_sample": False})
    for _ in range(2):  # even a later request
        with pytest.raises(RequestError, match="shutting down") as caught:
            collect(engine, request, on_piece=engine.close)
        assert caught.value.status == 503


def test_models_without_refill_decode_one_by_one():
    target = hf_speculate.enable(make_model("mistral_window"))
    tokenizer = letters_tokenizer([chr(ord("0") + index) for index in range(60)])
    options = {"num_assistant_tokens": 3, "speculation_cache": "dynamic"}
    engine = Engine(target, tokenizer, "tiny", {"assistant_model": noisy_copy(target), **options})
    assert "window" in engine.obstacle
    request = RowPrompt([3, 4, 5], None, {"max_new_tokens": 12, "do_sample": False})
    *pieces, result = collect(engine, request)
    ids = target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=12, do_sample=False)
    assert "".join(pieces) == tokenizer.decode(ids[0, 3:])
    assert (result.finish_reason, result.row.num_accepted > 0) == ("length", True)
    (first,) = collect(engine, request, most=1)  # its number of tokens depends on the machine
    assert first and "".join(pieces).startswith(first)
    found = collect(engine, TextRequest(request, "345", num_top=1), as_text=False)
    assert (found[0].text, found[0].logprobs[0].logprob) == ("345", None)
    logprobs = [one for piece in found[:-1] for one in piece.logprobs]
    assert [one.token_id for one in logprobs] == ids[0].tolist()
    expected = logprobs_of(target, ids[0].tolist()).gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert [one.logprob for one in logprobs[1:]] == pytest.approx(expected, abs=1e-4)
    engine.close()
