"""Actors of Ray Data decode what one process decodes, every row once, though one is killed."""

import functools
import sys
from pathlib import Path

import pytest

from hf_speculate.errors import ConfigError, MissingExtraError
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.dataset.encoding import batches_of
from hf_speculate.tools.dataset.on_ray import RayOptions, on_ray, resources_of
from hf_speculate.tools.dataset.ranks import Ranks
from hf_speculate.tools.dataset.rows import read_rows
from hf_speculate.tools.dataset.run import Job, run
from tests.tiny_tokenizers import letters_tokenizer
from tests.tools.dataset.common import (
    LETTERS,
    NUM_NEW,
    batch_words,
    plain_results,
    prompts,
    save_pair,
    texts_in,
    write_prompts,
)
from tests.tools.dataset.workers import fatal_decoder, pids

ray = pytest.importorskip("ray", reason="needs Ray")
ROOT = Path(__file__).parents[3]
TEXTS = prompts(20)
MARKED_IDS = [LETTERS.index(letter) for letter in TEXTS[7]]
STORE_BYTES = 100_000_000


@pytest.fixture(scope="module")
def cluster():
    """One local Ray of two CPUs, which is told to report nothing."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


def decode(make, output, options, on_batch=None):
    tokenizer = letters_tokenizer(LETTERS)
    job = Job(read_rows(TEXTS), output, {"name": "test"})
    return run(job, lambda rows: batches_of(rows, 2, tokenizer, False), on_ray(make, options), Ranks(), on_batch)


@pytest.mark.slow
def test_every_row_comes_once_though_an_actor_dies(cluster, folder, tmp_path):
    target, draft = str(folder / "target"), str(folder / "draft")
    notes = tmp_path / "notes"
    notes.mkdir()
    make = functools.partial(fatal_decoder, target, draft, NUM_NEW, MARKED_IDS, str(notes), 1, 1)
    reports = []
    report = decode(make, tmp_path / "out.jsonl", RayOptions(num_workers=2), reports.append)
    assert len(pids(notes, "died")) == 1
    assert len(pids(notes, "decoded") - pids(notes, "died")) == 2  # the other actor, and the one started anew
    expected = plain_results(folder / "target", TEXTS)
    assert texts_in(tmp_path / "out.jsonl") == {place: text for place, (text, *_) in enumerate(expected, 1)}
    assert [each.num_finished for each in reports] == list(range(2, 21, 2))
    assert report.num_tokens == sum(num for _, num, _ in expected)
    assert 0 < report.acceptance_rate <= 1


@pytest.mark.slow
def test_a_batch_that_always_ends_its_actor_is_named_and_the_rest_goes_on_later(cluster, folder, tmp_path):
    target, draft = str(folder / "target"), str(folder / "draft")
    notes, output = tmp_path / "notes", tmp_path / "out.jsonl"
    notes.mkdir()
    make = functools.partial(fatal_decoder, target, draft, NUM_NEW, MARKED_IDS, str(notes), 1)
    with pytest.raises(ConfigError, match=r"must not kill its actor, got 2 rows \(.*\b8\b.*\) on which 1 died"):
        decode(make, output, RayOptions(num_workers=1, num_attempts=1))
    report = decode(make, output, RayOptions(num_workers=1, num_attempts=1))
    assert report.num_rows == len(texts_in(output)) == 20


@pytest.mark.slow
def test_the_command_goes_on_with_actors_where_one_process_was_ended(cluster, folder, tmp_path, capsys):
    ids = write_prompts(folder / "prompts.jsonl", TEXTS)
    output = tmp_path / "out.jsonl"
    words = batch_words(folder, output, "-k", "3")
    assert main(words) == 0
    whole = texts_in(output)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:9]))
    assert main([*words, "--engine", "ray", "--workers", "1", "--ordered"]) == 0
    assert texts_in(output) == whole
    assert list(texts_in(output)) == ids
    assert "20 rows in" in capsys.readouterr().err


@pytest.mark.slow
def test_what_users_can_mend_is_one_line(cluster, folder, tmp_path, capsys):
    write_prompts(folder / "prompts.jsonl", TEXTS[:2])
    words = batch_words(folder, tmp_path / "out.jsonl", "--engine", "ray", draft=False)
    assert main([*words, "--workers", "9"]) == 2
    assert "all workers must fit into the cluster, got 9 of 1 CPU each with 2 CPU" in capsys.readouterr().err
    assert main([*words, "-d", str(folder / "none"), "--workers", "1"]) == 2
    err = capsys.readouterr().err
    assert "a model must be a folder" in err
    assert len([line for line in err.splitlines() if line.startswith("hf-speculate: ")]) == 1


@pytest.mark.parametrize(
    ("cluster_has", "options", "reserved", "num_workers"),
    [
        ({"CPU": 8.0}, {}, {"num_cpus": 1.0}, 1),
        ({"CPU": 8.0}, {"num_workers": 4, "cpus_per_worker": 2.0}, {"num_cpus": 2.0}, 4),
        ({"CPU": 1.0}, {"num_workers": 9, "cpus_per_worker": 0}, {"num_cpus": 0}, 9),
        ({"CPU": 2.0}, {"num_workers": 5, "cpus_per_worker": 0.4}, {"num_cpus": 0.4}, 5),
        ({"CPU": 8.0, "GPU": 4.0}, {}, {"num_gpus": 1.0}, 4),
        ({"CPU": 8.0, "GPU": 4.0}, {"num_workers": 2}, {"num_gpus": 1.0}, 2),
        ({"CPU": 8.0, "GPU": 4.0}, {"gpus_per_worker": 0}, {"num_cpus": 1.0}, 1),
        ({"GPU": 5.0}, {"gpus_per_worker": 2}, {"num_gpus": 2}, 2),
        ({"GPU": 2.0}, {"gpus_per_worker": 0.2}, {"num_gpus": 0.2}, 10),
        ({"GPU": 2.0}, {"gpus_per_worker": 0.4}, {"num_gpus": 0.4}, 4),  # no GPU's rest is joined with another's
        ({"GPU": 0.5}, {}, {"num_gpus": 0.5}, 1),
    ],
)
def test_gpus_are_taken_before_cpus_and_all_of_them(cluster_has, options, reserved, num_workers):
    assert resources_of(cluster_has, RayOptions(**options)) == (reserved, num_workers)


@pytest.mark.parametrize(
    ("cluster_has", "options", "message"),
    [
        ({"CPU": 2.0}, {"gpus_per_worker": 1}, "got 1 of 1 GPU each with 0 GPU, enough for 0"),
        ({"CPU": 2.0}, {"cpus_per_worker": 3}, "got 1 of 3 CPU each with 2 CPU, enough for 0"),
        ({"GPU": 4.0}, {"num_workers": 5}, "got 5 of 1 GPU each with 4 GPU, enough for 4"),
        ({"GPU": 1.0}, {"gpus_per_worker": 2}, "got 1 of 2 GPU each with 1 GPU, enough for 0"),
        ({"GPU": 2.0}, {"num_workers": 5, "gpus_per_worker": 0.4}, "got 5 of 0.4 GPU each with 2 GPU, enough for 4"),
    ],
)
def test_workers_that_do_not_fit_are_refused(cluster_has, options, message):
    with pytest.raises(ConfigError, match=message):
        resources_of(cluster_has, RayOptions(**options))


def test_ray_is_named_where_it_is_missing(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ray\[data\]", or pip install "\.\[ray\]"'):
        decode(
            functools.partial(fatal_decoder, "none", "none", NUM_NEW, MARKED_IDS, "none", 0),
            tmp_path / "out.jsonl",
            RayOptions(),
        )
