"""Decoders that actors of Ray make, some of which end their actor; imports little, as every actor does so anew."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_speculate.tools.cli.batch import make_decoder
from hf_speculate.tools.cli.options import Models
from hf_speculate.tools.dataset.row_decoder import RowDecoder

TIMEOUT_S = 120


def fatal_decoder(
    target: str, draft: str, num_new: int, marked_ids: Sequence[int], notes: str, max_deaths: int, num_others: int = 0
) -> RowDecoder:
    """A decoder that kills its process where a prompt is met, as often as told."""
    arguments = {"max_new_tokens": num_new, "do_sample": False, "num_assistant_tokens": 3}
    decoder = make_decoder(Models(target, draft, dtype="float64", device="cpu"), arguments, False)
    marked = torch.tensor(marked_ids)
    model: Any = decoder.model
    generate = model.generate

    def kills(**arguments: Any) -> Any:
        ends, folder = arguments["input_ids"][:, -len(marked) :], Path(notes)
        is_met = ends.shape[1] == len(marked) and bool((ends == marked).all(1).any())
        if is_met and len(pids(folder, "died")) < max_deaths:
            deadline = time.monotonic() + TIMEOUT_S
            while len(pids(folder, "decoded") - {os.getpid()}) < num_others and time.monotonic() < deadline:
                time.sleep(0.05)
            (folder / f"died-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        output = generate(**arguments)
        (folder / f"decoded-{os.getpid()}").touch()
        return output

    model.generate = kills
    return decoder


def pids(notes: Path, what: str) -> set[int]:
    """The processes of which a folder of `fatal_decoder` says `died` or `decoded`."""
    return {int(path.name.split("-")[1]) for path in notes.glob(f"{what}-*")}
