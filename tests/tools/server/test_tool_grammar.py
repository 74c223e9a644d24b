"""Compare drafted tool calls under a grammar with xgrammar's processor in plain decoding."""

import asyncio
import importlib
import json
import re
import sys

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

import hf_speculate
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import LOGGER, RequestError
from hf_speculate.tools.server.prompts import text_requests
from hf_speculate.tools.server.response_format import GrammarLimits
from hf_speculate.tools.server.response_template import ResponseTemplate
from hf_speculate.tools.server.schemas import ChatRequest, parse
from hf_speculate.tools.server.tool_calls import ToolCallReader
from hf_speculate.tools.server.tool_grammar import CallFormat
from tests.support.tiny import make_small_model
from tests.support.tiny_tokenizers import byte_level_tokenizer, letters_tokenizer
from tests.tools.server.serving import PATH
from tests.tools.server.test_rows import collect_all

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
hf = pytest.importorskip("xgrammar.contrib.hf", reason="xgrammar is not installed")
WORDS = ["<tool_call>", "</tool_call>", '"name"', '"arguments"', '": ', "true", '{"', "}\n", ', "']
THINK = ["<think>", "</think>"]
NUM_NEW = 60
CALLS = """{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
TEMPLATE = f"{{% for message in messages %}}# {{{{ message.content }}}}{CALLS}\n{{% endfor %}}"
BOOLEANS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "unit": {"enum": ["km", "mile"]}},
    "required": ["on", "unit"],
}


def tool(name, parameters=BOOLEANS, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("look_up"), tool("list"), {"type": "function", "function": {"name": "now"}}]
NAMED = {"type": "function", "function": {"name": "list"}}


def make_engine(words=WORDS, tags=THINK, response=None):
    tokenizer = byte_level_tokenizer(words, pad_token="<pad>", eos_token="</s>")
    tokenizer.add_tokens(list(tags), special_tokens=True)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, response
    target = hf_speculate.enable(make_small_model(len(tokenizer), seed=1))
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    limits = GrammarLimits(seconds=5, memory_bytes=30_000_000)
    return Engine(target, tokenizer, "tiny", {"num_assistant_tokens": 6}, 4, 64, None, limits)


@pytest.fixture(scope="module")
def engine():
    engine = make_engine()
    yield engine
    engine.close()


def texts_of(engine, content="x", **fields):
    messages = [{"role": "user", "content": content}]
    request = {"messages": messages, "max_tokens": NUM_NEW, "temperature": 0, "tools": TOOLS}
    return text_requests(parse(ChatRequest, json.dumps({**request, **fields}).encode()), engine)


def shown(engine, ids):
    return engine.tokenizer.decode(ids, skip_special_tokens=True)


def calls_in(engine, ids):
    """Return the calls and the content that the server parses."""
    reader = ToolCallReader()
    content = reader.read(shown(engine, ids), is_end=True).content
    functions = [call["function"] for call in reader.calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions], content


def plain_ids(engine, text, names, is_required, is_single=False, bias=None):
    """Return the new tokens of plain greedy decoding with xgrammar's own schemas and processor."""
    begin = '<tool_call>\n{"name": '
    rules = {
        name: xgrammar.Grammar.from_json_schema(
            json.dumps({"type": "object", "properties": {}} if name == "now" else BOOLEANS),
            any_whitespace=False,
        )
        for name in names
    }
    tags = [
        {
            "type": "tag",
            "begin": f'{begin}"{name}", "arguments": ',
            "content": {"type": "grammar", "grammar": str(rules[name])},
            "end": "}\n</tool_call>",
        }
        for name in names
    ]
    kind = (
        {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
        if is_required
        else {"type": "triggered_tags", "triggers": ["<tool_call>"]}
    )
    form = {**kind, "tags": tags, "stop_after_first": is_single}
    info = xgrammar.TokenizerInfo.from_huggingface(engine.tokenizer)
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(
        {"type": "structural_tag", "format": form}
    )
    ids = torch.tensor([text.prompt.token_ids])
    processors = [SequenceBiasLogitsProcessor(bias)] if bias else []
    processors.append(hf.LogitsProcessor(grammar))
    new = engine.target.generate(ids, max_new_tokens=NUM_NEW, logits_processor=processors)
    return new[0, ids.shape[1] :].tolist()


def is_valid(name, arguments):
    if name == "now":
        return arguments == {}
    return (
        list(arguments) == ["on", "unit"]
        and isinstance(arguments["on"], bool)
        and arguments["unit"] in ("km", "mile")
    )


ALL = ["look_up", "list", "now"]
ENDLESS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}},
    "required": ["a"],
    "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}]}, "y": {"$ref": "#/$defs/x"}},
}


