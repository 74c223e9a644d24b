"""Test that `accelerate launch` splits the rows over its processes, and that one may be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hf_speculate.errors import ConfigError, MissingExtraError, UnsupportedModelError
from hf_speculate.tools.cli.main import main
from hf_speculate.tools.dataset.decode import decode_job
from hf_speculate.tools.dataset.files import Job, cut_torn_line
from hf_speculate.tools.dataset.ranks import Ranks, check_model, find_ranks
from hf_speculate.tools.dataset.row_decoder import Decoded
from hf_speculate.tools.dataset.rows import read_rows
from tests.tools.dataset.common import batch_words, begun_in, prompts, texts_in, write_prompts

ROOT = Path(__file__).parents[3]
NUM_ROWS, OPTIONS = 48, ["-k", "3", "--ordered"]
TIMEOUT_S = 200
LAUNCH = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]


def launched(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in two processes on this machine."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *LAUNCH,
        "-m",
        "hf_speculate.tools.cli.main",
    ]
    return subprocess.Popen(
        [*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_rows_survive_the_kill_of_one_of_two_processes(folder, tmp_path):
    ids = write_prompts(tmp_path / "prompts.jsonl", prompts(NUM_ROWS))
    alone, output = tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    assert main(batch_words(folder, alone, *OPTIONS)) == 0

    first = launched(*batch_words(folder, output, *OPTIONS))
    deadline = time.monotonic() + TIMEOUT_S
    while len(begun_in(output, 1)) < 2:
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    children = psutil.Process(first.pid).children(recursive=True)
    next(child for child in children if child.environ().get("RANK") == "1").send_signal(
        signal.SIGKILL
    )
    first.communicate(timeout=TIMEOUT_S)
    assert first.returncode != 0
    num_begun = [len(begun_in(output, rank)) for rank in (0, 1)]
    parts = list(tmp_path.glob("out.jsonl.run/rank-*.jsonl"))
    finished_ids = {key for path in parts for key in (cut_torn_line(path), texts_in(path))[1]}
    assert set() < finished_ids < set(ids)

    second = launched(*batch_words(folder, output, *OPTIONS))
    err = second.communicate(timeout=TIMEOUT_S)[1]
    assert second.returncode == 0, err
    again = [
        key
        for rank in (0, 1)
        for batch in begun_in(output, rank)[num_begun[rank] :]
        for key in batch
    ]
    assert sorted(again) == sorted(set(ids) - finished_ids)
    assert texts_in(output) == texts_in(alone)
    assert list(texts_in(output)) == ids
    assert f"{len(finished_ids)} of them from earlier runs" in err
    assert not list(tmp_path.glob("out.jsonl.run/rank-*"))


def run_alone(place: Ranks, output: Path, decoded: list[str]) -> None:
    """Run only one of two ranks; no rank waits for the other."""
    job = Job(read_rows(["bc", "de", "fg"]), output, {})

    def engine(batches, seed, on_begin):
        for batch in batches:
            decoded.extend(row.key for row in batch)
            yield Decoded([{"id": row.id, "text": "", "num_tokens": 1} for row in batch], 0, 0, 0)

    decode_job(job, lambda rows: [[row] for row in rows], engine, place)


def test_ranks_need_accelerate_and_whole_models(monkeypatch):
    with pytest.raises(UnsupportedModelError, match="each of 2 ranks must hold a whole model"):
        check_model(SimpleNamespace(tp_size=2), Ranks(0, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r'run pip install "hf-speculate\[ranks\]", or'):
        find_ranks()


def test_ranks_take_batches_in_turn_from_a_shared_folder(tmp_path):
    decoded, output = [], tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="all ranks must share the folder of the output, got no"):
        run_alone(Ranks(1, 2), tmp_path / "elsewhere" / "out.jsonl", decoded)
    assert not decoded
    with pytest.raises(
        ConfigError, match=r"got none for 1 \(2\); choose an output on a file system"
    ):
        run_alone(Ranks(0, 2), output, decoded)
    lines = output.read_bytes()
    output.write_bytes(b"")
    run_alone(Ranks(1, 2), output, decoded)
    output.write_bytes(lines)
    run_alone(Ranks(), output, decoded)
    assert decoded == ["1", "3", "2"]
    assert list(texts_in(output)) == [1, 3, 2]
