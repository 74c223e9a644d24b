"""Make decoders for Ray actors; some of them kill their actor.

The module imports little, because every actor imports it again.
"""

import os
import signal
from pathlib import Path
from typing import Any

from hf_speculate.tools.cli.batch import make_decoder
from hf_speculate.tools.cli.options import Models
from hf_speculate.tools.dataset.row_decoder import RowDecoder


def fatal_decoder(folder: Path, num_new: int, notes: Path, num_deaths: int) -> RowDecoder:
    """Make a decoder that kills its process and leaves a note, up to `num_deaths` times."""
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