def test_required_calls_are_valid_and_drafted_beside_free_rows(engine):
    cases = [
        (texts_of(engine, f"x{index}", **fields)[0], names, is_single)
        for index, (fields, names, is_single) in enumerate(
            (
                ({"tool_choice": "required"}, ALL, False),
                ({"tool_choice": "required", "parallel_tool_calls": False}, ALL, True),
                ({"tool_choice": NAMED}, ["list"], True),
            )
        )
    ]
    (free,) = texts_of(engine, tool_choice="none")
    rows = [
        result.row for result in collect_all(engine, [*[text for text, _, _ in cases] * 2, free])
    ]
    for index, (text, names, is_single) in enumerate(cases):
        for row in (rows[index], rows[index + len(cases)]):
            assert row.token_ids == plain_ids(engine, text, names, True, is_single)
            # without a draft model, only forced text is drafted
            assert row.num_accepted > len(row.token_ids) // 2
            calls, content = calls_in(engine, row.token_ids)
            assert calls and all(name in names and is_valid(name, value) for name, value in calls)
            assert not is_single or (len(calls), content) == (1, "")
    assert rows[-1].num_drafted == 0 and not calls_in(engine, rows[-1].token_ids)[0]


def test_sampled_required_calls_are_valid(engine):
    options = {"temperature": 2, "seed": 3, "n": 8, "parallel_tool_calls": False}
    results = collect_all(engine, texts_of(engine, tool_choice="required", **options))
    found = [calls_in(engine, result.row.token_ids) for result in results]
    assert {calls[0][0] for calls, _ in found} == set(ALL)
    assert all(not content and is_valid(*calls[0]) for calls, content in found)


def test_auto_is_untouched_until_a_tag_and_constrained_behind_it(engine):
    tag = engine.tokenizer.convert_tokens_to_ids("<tool_call>")
    (free,) = texts_of(engine)
    (without,) = texts_of(engine, tool_choice="none")
    (called,) = texts_of(engine, logit_bias={tag: 100})
    (once,) = texts_of(engine, logit_bias={tag: 100}, parallel_tool_calls=False)
    close = engine.tokenizer.convert_tokens_to_ids("</tool_call>")
    (stopped,) = texts_of(engine, logit_bias={tag: 100, close: 50}, stop_token_ids=[close])
    texts = [free, without, called, once, stopped]
    rows = [result.row for result in collect_all(engine, texts)]
    assert rows[0].token_ids == rows[1].token_ids and tag not in rows[0].token_ids
    assert len(free.prompt.arguments["logits_processor"]) == 1
    for row, text, is_single in ((rows[2], called, False), (rows[3], once, True)):
        expected = plain_ids(engine, text, ALL, False, is_single, {(tag,): 100.0})
        assert row.token_ids == expected
        assert row.num_accepted > len(expected) // 2
        calls, _ = calls_in(engine, row.token_ids)
        assert calls and is_valid(*calls[0])
    assert rows[4].token_ids[-1] == close and len(calls_in(engine, rows[4].token_ids)[0]) == 1


def test_latin_letters_of_keys_and_values_are_kept(engine):
    value = {"ann\u00e9e": "Stra\u00dfe\\\\x41"}  # hex digits behind a letter, and a backslash
    properties = {name: {"const": each} for name, each in value.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    texts = texts_of(engine, tools=[tool("list", parameters)], tool_choice=NAMED)
    (result,) = collect_all(engine, texts)
    assert calls_in(engine, result.row.token_ids) == ([("list", value)], "")


def test_position_of_a_long_answer_takes_no_python_loop(engine):
    (text,) = texts_of(engine)
    (processor,) = text.prompt.arguments["logits_processor"]
    word, other = engine.tokenizer.convert_tokens_to_ids(["a", "b"])
    ids = torch.tensor([[*text.prompt.token_ids, *600 * [word]]])
    scores, num_lines = torch.zeros(1, len(engine.tokenizer)), 0
    processor(ids, scores)

    def count(frame, event, argument):
        nonlocal num_lines
        num_lines += 1
        return count

    before = sys.gettrace()
    for last in (word, other):  # the text so far, and another last token
        ids[0, -1] = last
        sys.settrace(count)
        processor(ids, scores)
        sys.settrace(before)
    assert 0 < num_lines < 600


def test_calls_begin_behind_reasoning(engine):
    begin, end, eos = engine.tokenizer.convert_tokens_to_ids([*THINK, "</s>"])
    (endless,) = texts_of(engine, "x<think>\n", tool_choice="required", logit_bias={eos: 100})
    (closed,) = texts_of(engine, "x<think>", tool_choice=NAMED, logit_bias={end: 50})
    (own,) = texts_of(engine, logit_bias={begin: 100})
    rows = [result.row.token_ids for result in collect_all(engine, [endless, closed, own])]
    assert len(rows[0]) == NUM_NEW and eos not in rows[0]
    calls, _ = calls_in(engine, rows[1])
    assert (rows[1][0], [name for name, _ in calls]) == (end, ["list"])
    (processor,) = own.prompt.arguments["logits_processor"]
    tag = engine.tokenizer.convert_tokens_to_ids("<tool_call>")
    for new, forced in (([begin, tag], ""), ([begin, tag, end, tag], '\n{"name": "')):
        assert processor.forced_text(0, torch.tensor([*own.prompt.token_ids, *new])) == forced
    ended = [
        *texts_of(engine, "<think>x</think>", tool_choice=NAMED),
        *texts_of(engine, "<think>x", tool_choice=NAMED),
        *texts_of(engine, "x", tool_choice=NAMED, logit_bias={begin: 100}),
    ]
    for result in collect_all(engine, ended):  # only spaces may follow a prompt's last tag
        calls, content = calls_in(engine, result.row.token_ids)
        assert ([name for name, _ in calls], content) == (["list"], "")


RESPONSE_TEMPLATE = {
    "start_anchor": "# ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "</s>"},
    },
}


