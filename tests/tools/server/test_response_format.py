"""Compare JSON for a schema, with drafts and several rows, with xgrammar in plain decoding."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hf_speculate
from hf_speculate import register_row_wise
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.prompts import text_requests
from hf_speculate.tools.server.response_format import GrammarLimits, GrammarProcessor
from hf_speculate.tools.server.schemas import CompletionRequest, parse
from tests.support.tiny import make_small_model, noisy_copy
from tests.support.tiny_tokenizers import byte_level_tokenizer
from tests.tools.server.test_rows import collect_all

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
hf = pytest.importorskip("xgrammar.contrib.hf", reason="xgrammar is not installed")
WORDS = ['"a"', '": ', "[1", "true", "false", '{"', '"}', " 12", ', "']
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
FORMATS = (
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"enum": ["true", "a", "[1"]}}},
)


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_level_tokenizer(WORDS, pad_token="<pad>", eos_token="</s>")
    target = hf_speculate.enable(make_small_model(len(tokenizer), seed=1))
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    options = {"assistant_model": noisy_copy(target, 0.2), "num_assistant_tokens": 4}
    limits = GrammarLimits(seconds=2, memory_bytes=30_000_000)
    engine = Engine(target, tokenizer, "tiny", options, num_rows=6, grammar_limits=limits)
    yield engine
    engine.close()


def request_of(**fields):
    return parse(
        CompletionRequest, json.dumps({"max_tokens": 24, "temperature": 0, **fields}).encode()
    )


def plain_ids(engine, prompt, wanted):
    """Return the new tokens from plain greedy decoding with xgrammar's processor."""
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(engine.tokenizer))
    grammar = compiler.compile_builtin_json_grammar()
    if "json_schema" in wanted:
        grammar = compiler.compile_json_schema(
            json.dumps(wanted["json_schema"]["schema"]), any_whitespace=False
        )
    ids = engine.tokenizer(prompt, return_tensors="pt")["input_ids"]
    processors = [] if wanted["type"] == "text" else [hf.LogitsProcessor(grammar)]
    return engine.target.generate(ids, max_new_tokens=24, logits_processor=processors)[
        0, ids.shape[1] :
    ].tolist()


def test_rows_of_different_formats_equal_plain_decoding(engine):
    requests = [
        request_of(prompt=2 * [f"x{index} ="], n=2, response_format=one)
        for index, one in enumerate(FORMATS)
    ]
    texts = [text for request in requests for text in text_requests(request, engine)]
    results = collect_all(engine, texts)
    for index, wanted in enumerate(FORMATS):
        expected = plain_ids(engine, f"x{index} =", wanted)
        for at in range(4 * index, 4 * index + 4):
            assert results[at].row.token_ids == expected
    for begin in (0, 8):
        rows = [result.row for result in results[begin : begin + 4]]
        assert 0 < sum(row.num_accepted for row in rows) < sum(row.num_drafted for row in rows)
    text = engine.tokenizer.decode(results[0].row.token_ids, skip_special_tokens=True)
    assert (results[0].finish_reason, set(json.loads(text))) == ("stop", {"a", "b"})


@register_row_wise
class FailsInside(GrammarProcessor):
    """Processor that raises an error of its own."""

    def forced_text(self, row, input_ids):
        raise ZeroDivisionError


@pytest.mark.parametrize("num_rows", [1, 4])
def test_forced_text_is_drafted_without_a_draft_model(engine, num_rows):
    options = {"num_assistant_tokens": 6}
    alone = Engine(engine.target, engine.tokenizer, "tiny", options, num_rows=num_rows)
    forced, free, other, wrong = [
        text_requests(request_of(prompt=f"x{index} =", response_format=FORMATS[kind]), alone)[0]
        for index, kind in enumerate((0, 1, 0, 0))
    ]
    (processor,) = wrong.prompt.arguments["logits_processor"]
    processor.__class__ = FailsInside
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(collect_all, alone, [forced, free, other])
        with pytest.raises(RequestError, match="ZeroDivisionError") as caught:
            collect_all(alone, [wrong])
        rows = [result.row for result in answers.result()]
    alone.close()
    assert caught.value.status == 500
    for index, kind in enumerate((0, 1, 0)):
        assert rows[index].token_ids == plain_ids(engine, f"x{index} =", FORMATS[kind])
        assert (rows[index].num_accepted > 5) == (kind == 0)


