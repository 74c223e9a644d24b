"""Test that a tokenizer's `response_template` separates reasoning, content and calls."""

import asyncio
import importlib
import json

import pytest

from hf_speculate.tools.server.response_template import ResponseTemplate
from hf_speculate.tools.server.text_stream import MarkedText, TextStream
from tests.support.tiny_tokenizers import byte_level_tokenizer
from tests.tools.server.serving import NUM_NEW, PATH, body

pytest.importorskip("fastapi", reason="fastapi is not installed")
ANCHOR, END = "<|im_start|>assistant\n", "<|im_end|>"
FIELDS = {
    "reasoning_content": {"open": "<think>", "close": "</think>"},
    "tool_calls": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "content": {"close_pattern": r"\s*<\|im_end\|>"},
}
TEMPLATE = {"start_anchor": ANCHOR, "fields": FIELDS}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
CALLED = ("f", '{"x": "é"}')
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_level_tokenizer([], eos_token=END, bos_token="<|im_start|>")
    tokenizer.add_tokens(
        ["<think>", "</think>", "<tool_call>", "</tool_call>"], special_tokens=True
    )
    tokenizer.response_template = TEMPLATE
    return tokenizer


def read(tokenizer, text, begun="", tools=TOOLS, template=TEMPLATE, stops=()):
    """Return the choice of a complete answer, and the choices in the events of a streamed one."""
    answers = importlib.import_module("hf_speculate.tools.server.answers")
    records = importlib.import_module("hf_speculate.tools.server.text_request")
    tokenizer.response_template = template
    texts = [text] if isinstance(text, str) else text  # tokenised one by one
    ids = [token_id for text_part in texts for token_id in tokenizer(text_part)["input_ids"]]
    row = records.RowResult(records.RowPrompt([1]), ids, 1, 0, 0)

    def asked(is_streamed):
        reader = ResponseTemplate.of(tokenizer).reader(f"hi{END}{ANCHOR}{begun}", tools)
        texts = [records.TextRequest(row.prompt, shows_special=True)]
        return answers.Asked(texts, 1, True, is_streamed, False, tools is not None, None, [reader])

    async def pieces():
        stream = TextStream(tokenizer, stops, is_parsed=True)
        for end in range(1, len(row.token_ids) + 1):
            piece = stream.read_marked(row.token_ids[:end], is_end=end == len(row.token_ids))
            if len(piece):
                yield 0, records.Piece(piece.shown, [], marked=piece)
        yield 0, records.DecodeResult("stop", row)

    async def run():
        whole = await answers.whole_answer(asked(False), pieces(), {})
        source = pieces()
        stream = answers.events(asked(True), source, await anext(source), {})
        return whole["choices"][0], [
            json.loads(line[6:])["choices"][0] async for line in stream if "DONE" not in line
        ]

    return asyncio.run(run())


