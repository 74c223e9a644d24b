"""Top-p on a GPU, without the operators of transformers' class that have no effect."""

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

# Rounding adds at most a few hundredths to the sum of a row's probabilities.
_MIN_TOP_P = 0.1


def apply_cutoff(processor: TopPLogitsWarper, scores: Tensor) -> Tensor | None:
    """Return the processor's bitwise equal result for scores [N, V] as a new tensor.

    Return None if the processor must run itself. If `min_tokens_to_keep` is 1, the likeliest token
    needs no special case, since its sum is about 1 and so above 1 - `top_p`.
    """
    if processor.min_tokens_to_keep != 1 or processor.top_p < _MIN_TOP_P:
        return None
    ascending, order = torch.sort(scores)
    is_dropped = ascending.softmax(-1).cumsum(-1) <= 1 - processor.top_p
    return scores.masked_fill(is_dropped.scatter(1, order, is_dropped), processor.filter_value)