def test_response_template_reads_calls_with_special_tags():
    httpx, app = map(importlib.import_module, ("httpx", "hf_speculate.tools.server.app"))
    alone = make_engine(words=WORDS[2:], tags=[*WORDS[:2], *THINK], response=RESPONSE_TEMPLATE)
    options = {"messages": [{"role": "user", "content": "x<think>"}], "max_tokens": NUM_NEW}
    bias = {alone.tokenizer.convert_tokens_to_ids("</think>"): 50}
    options |= {"tools": TOOLS, "tool_choice": "required", "logit_bias": bias, "temperature": 0}

    compile_source, sources = alone.grammars.compile, []
    alone.grammars.compile = lambda source: sources.append(source) or compile_source(source)
    wrong = {**options, "tools": [tool("wrong", {"type": "no such"})], "tool_choice": "auto"}

    async def post():
        transport = httpx.ASGITransport(app.make_app(alone))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                await client.post(PATH, json={**options, **more, "parallel_tool_calls": False})
                for more in ({}, {"stream": True}, wrong)
            ]

    whole, streamed, free = asyncio.run(post())
    alone.close()
    assert (free.status_code, len(sources)) == (200, 3)  # a wrong schema is compiled once, too
    for body, name in ((whole.text, "message"), (streamed.text.split("data: ")[-2], "delta")):
        choice = json.loads(body)["choices"][0]
        (call,) = choice[name]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert is_valid(call["function"]["name"], json.loads(call["function"]["arguments"]))


XML = TEMPLATE.replace('{"name": "', "<function=").replace('", "arguments": ', ">")
CLOSE = TEMPLATE.replace("<tool_call>\n", "<tool_call>").replace("}\n<", "}<")
HERMES = TEMPLATE.replace('"name": "{{ call.function.name }}", ', " ").replace(
    " | tojson }}", ' | tojson }}, "name": "{{ call.function.name }}"'
)
OTHER_TAGS = json.loads(json.dumps(RESPONSE_TEMPLATE).replace("tool_call>", "call>"))


@pytest.mark.parametrize(
    ("template", "response", "expected"),
    (
        (TEMPLATE, None, (True, True, "\n", "\n</tool_call>")),
        (HERMES, None, (True, True, "\n", "\n</tool_call>")),
        (CLOSE, None, (True, True, "", "</tool_call>")),
        (XML, None, (True, False, "\n", "\n</tool_call>")),
        (None, RESPONSE_TEMPLATE, (True, False, "\n", "\n</tool_call>")),
        (TEMPLATE, OTHER_TAGS, (False, False, "\n", "\n</tool_call>")),
    ),
    ids=["qwen", "hermes", "close", "xml", "none", "other tags"],
)
def test_format_is_found_by_writing_and_reading_a_call(
    engine, monkeypatch, template, response, expected
):
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    monkeypatch.setattr(engine.tokenizer, "response_template", response, raising=False)
    found = CallFormat.of(engine.tokenizer, ResponseTemplate.of(engine.tokenizer))
    assert found[:4] == expected
    monkeypatch.setattr(engine, "call_format", found)
    monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATE)
    assert ("logits_processor" in texts_of(engine)[0].prompt.arguments) == found.is_written
    if found.is_read:
        assert texts_of(engine, tool_choice="required")[0].prompt.arguments["logits_processor"]
    else:
        with pytest.raises(
            RequestError, match='for this tokenizer, got "required"; it or its response'
        ):
            texts_of(engine, tool_choice="required")


def test_tokens_that_cannot_spell_a_call_are_no_format():
    letters = '<>/_{}\n":, ' + "abcdefghijklmnopqrstuvwxyz1"
    for tokens, is_read in ((letters, True), (letters.replace("{", ""), False)):
        tokenizer = letters_tokenizer(tokens)
        tokenizer.chat_template = TEMPLATE
        assert CallFormat.of(tokenizer, None)[:2] == (is_read, is_read)


