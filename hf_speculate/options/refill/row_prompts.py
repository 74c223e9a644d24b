"""Prompts and results of rows in continuous batching."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_MAX_PADDING = 1.25  # ratio of padded to real tokens in prompts read together


class RowRound(NamedTuple):
    """New tokens of one row in a round: accepted draft tokens, then tokens of the target."""

    num_before: int  # number of the row's new tokens before the round
    num_emitted: int
    num_accepted: int
    drafted_by: str  # draft source as in `stats.plan`; "" without drafted tokens


@dataclass(frozen=True)
class RowPrompt:
    """One prompt [T] from a source, without padding."""

    token_ids: Sequence[int]
    seed: int | None = None  # seed of the row for sampling; None to draw a seed
    # Further arguments of `generate()`, in addition to the decoder's; `num_assistant_tokens` may be
    # a list of one number.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    key: Any = None  # passed on to the result
    # Called in each round with the number of new tokens before the round, its N tokens, and the
    # target's logits [N, V] for them, before processors. The logits are only valid during the call.
    on_logits: Callable[[int, Sequence[int], Tensor], object] | None = None
    # Called in each round, and for the first token after the prompt.
    on_round: Callable[[RowRound], object] | None = None


# Returns the next prompt, or None if there is none now. It is called again after each round while a
# row is free.
RowSource = Callable[[], RowPrompt | None]


class RowResult(NamedTuple):
    """A finished or cancelled row."""

    prompt: RowPrompt
    token_ids: list[int]  # new tokens, up to the row's stop
    num_rounds: int
    num_drafted: int
    num_accepted: int
    error: Exception | None = None  # the error that ended the row; None if it did not fail


def left_padded(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Left-pad B prompts and return `input_ids` and `attention_mask`, both [B, T] int64."""
    rows = [torch.tensor(ids, dtype=torch.int64, device="cpu") for ids in prompts]
    input_ids = pad_sequence(
        rows, batch_first=True, padding_value=pad_token_id, padding_side="left"
    )
    attention_mask = pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
    return input_ids.to(device), attention_mask.to(device)


def alike(prompts: Sequence[RowPrompt]) -> list[list[RowPrompt]]:
    """Group neighbouring prompts with equal arguments and similar lengths into one prefill."""
    groups = [[prompt] for prompt in prompts[:1]]
    for prompt in prompts[1:]:
        first, lens = groups[-1][0], [len(member.token_ids) for member in (*groups[-1], prompt)]
        is_like = dict(first.arguments) == dict(prompt.arguments) and (first.seed is None) == (
            prompt.seed is None
        )
        if is_like and max(lens) * len(lens) <= _MAX_PADDING * sum(lens):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    return groups
