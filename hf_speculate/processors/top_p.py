"""Top-p on a CPU, by the smallest score that a row keeps.

transformers sorts scores together with their indices. numpy sorts the scores alone, which takes a tenth of the time
(V = 4,096 and 32,000, an AMD EPYC), and the sums over sorted rows are the same, bit for bit: the indices only matter
if scores tie at the border and top-p drops some of them. Such rows go through transformers' own class.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TopPLogitsWarper


def supports_top_p(processor: Any, scores: Tensor) -> bool:
    """Whether `apply_top_p` gives the processor's result for scores [N, V]."""
    return type(processor) is TopPLogitsWarper and scores.device.type == "cpu" and scores.dtype == torch.float32


def apply_top_p(processor: Any, scores: Tensor) -> Tensor:
    """The processor's result for scores [N, V] float32 on a CPU, bitwise equal, as a new tensor."""
    ascending = torch.from_numpy(np.sort(scores.detach().numpy(), axis=-1))
    sums = ascending.softmax(-1).cumsum(-1)  # [N, V], these two as transformers calls them
    max_dropped = max(scores.shape[-1] - processor.min_tokens_to_keep, 0)
    mass = torch.full((len(sums), 1), 1 - processor.top_p, dtype=torch.float32, device=sums.device)
    # as many as transformers counts with `sums <= mass`, because sums never fall; none if they are NaN
    num_dropped = torch.searchsorted(sums, mass, right=True).clamp_(max=max_dropped)  # [N, 1]
    num_dropped.masked_fill_(sums[:, :1].isnan(), 0)
    lowest = ascending.gather(-1, num_dropped)  # [N, 1], the smallest score kept
    is_split = (num_dropped > 0) & (ascending.gather(-1, (num_dropped - 1).clamp(min=0)) == lowest)
    processed = scores.masked_fill(scores < lowest, processor.filter_value)
    rows = is_split[:, 0].nonzero()[:, 0]  # in which some scores equal to the lowest are dropped
    if len(rows):
        processed[rows] = processor(None, scores[rows])
    return processed
