"""Decoders that actors of Ray make, some of which end their actor; imports little, as every actor does so anew."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_speculate.commands.batch import make_decoder
from hf_speculate.dataset.row_decoder import RowDecoder


def fatal_decoder(
    target: str, draft: str, num_new: int, marked_ids: Sequence[int], deaths: str, max_deaths: int
) -> RowDecoder:
    """A decoder that kills its process where a prompt is met, as often as told.

    Args:
        target: folder.
        draft: folder.
        num_new: tokens of each row.
        marked_ids: the prompt.
        deaths: a file that gets a byte at every death.
        max_deaths: how often.
    """
    arguments = {"max_new_tokens": num_new, "do_sample": False, "num_assistant_tokens": 3}
    decoder = make_decoder(target, draft, "float64", "cpu", arguments, False)
    marked = torch.tensor(marked_ids)
    model: Any = decoder.model
    generate = model.generate

    def kills(**arguments: Any) -> Any:
        ends = arguments["input_ids"][:, -len(marked) :]
        path = Path(deaths)
        if ends.shape[1] == len(marked) and (ends == marked).all(1).any():
            num_deaths = path.stat().st_size if path.exists() else 0
            if num_deaths < max_deaths:
                path.write_bytes(b"x" * (num_deaths + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return generate(**arguments)

    model.generate = kills
    return decoder
