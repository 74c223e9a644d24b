"""Text written by the target, with the hidden states for an EAGLE-3 head."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from training.pair.selftext import BATCH_SIZE, ROW_LEN, continue_rows, draw_prefixes

AUX_LAYERS = (2, 8, 13)
NUM_ROWS_PER_FORWARD = 16
# Training uses the last of the 320 tokens in a row; the target wrote 128 or more of them.
READ_LEN = 192


class Rows(NamedTuple):
    """Texts with states of the target."""

    ids: Tensor  # [R, W] int64
    states: Tensor  # [R, W, A * H] float16, inputs of `AUX_LAYERS`
    last: Tensor  # [R, W, H] float16, states after the final norm


def write_rows(
    target: LlamaForCausalLM, stream: np.ndarray, num_batches: int, seed: int, folder: Path
) -> list[Rows]:
    """Write batches of 96 rows of real text that the target continues, half of them sampled.

    Args:
        target: model that writes the text.
        stream: [N] uint16, token ids of real text.
        num_batches: number of returned batches; batches in the folder are not written again.
        seed: seed for prefixes and sampling.
        folder: folder that gets one file per batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{batch:03d}.pt" for batch in range(num_batches)]
    for batch, path in enumerate(paths):
        if not path.is_file():
            torch.manual_seed(seed * 100_003 + batch)
            prefixes, is_greedy = (
                draw_prefixes(stream, batch, seed),
                torch.arange(BATCH_SIZE) % 2 == 0,
            )
            rows = read_rows(target, continue_rows(target, prefixes, ROW_LEN, is_greedy).ids)
            partial = path.with_suffix(".partial")
            torch.save(tuple(rows), partial)
            partial.replace(path)
            print(f"wrote batch {batch} of {num_batches} of text", flush=True)
    return [Rows(*torch.load(path, weights_only=True, mmap=True)) for path in paths]


@torch.inference_mode()
def read_rows(target: LlamaForCausalLM, ids: Tensor) -> Rows:
    """Return rows [R, W] with states of the target."""
    states, last = [], []
    for row_ids in ids.split(NUM_ROWS_PER_FORWARD):
        hidden = target.model(row_ids, output_hidden_states=True, use_cache=False).hidden_states
        states.append(torch.cat([hidden[layer] for layer in AUX_LAYERS], dim=-1).half())
        last.append(hidden[-1].half())
    return Rows(ids, torch.cat(states), torch.cat(last))


def draw_rows(batches: list[Rows], num_rows: int, greedy_share: float, seed: int) -> Rows:
    """Return the last columns of random rows; a seed always gives the same rows.

    Args:
        batches: batches of rows.
        num_rows: number of rows to draw.
        greedy_share: probability of drawing a row that was written greedily.
        seed: seed for the choice.
    """
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(batches) * BATCH_SIZE // 2, (num_rows,), generator=generator)
    is_sampled = torch.rand(num_rows, generator=generator) >= greedy_share
    rows = []
    for index in (2 * indices + is_sampled).tolist():
        batch, row = divmod(index, BATCH_SIZE)
        rows.append([values[row, -READ_LEN:] for values in batches[batch]])
    return Rows(*(torch.stack(columns) for columns in zip(*rows, strict=True)))