def test_calls_without_a_grammar_are_refused_or_free(engine, monkeypatch):
    monkeypatch.setattr(engine, "max_chars", 2**22)
    nothing = {"type": "object", "properties": {"a": {"anyOf": []}}, "required": ["a"]}
    endless = {"enum": [f"{number * 7919:x}" * 4 for number in range(12_000)]}
    huge, no_type = {"enum": [1_000_001 * "a"]}, {"properties": {"a": {"type": "no such"}}}
    compile_source, sources = engine.grammars._compile, []
    counted = lambda *args: sources.append(args) or compile_source(*args)  # noqa: E731
    monkeypatch.setattr(engine.grammars, "_compile", counted)
    for schema, message in (
        (
            nothing,
            "that xgrammar compiles, got one with a part that no value fits, for the function f",
        ),
        (ENDLESS, "got one with a part that no value fits, for the function f"),
        ({"type": "string"}, 'got one of a type other than "object", for the function f'),
        (no_type, 'that xgrammar compiles, got Unsupported type "no such"'),
        (endless, "that xgrammar compiles in 5 s and 30000000 bytes of memory, got one that takes"),
        (huge, "of at most 1000000 bytes, got "),
    ):
        tools = [tool("f", schema)]
        for fields in ({"tool_choice": "required"}, {"tools": [tool("f", schema, strict=True)]}):
            with pytest.raises(RequestError, match=f"^tools.* {re.escape(message)}") as caught:
                texts_of(engine, **{"tools": tools, **fields})
            assert (caught.value.status, caught.value.param) == (400, "tools")
        (free,) = texts_of(engine, tools=tools)
        assert "logits_processor" not in free.prompt.arguments
    assert len(sources) == 5 * 2  # the errors of strict functions are kept
    warnings = []

    def fail(*args):
        raise ValueError("unknown tokenizer")

    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars, "_compile", fail)
        patch.setattr(LOGGER, "warning", lambda *words: warnings.append(words))
        # This grammar is known to take too long, so it is not compiled again.
        (slow,) = texts_of(engine, tools=[tool("f", endless)])
        assert "logits_processor" not in slow.prompt.arguments and not warnings
        (new,) = texts_of(engine, tools=[tool("new", strict=True)])
        assert "logits_processor" not in new.prompt.arguments and len(warnings) == 1
    for fields, message in (
        ({"tool_choice": "required", "tools": None}, 'got "required"; add it to tools'),
        ({"tool_choice": {**NAMED, "function": {"name": "no"}}}, "got the function 'no'; add it"),
        (
            {"tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "with response_format, got the function 'list'",
        ),
        ({"tool_choice": "required", "ignore_eos": True}, "leave out ignore_eos"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            texts_of(engine, **fields)
        assert caught.value.param == "tool_choice"
    assert "logits_processor" not in texts_of(engine, ignore_eos=True)[0].prompt.arguments
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    assert "logits_processor" not in texts_of(engine)[0].prompt.arguments
    with pytest.raises(RequestError, match="tool_choice must be auto: xgrammar must be installed"):
        texts_of(engine, tool_choice="required")


def test_call_without_a_next_token_fails_its_row_only(engine):
    nothing = {"type": "string", "pattern": r"^[^\s\S]$"}
    schema = {"type": "object", "properties": {"a": nothing}, "required": ["a"]}
    (text,) = texts_of(engine, tools=[tool("f", schema)], tool_choice="required")
    with pytest.raises(RequestError, match=r'a call that ends after .*"a": ') as caught:
        collect_all(engine, [text])
    assert caught.value.status == 400
    bias = {engine.tokenizer.convert_tokens_to_ids("<tool_call>"): 100}
    (free,) = collect_all(engine, texts_of(engine, tools=[tool("f", schema)], logit_bias=bias))
    assert calls_in(engine, free.row.token_ids) == ([], shown(engine, free.row.token_ids))
    assert free.finish_reason == "stop"


@pytest.mark.parametrize(
    ("value", "expected"),
    (
        ('"\t"', '"\\t"'),
        ('"\\ud800"', '"\\ud800"'),
        ('"\\ud83d\\ude00"', '"\N{GRINNING FACE}"'),
        (5_000 * "1", None),
    ),
    ids=["control character", "surrogate", "pair", "long number"],
)
def test_values_that_grammars_allow_are_read(value, expected):
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    reader = ToolCallReader()
    content = reader.read(text, is_end=True).content
    found = [call["function"]["arguments"] for call in reader.calls]
    assert (content, found) == (("", [f'{{"a": {expected}}}']) if expected else (text, []))
