"""Top-p on a GPU, without those operators of transformers' class that change nothing."""

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

# Rounding adds at most a few hundredths to the sum of a row's probabilities.
_MIN_TOP_P = 0.1


def apply_cutoff(processor: TopPLogitsWarper, scores: Tensor) -> Tensor | None:
    """Return the processor's result for scores [N, V], bitwise equal, as a new tensor.

    None if the processor has to run itself. With one token to keep, the most likely one is kept by
    its sum: about 1, which is more than 1 - `top_p`.
    """
    if processor.min_tokens_to_keep != 1 or processor.top_p < _MIN_TOP_P:
        return None
    ascending, order = torch.sort(scores)
    is_dropped = ascending.softmax(-1).cumsum(-1) <= 1 - processor.top_p
    return scores.masked_fill(is_dropped.scatter(1, order, is_dropped), processor.filter_value)