def parts(message):
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message.get("reasoning_content", ""), message["content"] or "", calls


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (f"<think>\nIs 1 < 2?\n</think>\n\nYes [1].{END}", {}, ("Is 1 < 2?", "Yes [1].", [])),
        (f"so\n</think>\n\nYes.{END}", {"begun": "<think>\n"}, ("so", "Yes.", [])),
        (f"<think>a</think>\nLook:\n{CALL}\n{CALL}{END}", {}, ("a", "Look:", [CALLED, CALLED])),
        (f"{CALL} Done.{END}", {}, ("", "Done.", [CALLED])),
        (f"a {CALL}{END}", {"tools": None}, ("", f"a {CALL}", [])),
        ("<think>cut sho", {}, ("cut sho", "", [])),
        # A stop string that starts inside a special token removes that whole token.
        (f"<think>why</think>Hello{END}", {"stops": [">"]}, ("", "", [])),
        (f"<think>why</think>Hello{END}", {"stops": ["|"]}, ("why", "Hello", [])),
        (f"hello{END}", {"stops": ["_end"]}, ("", "hello", [])),
        ("hello<|im_start|>x", {"stops": ["|>y"]}, ("", "hellox", [])),
        # Text that only looks like a special token stays text.
        (["so <|im_st", "art|>", " it is", END], {}, ("", "so <|im_start|> it is", [])),
        # Calls that the template cannot read become content.
        (
            f"<think>a</think><tool_call>{{no}}</tool_call>{CALL}",
            {},
            ("a", "<tool_call>{no}</tool_call>", [CALLED]),
        ),
        (
            f"<think>a</think>\n\n[1] <tool_call>{{no}}</tool_call>{END}",
            {},
            ("a", "[1] <tool_call>{no}</tool_call>", []),
        ),
        (
            f'<tool_call>{{"x": 1}}</tool_call> b{END}',
            {},
            ("", '<tool_call>{"x": 1}</tool_call> b', []),
        ),
        ('<tool_call>{"name": "f"', {}, ("", '<tool_call>{"name": "f"', [])),
        (
            f"plain{END}",
            {"template": {"start_anchor": ANCHOR, "fields": {"content": {"open": "<say>"}}}},
            ("", "plain", []),
        ),
        (
            f"<think>a</think>\n<think> b</think> c {END}",
            {
                "template": {
                    "start_anchor": ANCHOR,
                    "fields": {
                        "thinking": {
                            "open": "<think>",
                            "close": "</think>",
                            "repeats": True,
                            "join": "; ",
                        },
                        "content": {"close": END, "content_args": {"strip": False}},
                    },
                }
            },
            ("a; b", "\n c ", []),
        ),
    ],
)
def test_reasoning_content_and_calls_are_separated(text, options, expected, tokenizer):
    whole, streamed = read(tokenizer, text, **options)
    assert parts(whole["message"]) == expected
    deltas = [choice["delta"] for choice in streamed]
    assert all(len(delta.keys() - {"role"}) <= 1 for delta in deltas[1:])
    joined = {
        name: "".join(delta.get(name, "") for delta in deltas)
        for name in ("reasoning_content", "content")
    }
    assert parts({**joined, "tool_calls": deltas[-1].get("tool_calls", ())}) == expected
    reason = "tool_calls" if expected[-1] else "stop"
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == reason


def test_reasoning_is_streamed_before_it_ends(tokenizer):
    reader = ResponseTemplate.of(tokenizer).reader(ANCHOR, None)
    pieces = map(MarkedText.of, ("<think>", "I ", "see"))
    assert [reader.read(piece) for piece in pieces] == [("", ""), ("", "I"), ("", " see")]


def test_unreadable_template_is_left_out(tokenizer, caplog):
    for template in ({"fields": FIELDS}, {"start_anchor": "x"}, [1]):
        tokenizer.response_template = template
        assert ResponseTemplate.of(tokenizer) is None
        assert "response_template is not used" in caplog.text


def test_server_reads_answers_with_the_prompt_before_them(client, engine, monkeypatch):
    """End the prompt with <think>, so the whole answer is reasoning."""
    monkeypatch.setattr(engine.tokenizer, "chat_template", "#{{ opened }}")
    template = {
        "start_anchor": "#",
        "fields": {"thinking": {"open": "1", "close": "2"}, "content": {}},
    }
    monkeypatch.setattr(engine.tokenizer, "response_template", template, raising=False)
    monkeypatch.setattr(engine, "response_template", ResponseTemplate.of(engine.tokenizer))
    always = {"logit_bias": {engine.tokenizer.convert_tokens_to_ids("a"): 100}}
    for opened, name in (("1", "reasoning_content"), ("12", "content")):
        options = {"chat_template_kwargs": {"opened": opened}, **always}
        (choice,) = client.post(PATH, json=body(**options)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": ""} | {name: NUM_NEW * "a"}
        with client.stream("POST", PATH, json=body(stream=True, **options)) as response:
            events = [
                json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
            ]
        assert (
            "".join(event["choices"][0]["delta"].get(name, "") for event in events) == NUM_NEW * "a"
        )
