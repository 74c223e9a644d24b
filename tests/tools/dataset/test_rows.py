"""Lines of every kind are rows, and a bad one is named before anything is decoded."""

import json

import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset.rows import digest_of, read_rows

MESSAGES = [{"role": "user", "content": "hello"}]


def test_lines_of_every_kind_are_rows(tmp_path):
    lines = [
        '"bare"',
        "",
        json.dumps({"text": "b", "id": 7, "source": {"page": 1}}),
        json.dumps({"messages": MESSAGES, "prompt": None}),
        json.dumps({"question_id": "q", "category": "writing", "turns": ["first", "second"]}),
        json.dumps({"id": "", "prompt": "one\u2028line"}, ensure_ascii=False),
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\r\n".join(lines))
    rows = read_rows(file)
    assert [(row.id, row.key, row.content, row.extras) for row in rows] == [
        (1, "1", "bare", {}),
        (7, "7", "b", {"source": {"page": 1}}),
        (4, "4", MESSAGES, {}),
        ("q", "q", "first", {"category": "writing"}),
        ("", "", "one\u2028line", {}),
    ]
    assert rows[1].source == "question.jsonl:3"


def test_the_digest_follows_what_is_decoded():
    one = read_rows([{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "b"}])
    same = read_rows([{"prompt": "a", "id": "x"}, {"id": "y", "text": "b"}])
    other = read_rows([{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "c"}])
    assert digest_of(one) == digest_of(same)
    assert digest_of(one) != digest_of(other)
    assert digest_of(one) != digest_of(one[::-1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "each line must be JSON, got .* at p.jsonl:2"),
        (b'"\xff"', "each line must be UTF-8, got other bytes at p.jsonl:2"),
        (b"7", "one of messages, prompt, text, turns, got 7 at p.jsonl:2"),
        (b'{"a": 1}', "one of messages, prompt, text, turns, got a at p.jsonl:2"),
        (b'{"prompt": "a", "text": "b"}', "one of messages, prompt, text, turns, got prompt, text at p.jsonl:2"),
        (b'{"messages": ["a"]}', "got messages at p.jsonl:2"),
        (b'{"messages": []}', "got messages at p.jsonl:2"),
        (b'{"turns": []}', "got turns at p.jsonl:2"),
        (b'{"prompt": "a", "id": 1.5}', "id must be a string or an integer, got 1.5 at p.jsonl:2"),
        (b'{"prompt": "a", "id": true}', "id must be a string or an integer, got True at p.jsonl:2"),
        (b'{"prompt": "a", "id": null}', "id must be a string or an integer, got None at p.jsonl:2"),
        (b'{"prompt": "a", "num_tokens": 3}', "got num_tokens at p.jsonl:2; rename it"),
        (b'{"prompt": "a", "id": 1}', "ids must be unique, got '1' at p.jsonl:1 and at p.jsonl:2"),
        (b'{"prompt": "\\ud800"}', "an unpaired surrogate at p.jsonl:2"),
    ],
)
def test_a_bad_line_is_named(line, message, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'"good"\n' + line + b"\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path / "p.jsonl")


def test_bad_values_are_named():
    with pytest.raises(ConfigError, match=r"must be JSON, got .* at prompt 2"):
        read_rows(["a", {"prompt": "b", "where": {1, 2}}])
    with pytest.raises(ConfigError, match="at least one prompt"):
        read_rows([])


def test_a_missing_or_empty_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match="must exist, got"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ConfigError, match="at least one prompt"):
        read_rows(tmp_path / "empty.jsonl")
