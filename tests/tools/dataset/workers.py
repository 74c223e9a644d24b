"""Decoders that actors of Ray make, some of which end their actor; imports little, as every actor does so anew."""

import os
import signal
from pathlib import Path
from typing import Any

from hf_speculate.tools.cli.batch import make_decoder
from hf_speculate.tools.cli.options import Models
from hf_speculate.tools.dataset.row_decoder import RowDecoder


def fatal_decoder(folder: Path, num_new: int, notes: Path, num_deaths: int) -> RowDecoder:
    """A decoder that kills its process, and leaves a note, until there are as many as told."""
    models = Models(
        target=str(folder / "target"), draft=str(folder / "draft"), dtype="float64", device="cpu"
    )
    decoder = make_decoder(
        models, {"max_new_tokens": num_new, "do_sample": False, "num_assistant_tokens": 3}, False
    )
    model: Any = decoder.model
    generate = model.generate

    def kills(**arguments: Any) -> Any:
        if len(list(notes.iterdir())) < num_deaths:
            (notes / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(**arguments)

    model.generate = kills
    return decoder
