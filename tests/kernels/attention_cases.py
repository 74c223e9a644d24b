"""Provide test inputs for attention with few queries, and a reference that loops over queries."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Shapes of one call; rows differ in padding and length."""

    groups: int
    num_query: int
    width: int = 16
    batch_size: int = 2
    num_heads: int = 1
    num_keys: int = 70
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    # number of parts that the keys are split into; None for the default
    num_parts: int | None = None
    dtype: torch.dtype = torch.float32


def make_inputs(case: Case) -> tuple[dict[str, Any], Tensor]:
    """Make arguments for `attend` without spans, and an additive mask [B, 1, Q, T].

    States that no query sees are NaN.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    num_query_heads = case.groups * case.num_heads
    query = draw(case.batch_size, case.num_query, num_query_heads, case.width).transpose(1, 2)
    rows, columns = torch.arange(case.batch_size), torch.arange(case.num_keys)
    first_query = case.num_keys - case.num_query - 11 * rows
    query_columns = first_query[:, None, None] + torch.arange(case.num_query)[:, None]  # [B, Q, 1]
    hidden = (columns > query_columns) | (columns < 3 * rows[:, None, None])
    if case.window is not None:
        hidden |= columns <= query_columns - case.window
    mask = torch.zeros(hidden.shape, dtype=case.dtype).masked_fill(hidden, -torch.inf)[:, None]
    buffers = [
        draw(case.batch_size, case.num_heads, case.num_keys + 8, case.width) for _ in range(2)
    ]
    is_unseen = hidden.all(1)[:, None, :, None]
    key, value = (
        buffer[:, :, : case.num_keys].masked_fill_(is_unseen, torch.nan) for buffer in buffers
    )
    sinks = draw(num_query_heads) if case.has_sinks else None
    return {
        "query": query,
        "key": key,
        "value": value,
        "softcap": case.softcap,
        "sinks": sinks,
    }, mask


def written_out(inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """Compute attention [B, Q, g*H, D] in float64, one query and one head at a time."""
    query, key, value, softcap, sinks = (
        inputs[name] for name in ("query", "key", "value", "softcap", "sinks")
    )
    batch_size, num_query_heads, num_query, width = query.shape
    groups = num_query_heads // key.shape[1]
    output = torch.zeros(batch_size, num_query, num_query_heads, width, dtype=torch.float64)
    for row in range(batch_size):
        for head in range(num_query_heads):
            for token in range(num_query):
                seen = mask[row, 0, token] == 0.0
                keys, values = (
                    states[row, head // groups, seen].double() for states in (key, value)
                )
                scores = keys @ query[row, head, token].double() / math.sqrt(width)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                extra = scores.new_empty(0) if sinks is None else sinks[head].double()[None]
                weights = torch.cat([scores, extra]).softmax(0)[: len(scores)]
                output[row, token, head] = weights @ values
    return output
