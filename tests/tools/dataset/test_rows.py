"""Test rows from all kinds of lines, named errors, and that result files are whole after a kill."""

import json

import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.generation.config_sources import fields_in
from hf_speculate.tools.bench.tuning import settings_in
from hf_speculate.tools.cli.arguments import read_prompts
from hf_speculate.tools.dataset import files
from hf_speculate.tools.dataset.decode import DatasetReport
from hf_speculate.tools.dataset.rows import read_rows

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
    (tmp_path / "question.jsonl").write_text("\r\n".join(lines))
    rows = read_rows(tmp_path / "question.jsonl")
    assert [(row.id, row.key, row.content, row.extras) for row in rows] == [
        (1, "1", "bare", {}),
        (7, "7", "b", {"source": {"page": 1}}),
        (4, "4", MESSAGES, {}),
        ("q", "q", "first", {"category": "writing"}),
        ("", "", "one\u2028line", {}),
    ]
    text = tmp_path / "prompts.txt"
    text.write_text("def main\n\nclass Stack\n")
    rows = [(row.key, row.content) for row in read_prompts(text, text_as="lines")]
    assert rows == [("1", "def main"), ("3", "class Stack")]
    assert [row.content for row in read_prompts(text)] == [text.read_text()]


def test_byte_order_marks_are_skipped(tmp_path):
    prompts, lines, path = tmp_path / "p.txt", tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("a\nb", encoding="utf-8-sig")
    assert [row.content for row in read_prompts(prompts)] == ["a\nb"]
    assert [row.content for row in read_prompts(prompts, text_as="lines")] == ["a", "b"]
    marked = [
        '"a"\n'.encode("utf-8-sig"),
        "\n".encode("utf-8-sig"),
        '{"prompt": "b"}'.encode("utf-8-sig"),
    ]
    lines.write_bytes(b"".join(marked))
    assert [(row.id, row.content) for row in read_rows(lines)] == [(1, "a"), (3, "b")]
    path.write_bytes(WHOLE.decode().encode("utf-8-sig"))
    assert b"".join(line for _, line in files.read_results(path)) == WHOLE
    assert list(DatasetReport(path, 3).results()) == RESULTS
    path.write_bytes('{"id": "torn'.encode("utf-8-sig"))
    files.cut_torn_line(path)
    assert path.read_bytes() == b""
    config = tmp_path / "generation_config.json"
    config.write_text('{"verifier": "typical"}', encoding="utf-8-sig")
    assert settings_in(tmp_path) == fields_in(config) == {"verifier": "typical"}


def test_bad_lines_and_invalid_prompts_are_named(tmp_path):
    for line, message in (
        (b"{", "must be JSON in UTF-8, got .* at p.jsonl:2"),
        (b'{"a": ' + 9_999 * b"[", "must be JSON in UTF-8, got .*recursion.* at p.jsonl:2"),
        (b'"\xff"', "must be JSON in UTF-8, got .*codec.* at p.jsonl:2"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed at p.jsonl:2"),
        (b'{"a": 1}', "one of messages, prompt, text, turns, got a at p.jsonl:2"),
        (
            b'{"prompt": "a", "id": true}',
            "id must be a string or an integer, got True at p.jsonl:2",
        ),
        (b'{"prompt": "a", "num_tokens": 3}', "got num_tokens at p.jsonl:2; rename it"),
        (b'{"prompt": "a", "id": 1}', "ids must be unique, got '1' at p.jsonl:1 and at p.jsonl:2"),
    ):
        (tmp_path / "p.jsonl").write_bytes(b'"good"\n' + line + b"\n")
        with pytest.raises(ConfigError, match=message):
            read_rows(tmp_path / "p.jsonl")
    for prompts, message in (
        ([{"prompt": "b", "where": {1, 2}}], "must be JSON in UTF-8, got .*set.* at prompt 1"),
        ([], "at least one prompt"),
        ("none.jsonl", "must exist, got none.jsonl"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_rows(prompts)


RESULTS = [{"id": "a", "text": "1"}, {"id": 2, "text": "ü\u2028\n"}, {"id": "c", "text": "3"}]
WHOLE = "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in RESULTS).encode()


def test_torn_file_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "out.jsonl"
    for num_bytes in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:num_bytes])
        whole_lines = WHOLE[:num_bytes].rpartition(b"\n")
        files.cut_torn_line(path)
        assert path.read_bytes() == whole_lines[0] + whole_lines[1]
        assert len(files.ids_in(path)) == path.read_bytes().count(b"\n")


def test_lines_that_are_no_results_are_named(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(WHOLE + b"notes")
    with pytest.raises(ConfigError, match="got another one at the end"):
        files.cut_torn_line(path)
    # three lines that are not results, and a repeated result
    for line in (b"{}", b"\0\0", b"[]", b'{"id": "a"}'):
        path.write_bytes(WHOLE + line + b"\n")
        with pytest.raises(ConfigError, match=r"at out\.jsonl:4"):
            files.ids_in(path)


@pytest.mark.parametrize("num_moved", [0, 1, 3])
def test_killed_move_is_repeated(num_moved, tmp_path):
    part, whole = tmp_path / "part.jsonl", tmp_path / "whole.jsonl"
    part.write_bytes(WHOLE + b'{"id": "to')
    if num_moved:
        files.append_json(whole, RESULTS[:num_moved])
    files.move_results(part, whole)
    assert whole.read_bytes() == WHOLE
    assert not part.exists()
