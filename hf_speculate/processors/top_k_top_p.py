"""Top-k and top-p on a CPU, by the smallest score that a row keeps.

transformers sorts scores together with their indices. numpy sorts the scores alone, which takes a tenth of the time
(V = 4,096 and 32,000, 2 cores of an AMD EPYC), and the sums over sorted rows are the same, bit for bit: the indices
only matter where scores tie at the border and top-p drops some of them. Such rows go through transformers' own class.
numpy also does the small operations, in a third of torch's time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper


class Cutoffs(NamedTuple):
    """The smallest score that each row keeps."""

    lowest: NDArray[np.float32]  # [N], the smallest score kept
    is_split: NDArray[np.bool_] | None  # [N], scores equal to it are dropped too; None if none is
    scratch: Tensor  # [N, V] float32, memory for the result: new memory is not in the CPU's caches


def apply_cutoff(processor: Any, scores: Tensor) -> Tensor | None:
    """The processor's result for scores [N, V], bitwise equal, as a new tensor; None if it has to run itself."""
    find = _FIND.get(type(processor))
    if find is None or scores.device.type != "cpu" or scores.dtype != torch.float32:
        return None
    scores = scores.detach()
    lowest, is_split, processed = find(processor, scores.numpy())
    _drop_below(scores, torch.from_numpy(lowest)[:, None], processor.filter_value, out=processed)
    if is_split is not None and is_split.any():
        rows = torch.from_numpy(is_split)
        processed[rows] = processor(None, scores[rows])
    return processed


def _drop_below(scores: Tensor, lowest: Tensor, filter_value: float, out: Tensor) -> None:
    """Write scores [N, V] into `out`, with `filter_value` in place of those below `lowest` [N, 1].

    For -inf, the smaller of a score and its signed distance times infinity takes half the time of a comparison and a
    masked fill. The product is NaN for equal scores, and fmin ignores a NaN.
    """
    if filter_value != -torch.inf:
        out.copy_(scores).masked_fill_(scores < lowest, filter_value)
        return
    bounds = torch.sub(scores, lowest, out=out).mul_(torch.inf).numpy()
    np.fmin(scores.numpy(), bounds, out=bounds)


def _find_top_k(processor: Any, scores: NDArray[np.float32]) -> Cutoffs:
    rank = scores.shape[-1] - min(processor.top_k, scores.shape[-1])
    partitioned = np.partition(scores, rank, axis=-1)
    return Cutoffs(partitioned[:, rank].copy(), None, torch.from_numpy(partitioned))


def _find_top_p(processor: Any, scores: NDArray[np.float32]) -> Cutoffs:
    ascending = np.sort(scores, axis=-1)
    sums = torch.from_numpy(ascending).softmax(-1).cumsum_(-1)  # [N, V], these two as transformers calls them
    is_dropped = sums.numpy() <= np.float32(1 - processor.top_p)  # a prefix of the row, because sums never fall
    is_dropped[:, max(scores.shape[-1] - processor.min_tokens_to_keep, 0) :] = False
    num_dropped, rows = is_dropped.argmin(-1), np.arange(len(scores))  # [N]
    lowest = ascending[rows, num_dropped]
    is_split = (num_dropped > 0) & (ascending[rows, num_dropped - 1] == lowest)
    return Cutoffs(lowest, is_split, sums)


_FIND: dict[type, Callable[[Any, NDArray[np.float32]], Cutoffs]] = {
    TopKLogitsWarper: _find_top_k,
    TopPLogitsWarper: _find_top_p,
}
