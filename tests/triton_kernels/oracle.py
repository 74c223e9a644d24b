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


def _race(weights: Tensor, keys: NoiseKeys, stream: Stream, offset: int) -> tuple[int, float]:
    """Winner of one row's race, and by which part it won; by nothing where no weight is positive."""
    clocks = exponentials(keys, stream, torch.tensor([[offset]]), torch.arange(len(weights)))[0].double()
    first, second = (weights / clocks).topk(2)[0].tolist() if len(weights) > 1 else (1.0, 0.0)
    return int((weights / clocks).argmax()), (first - second) / first if first > 0.0 else 0.0


def draw(logits: Tensor, keys: NoiseKeys, stream: Stream) -> Decision:
    """One draw from float64 logits [V]; `keys` of one row."""
    token_id, margin = _race(logits.softmax(-1), keys, stream, 0)
    return Decision([token_id], margin)


def _target_probs(target_logits: Tensor, temperature: float, cutoffs: Tensor | None) -> Tensor:
    """Target probabilities of one row, [K+1, V] float64."""
    scaled = target_logits.float() / temperature
    if cutoffs is not None:
        scaled = scaled.masked_fill(scaled < cutoffs[:, None], -torch.inf)
    return scaled.double().softmax(-1)


def _coin(keys: NoiseKeys, position: int, token_id: int) -> float:
    return float(uniforms(keys, Stream.ACCEPT, torch.tensor([[position]]), torch.tensor([[token_id]])))


def _ratio(target: Tensor, draft: Tensor, token_id: int) -> float:
    """Target's over draft's probability: 0 for what the target forbids, infinite for what only the draft does."""
    ours, theirs = float(target[token_id]), float(draft[token_id])
    if ours == 0.0:
        return 0.0
    return ours / theirs if theirs > 0.0 else math.inf


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
    probs = _target_probs(target_logits, temperature, cutoffs)
    for position, token_id in enumerate(draft_token_ids):
        coin, target = _coin(keys, position, token_id), probs[position]
        if draft_logits is None:
            draft = torch.zeros_like(target)
            draft[token_id] = 1.0
        else:
            draft = draft_logits[position].float().double().softmax(-1)
        ratio = _ratio(target, draft, token_id)
        margin = min(margin, abs(coin - min(ratio, 1.0)) / coin if ratio < 1.0 else ratio - coin)
        if coin >= ratio:
            winner, lead = _race((target - draft).clamp(min=0), keys, Stream.CORRECTION, position)
            return Decision([*draft_token_ids[:position], winner], min(margin, lead))
    winner, lead = _race(probs[-1], keys, Stream.CORRECTION, len(draft_token_ids))
    return Decision([*draft_token_ids, winner], min(margin, lead))


def verify_block(
    target_logits: Tensor,
    draft_token_ids: list[int],
    draft_logits: Tensor,
    keys: NoiseKeys,
    temperature: float = 1.0,
    cutoffs: Tensor | None = None,
) -> Decision:
    """One row of block verification, arguments as for `reject`; algorithm 2 of the paper, line by line."""
    target = _target_probs(target_logits, temperature, cutoffs)
    draft = [row.float().double().softmax(-1) for row in draft_logits]
    kept, ratio, margin = 0, 1.0, 1.0
    ratios = [ratio]
    for count, token_id in enumerate(draft_token_ids, start=1):
        gain = _ratio(target[count - 1], draft[count - 1], token_id)
        ratio = min(ratio * gain, 1.0) if ratio > 0.0 else 0.0
        ratios.append(ratio)
        coin = _coin(keys, count - 1, token_id)
        if count == len(draft_token_ids):
            mass, shortfall = ratio, 1.0 - ratio
        else:
            mass, shortfall = float((ratio * target[count] - draft[count]).clamp(min=0).sum()), 1.0 - ratio
        if ratio < 1.0:  # else it is accepted
            margin = min(margin, abs(coin * (mass + shortfall) - mass))
        if ratio == 1.0 or coin * (mass + shortfall) < mass:
            kept = count
    weights = target[-1]
    if kept < len(draft_token_ids):
        weights = (ratios[kept] * target[kept] - draft[kept]).clamp(min=0)
    winner, lead = _race(weights, keys, Stream.CORRECTION, kept)
    return Decision([*draft_token_ids[:kept], winner], min(margin, lead))


def verify_coupled(
    target_logits: Tensor,
    draft_token_ids: list[int],
    draft_logits: Tensor,
    keys: NoiseKeys,
    temperature: float = 1.0,
    cutoffs: Tensor | None = None,
) -> Decision:
    """One row of coupled verification, arguments as for `reject`; `draft_logits` are not read."""
    margin = 1.0
    emitted: list[int] = []
    for position, weights in enumerate(_target_probs(target_logits, temperature, cutoffs)):
        winner, lead = _race(weights, keys, Stream.RACE, position)
        emitted.append(winner)
        margin = min(margin, lead)
        if position == len(draft_token_ids) or draft_token_ids[position] != winner:
            break
    return Decision(emitted, margin)


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