def test_characters_with_a_common_prefix_are_forced_whole_only(engine):
    wanted = {
        "type": "json_schema",
        "json_schema": {
            "schema": {
                "enum": [
                    "a\N{LATIN SMALL LETTER E WITH ACUTE}",
                    "a\N{LATIN SMALL LETTER E WITH GRAVE}",
                ]
            }
        },
    }
    (text,) = text_requests(request_of(prompt="x", response_format=wanted), engine)
    (processor,) = text.prompt.arguments["logits_processor"]
    ids = torch.tensor(text.prompt.token_ids)
    assert processor.forced_text(0, ids) == '"a'


def test_sampled_json_fits_its_schema(engine):
    wanted = {"type": "json_schema", "json_schema": {"schema": {"enum": ["true", "a", "[1"]}}}
    request = request_of(prompt="x", n=8, temperature=2, seed=3, response_format=wanted)
    texts = text_requests(request, engine)
    decoded = [
        engine.tokenizer.decode(one.row.token_ids, skip_special_tokens=True)
        for one in collect_all(engine, texts)
    ]
    assert {json.loads(text) for text in decoded} == {"true", "a", "[1"}


def schema_request(schema):
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    return request_of(prompt="x", response_format=wanted)


def test_schema_compilation_stops_at_its_limits(engine):
    many = {
        "type": "object",
        "properties": {f"p{number}": {"type": "integer"} for number in range(3_000)},
    }
    words = {"enum": [f"{number * 7919:x}" * 4 for number in range(12_000)]}
    huge = {"enum": [1_000_001 * "a"]}
    for schema, message in (
        (many, "in 2 s and 30000000 bytes of memory, got one that takes more"),
        (words, "got one that takes more"),
        (huge, "of at most 1000000 bytes, got 1000015"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            text_requests(schema_request(schema), engine)
        assert (caught.value.status, caught.value.param) == (400, "response_format")
    assert text_requests(schema_request(SCHEMA), engine)


NO_VALUE = {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.0000001}


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"anyOf": []}, NO_VALUE], ids=["ref", "any", "range"]
)
def test_unsatisfiable_schema_is_refused(engine, schema):
    for wrong in (schema, {"type": "object", "properties": {"a": schema}, "required": ["a"]}):
        with pytest.raises(RequestError, match="that no value fits") as caught:
            text_requests(schema_request(wrong), engine)
        assert caught.value.status == 400


def test_grammar_without_a_next_token_fails_its_row_only(engine):
    nothing = {"type": "string", "pattern": r"^[^\s\S]$"}
    schema = {"type": "object", "properties": {"a": nothing}, "required": ["a"]}
    (text,) = text_requests(schema_request(schema), engine)
    (beside,) = text_requests(schema_request(SCHEMA), engine)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(collect_all, engine, [beside])
        with pytest.raises(
            RequestError, match=re.escape("""one that ends after '{"a": "'""")
        ) as caught:
            collect_all(engine, [text])
        assert answer.result()[0].row.error is None
    assert caught.value.status == 400


def test_unsupported_formats_are_refused(engine, monkeypatch):
    for fields, words in (
        ({"response_format": {"type": "json_schema"}}, "must have json_schema if its type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "json_schema.schema must be given",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema'",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "leave out ignore_eos"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "no such"}},
                }
            },
            'a schema that xgrammar compiles, got Unsupported type "no such"$',
        ),
    ):
        with pytest.raises(RequestError, match=words):
            text_requests(request_of(prompt="x", **fields), engine)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(
        RequestError, match=r'xgrammar must .*; run pip install "hf-speculate\[grammar\]"'
    ):
        text_requests(request_of(prompt="x", response_format={"type": "json_object"}), engine)
