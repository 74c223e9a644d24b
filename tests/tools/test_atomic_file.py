"""Replaced files are whole."""

from hf_speculate.tools.atomic_file import replace_text


def test_a_text_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "manifest.json"
    replace_text(path, "old")
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["manifest.json"]
