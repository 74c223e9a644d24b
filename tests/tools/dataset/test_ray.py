"""Compare Ray Data actors with one process: each row occurs once, even if an actor is killed."""

import functools
from pathlib import Path

import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.dataset.decode import decode_job
from hf_speculate.tools.dataset.files import Job
from hf_speculate.tools.dataset.on_ray import decode_on_ray, resources_of
from hf_speculate.tools.dataset.ranks import Ranks
from hf_speculate.tools.dataset.rows import batches_of, read_rows
from tests.support.tiny_tokenizers import letters_tokenizer
from tests.tools.dataset.common import (
    LETTERS,
    NUM_NEW,
    batch_words,
    plain_results,
    prompts,
    texts_in,
    write_prompts,
)
from tests.tools.dataset.workers import fatal_decoder

ray = pytest.importorskip("ray", reason="needs Ray")
ROOT = Path(__file__).parents[3]
TEXTS = prompts(20)
STORE_BYTES = 100_000_000


@pytest.fixture(scope="module")
def cluster():
    """Start one local Ray cluster with two CPUs, without usage reports."""
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=2,
            object_store_memory=STORE_BYTES,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
        yield
        ray.shutdown()


def decode(make, output, on_batch=None, **options):
    tokenizer = letters_tokenizer(LETTERS)
    job = Job(read_rows(TEXTS), output, {"name": "test"})
    return decode_job(
        job,
        lambda rows: batches_of(rows, 2, tokenizer, False),
        lambda batches, seed, on_begin: decode_on_ray(make, batches, seed, **options),
        Ranks(),
        on_batch,
    )


@pytest.mark.slow
def test_rows_come_once_even_if_an_actor_dies(cluster, folder, tmp_path):
    (tmp_path / "notes").mkdir()
    make, reports = functools.partial(fatal_decoder, folder, NUM_NEW, tmp_path / "notes", 1), []
    report = decode(make, tmp_path / "out.jsonl", reports.append, workers=2)
    assert list((tmp_path / "notes").iterdir())
    expected = plain_results(folder / "target", TEXTS)
    assert texts_in(tmp_path / "out.jsonl") == {
        number: text for number, (text, *_) in enumerate(expected, 1)
    }
    assert [each.num_finished for each in reports] == list(range(2, 21, 2))
    assert report.num_tokens == sum(num for _, num, _ in expected)


@pytest.mark.slow
def test_batch_that_always_ends_its_actor_is_named(cluster, folder, tmp_path):
    (tmp_path / "notes").mkdir()
    make = functools.partial(fatal_decoder, folder, NUM_NEW, tmp_path / "notes", 99)
    with pytest.raises(
        ConfigError, match=r"must not kill its actor, got 2 rows \(.*\) on which 1 died"
    ):
        decode(make, tmp_path / "out.jsonl", workers=1, num_attempts=1)


@pytest.mark.slow
def test_actors_resume_the_run_of_one_process(cluster, folder, tmp_path, capsys):
    ids, output = write_prompts(tmp_path / "prompts.jsonl", TEXTS), tmp_path / "out.jsonl"
    words = batch_words(folder, output, "-k", "3")
    assert main(words) == 0
    whole = texts_in(output)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:9]))
    words += ["--engine", "ray", "--ordered", "--workers"]
    assert main([*words, "9"]) == 2
    assert (
        "all workers must fit into the cluster, got 9 of 1 CPU each with 2 CPU"
        in capsys.readouterr().err
    )
    assert main([*words, "1"]) == 0
    assert texts_in(output) == whole
    assert list(texts_in(output)) == ids


def test_all_gpus_are_used_before_cpus():
    for cluster_has, own, reserved, num_workers in (
        ({"CPU": 2.0}, {"workers": 5, "cpus_per_worker": 0.4}, {"num_cpus": 0.4}, 5),
        ({"CPU": 8.0, "GPU": 4.0}, {}, {"num_gpus": 1.0}, 4),
        ({"CPU": 8.0, "GPU": 4.0}, {"gpus_per_worker": 0}, {"num_cpus": 1.0}, 1),
        # The remainder of one GPU is not combined with the remainder of another.
        ({"GPU": 2.0}, {"gpus_per_worker": 0.4}, {"num_gpus": 0.4}, 4),
    ):
        options = {"workers": None, "cpus_per_worker": 1.0, "gpus_per_worker": None} | own
        assert resources_of(cluster_has, **options) == (reserved, num_workers)
        with pytest.raises(ConfigError, match="got 99 of"):
            resources_of(cluster_has, **{**options, "workers": 99})
