"""Plain Python loops in float64 that decide one row at a time, fed with the library's own noise."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Stream, exponentials, uniforms


class Decision(NamedTuple):
    """What one row should give."""

    token_ids: list[int]
    margin: float  # how far the closest comparison was from going the other way


def _law(logits: Tensor, temperature: float, cutoff: float) -> Tensor:
    scaled = logits.float() / temperature
    return scaled.masked_fill(scaled < cutoff, -torch.inf).double()


def _race(weights: Tensor, keys: NoiseKeys, stream: Stream, offset: int) -> tuple[int, float]:
    """Winner of one row's race, and by which part it won."""
    clocks = exponentials(keys, stream, torch.tensor([[offset]]), torch.arange(len(weights)))[0].double()
    first, second = (weights / clocks).topk(2)[0].tolist() if len(weights) > 1 else (1.0, 0.0)
    return int((weights / clocks).argmax()), (first - second) / first


def draw(law: Tensor, keys: NoiseKeys, stream: Stream) -> Decision:
    """One draw from float64 logits [V]; `keys` of one row."""
    token_id, margin = _race(law.softmax(-1), keys, stream, 0)
    return Decision([token_id], margin)


def reject(
    target_logits: Tensor,
    draft_token_ids: list[int],
    draft_logits: Tensor | None,
    keys: NoiseKeys,
    temperature: float = 1.0,
    cutoffs: Tensor | None = None,
) -> Decision:
    """One row of rejection sampling: target [K+1, V], draft [K, V] or a point mass; `keys` of one row."""
    margin = 1.0
    num_positions = target_logits.shape[0]
    cutoff_list = [-torch.inf] * num_positions if cutoffs is None else cutoffs.tolist()
    laws = [_law(row, temperature, cutoff) for row, cutoff in zip(target_logits, cutoff_list, strict=True)]
    for position, token_id in enumerate(draft_token_ids):
        coin = float(uniforms(keys, Stream.ACCEPT, torch.tensor([[position]]), torch.tensor([[token_id]])))
        target = laws[position].softmax(-1)
        if draft_logits is None:
            draft = torch.zeros_like(target)
            draft[token_id] = 1.0
        else:
            draft = draft_logits[position].float().double().softmax(-1)
        ratio = float(target[token_id] / draft[token_id])
        margin = min(margin, abs(coin - min(ratio, 1.0)) / coin if ratio < 1.0 else ratio - coin)
        if coin >= ratio:
            winner, lead = _race((target - draft).clamp(min=0), keys, Stream.CORRECTION, position)
            return Decision([*draft_token_ids[:position], winner], min(margin, lead))
    winner, lead = _race(laws[-1].softmax(-1), keys, Stream.CORRECTION, num_positions - 1)
    return Decision([*draft_token_ids, winner], min(margin, lead))


def accept_typical(
    target_logits: Tensor, draft_token_ids: list[int], threshold: float, alpha: float, epsilon: float
) -> Decision:
    """One row of typical acceptance with the argmax as correction."""
    margin = 1.0
    for position, token_id in enumerate(draft_token_ids):
        probs = target_logits[position].float().double().softmax(-1)
        entropy = -sum(p * math.log(p + epsilon) for p in probs.tolist() if p > 0)
        bound = min(threshold, alpha * math.exp(-entropy))
        margin = min(margin, abs(float(probs[token_id]) - bound) / bound)
        if float(probs[token_id]) <= bound:
            return Decision([*draft_token_ids[:position], int(target_logits[position].float().argmax())], margin)
    return Decision([*draft_token_ids, int(target_logits[-1].float().argmax())], margin)


def match_greedy(target_logits: Tensor, draft_token_ids: list[int]) -> list[int]:
    """One row of greedy matching; ties go to the lowest index."""
    for position, token_id in enumerate(draft_token_ids):
        row = target_logits[position].float().tolist()
        best = row.index(max(row))
        if token_id != best:
            return [*draft_token_ids[:position], best]
    row = target_logits[-1].float().tolist()
    return [*draft_token_ids, row.index(max(row))]
