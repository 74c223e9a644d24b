"""A file of results is whole after every kill."""

import json

import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.tools.dataset import files

RESULTS = [{"id": "a", "text": "1"}, {"id": 2, "text": "ü\u2028\n"}, {"id": "c", "text": "3"}]
WHOLE = "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in RESULTS).encode()


def test_appended_results_are_read_back(tmp_path):
    path = tmp_path / "out.jsonl"
    files.append_results(path, RESULTS[:1])
    files.append_results(path, RESULTS[1:])
    assert path.read_bytes() == WHOLE
    spans = files.spans_of(path)
    assert list(spans) == ["a", "2", "c"]
    assert json.loads(WHOLE[spans["2"].begin :][: spans["2"].num_bytes]) == RESULTS[1]


def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "out.jsonl"
    for num_bytes in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:num_bytes])
        kept = WHOLE[:num_bytes].rpartition(b"\n")
        assert files.cut_torn_line(path) == len(kept[2])
        assert path.read_bytes() == kept[0] + kept[1]
        assert len(files.spans_of(path)) == path.read_bytes().count(b"\n")
    assert files.cut_torn_line(tmp_path / "none.jsonl") == 0


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path):
    path = tmp_path / "out.jsonl"
    torn = b'{"id": "' + b"x" * (3 << 16)
    path.write_bytes(WHOLE + torn)
    assert files.cut_torn_line(path) == len(torn)
    assert path.read_bytes() == WHOLE


def test_a_last_line_of_somebody_else_is_not_cut(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(WHOLE + b"notes")
    with pytest.raises(ConfigError, match="got another one at the end"):
        files.cut_torn_line(path)
    assert path.read_bytes() == WHOLE + b"notes"


@pytest.mark.parametrize("num_moved", [0, 1, 3])
@pytest.mark.parametrize("torn", [b"", b'{"id": "to'])
def test_a_move_that_was_killed_is_done_again(num_moved, torn, tmp_path):
    part, whole = tmp_path / "part.jsonl", tmp_path / "whole.jsonl"
    files.append_results(part, RESULTS)
    part.write_bytes(part.read_bytes() + torn)
    if num_moved:
        files.append_results(whole, RESULTS[:num_moved])
    files.move_results(part, whole)
    assert whole.read_bytes() == WHOLE
    assert not part.exists()


def test_lines_are_sorted_into_a_new_file(tmp_path):
    path = tmp_path / "out.jsonl"
    files.append_results(path, RESULTS)
    files.put_in_order(path, ["c", "a", "2"])
    assert list(files.spans_of(path)) == ["c", "a", "2"]
    assert sorted(path.read_bytes().splitlines()) == sorted(WHOLE.splitlines())
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}\n", "got another one at out.jsonl:4"),
        (b"\0\0\n", "got another one at out.jsonl:4"),
        (b"[]\n", "got another one at out.jsonl:4"),
        (b'{"id": "a"}\n', "ids must be unique, got 'a' again at out.jsonl:4"),
    ],
)
def test_a_line_that_is_no_result_is_named(line, message, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(WHOLE + line)
    with pytest.raises(ConfigError, match=message):
        files.spans_of(path)
