"""A run that is killed with SIGKILL at any moment goes on, and loses the batch that ran."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from hf_speculate.tools.cli.main import main
from tests.tools.dataset.common import NUM_NEW, begun_in, prompts, save_pair, texts_in, write_prompts

NUM_ROWS, BATCH_SIZE = 48, 4
MOMENTS = (0, 2, 3, 6, 8)  # batches that have begun in a run when it is killed
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def processes():
    """Processes that start with the command imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_speculate.tools.cli.main", "hf_speculate.tools.cli.batch"])
    return context


def words(folder: Path, output: Path) -> list[str]:
    options = ["-d", str(folder / "draft"), "-k", "3", "--device", "cpu"]
    sizes = ["-b", str(BATCH_SIZE), "-n", str(NUM_NEW), "--dtype", "float64"]
    return ["batch", str(folder / "target"), str(folder / "prompts.jsonl"), "-o", str(output), *options, *sizes]


def finished_in(output: Path) -> set[str]:
    """Ids of the whole lines."""
    lines = output.read_bytes().split(b"\n")[:-1] if output.exists() else []
    return {json.loads(line)["id"] for line in lines}


@pytest.mark.slow
def test_killed_runs_go_on_until_every_row_is_there_once(processes, tmp_path):
    save_pair(tmp_path)
    ids = write_prompts(tmp_path / "prompts.jsonl", prompts(NUM_ROWS))
    undisturbed, output = tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    assert main(words(tmp_path, undisturbed)) == 0
    expected = texts_in(undisturbed)
    assert sorted(expected) == sorted(ids)

    num_kills = 0
    for index, moment in enumerate(MOMENTS):
        num_before, finished = len(begun_in(output)), finished_in(output)
        process = processes.Process(target=main, args=(words(tmp_path, output),))
        process.start()
        deadline = time.monotonic() + TIMEOUT_S
        while process.is_alive() and len(begun_in(output)) < num_before + moment:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(0.01 * index)  # within the batch, or between it and the next
        num_kills += process.is_alive()
        process.kill()
        process.join(TIMEOUT_S)
        begun = [key for batch in begun_in(output)[num_before:] for key in batch]
        assert not finished & set(begun)  # what was finished is never decoded again
        assert finished <= finished_in(output)  # nor lost
        assert len(set(begun) - finished_in(output)) <= BATCH_SIZE  # the batch that ran
    assert num_kills >= 3

    assert main([*words(tmp_path, output), "--ordered"]) == 0
    assert texts_in(output) == expected
    assert list(texts_in(output)) == ids
    begun = [key for batch in begun_in(output) for key in batch]
    assert len(begun) - NUM_ROWS <= num_kills * BATCH_SIZE
