"""Test prompts from a column of a data set: a parquet file, one on the Hub, or JSON lines."""

import datetime
import json
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.tools.cli.arguments import read_prompts
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.cli.options import Table
from tests.tools.dataset.common import batch_words, prompts, results_in

CHAT = [{"role": "user", "content": "hello"}]
RECORDS = [
    {
        "question": "first",
        "id": "a",
        "answer": 7,
        "text": "other",
        "day": datetime.date(2026, 1, 1),
    },
    {"question": "second", "id": "b", "answer": None, "text": None, "day": None},
]


class Loaded(list):
    """Records as returned by `datasets.load_dataset`."""

    @property
    def column_names(self):
        return list(self[0])


@pytest.fixture
def hub(monkeypatch):
    """Replace `datasets`; one data set is on the Hub."""
    calls = []

    def load_dataset(name, subset=None, *, split, data_files=None):
        calls.append((name, subset, split))
        if data_files is not None:
            return Loaded(pyarrow.parquet.read_table(data_files).to_pylist())
        if name != "org/questions":
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        return Loaded(RECORDS)

    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None),
    )
    return calls


def read(path, **options):
    return read_prompts(path, text_as=None, table=Table(**options))


def test_dataset_column_is_the_prompt(hub, tmp_path):
    path = tmp_path / "questions.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    name = type(path)("org/questions")
    for where, options in ((path, {}), (name, {"split": "test", "subset": "main"}), (name, {})):
        rows = read(where, column="question", **options)
        assert [(row.id, row.content, row.extras) for row in rows] == [
            ("a", "first", {"answer": 7}),
            ("b", "second", {}),
        ]
        assert [row.source for row in rows] == [f"{where.name}:1", f"{where.name}:2"]
    assert hub == [
        ("parquet", None, "train"),
        ("org/questions", "main", "test"),
        ("org/questions", None, "train"),
    ]
    with pytest.raises(
        ConfigError, match=r"the prompt, got 'text' at questions:2; choose one of question, id"
    ):
        read(name, column="text")
    with pytest.raises(
        ConfigError, match=r"a column of the data set, got 'qestion'; did you mean question\?"
    ):
        read(name, column="qestion")
    with pytest.raises(
        ConfigError,
        match=r"got org/none on the Hub \(FileNotFoundError: Dataset 'org/none' doesn't",
    ):
        read(type(path)("org/none"))


def test_usual_column_names_need_no_option(hub, tmp_path):
    path = tmp_path / "p.parquet"
    for records, content in (
        ([{"messages": CHAT}], CHAT),
        ([{"turns": ["one", "two"]}], "one"),
        ([{"text": "a"}], "a"),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        assert [row.content for row in read(path)] == [content]
    for record, got in (
        ({"a": 1, "b": 2}, "none with the columns a, b"),
        ({"text": "", "prompt": ""}, "prompt and text"),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
        with pytest.raises(
            ConfigError, match=f"--column must name the column of the prompts, got .*{got}"
        ):
            read(path)


def test_field_of_json_lines_is_the_prompt(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        "\n".join(
            map(json.dumps, [{"question": "q", "prompt": "other"}, {"question": CHAT, "x": 1}])
        )
    )
    assert [(row.content, row.extras) for row in read(path, column="question")] == [
        ("q", {}),
        (CHAT, {"x": 1}),
    ]
    path.write_text('{"question": "q"}\n{"other": 1}\n"text"\n')
    with pytest.raises(
        ConfigError, match=r"got 'question' at p\.jsonl:2; choose one of other"
    ) as raised:
        read(path, column="question")
    assert "at p.jsonl:3; write objects with that field" in raised.value.__notes__[0]
    (tmp_path / "p.txt").write_text("one")
    for options in ({"column": "a"}, {"split": "test"}, {"subset": "b"}):
        with pytest.raises(ConfigError, match=f"--{next(iter(options))}.* must come with "):
            read_prompts(tmp_path / "p.txt", text_as="lines", table=Table(**options))


def test_batch_and_bench_read_a_parquet_file(folder, tmp_path, capsys):
    pytest.importorskip("datasets", reason="datasets is not installed")
    texts, output = prompts(3), tmp_path / "out.jsonl"
    table = pyarrow.table({"question": texts, "level": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    words = batch_words(folder, output, "--column", "question")
    words[2] = str(tmp_path / "p.parquet")
    assert main(words) == 0
    assert {key: line["level"] for key, line in results_in(output).items()} == {1: 1, 2: 2, 3: 3}
    bench = [
        "bench",
        str(folder / "target"),
        str(tmp_path / "p.parquet"),
        "-d",
        str(folder / "draft"),
        "--json",
    ]
    assert (
        main(
            [
                *bench,
                "-n",
                "4",
                "-k",
                "2",
                "--device",
                "cpu",
                "--column",
                "question",
                "-v",
                "greedy",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["settings"]["num_prompts"] == 3


def test_missing_datasets_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["batch", "nosuch", "org/questions", "-o", "out.jsonl"]) == 2
    assert (
        'datasets must be installed for this, got none; run pip install "hf-speculate[data]"'
        in capsys.readouterr().err
    )
