"""Costs of a pair's forwards, timed directly, and the speed-up of a loop without any work of its own.

c is a draft's step and v a target's forward of K+1 rows, both over plain decoding's time per token.
At T tokens a round the speed-up of such a loop is T / (K c + v); the largest over K is the pair's
bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from _engines import COUNTS, Runner, ours
from _harness import alternate
from _library import as_in_a_call, make_forward
from _subjects import Subject
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_speculate.tools.bench.decoding import Batch
from hf_speculate.types import KVState

MAX_K = 10
SOME_K = (0, 1, 3, 5, 8, MAX_K)  # where a forward's cost is measured when no bound is asked for


@dataclass
class Costs:
    """Seconds of the library's forwards by rows, and of transformers' plain step at the full batch.

    Args:
        draft_s: rows -> a draft's step.
        verify_s: rows -> K -> a target's forward of K+1 tokens.
        plain_s: plain decoding's time per token.
    """

    draft_s: dict[int, float]
    verify_s: dict[int, dict[int, float]]
    plain_s: float

    def c(self, rows: float) -> float:
        """A draft's step over a plain step."""
        return _between(self.draft_s, rows) / self.plain_s

    def v(self, rows: float, num_draft_tokens: float) -> float:
        """A forward of K+1 tokens over a plain step; between whole K, and between measured rows, on a line."""
        by_rows = {num: _between(times, num_draft_tokens) for num, times in self.verify_s.items()}
        return _between(by_rows, rows) / self.plain_s

    def round_cost(self, rows: float, num_draft_tokens: float) -> float:
        """K c + v."""
        return num_draft_tokens * self.c(rows) + self.v(rows, num_draft_tokens)

    def bound(self, rows: int, tokens_per_round: dict[int, float]) -> tuple[float, int]:
        """The largest speed-up that the pair allows, and its K."""
        speeds = {
            num: tokens / self.round_cost(rows, num) for num, tokens in tokens_per_round.items()
        }
        best = max(speeds, key=speeds.__getitem__)
        return speeds[best], best

    def report(self, counts: dict[str, float], rows: int) -> dict[str, float]:
        """Realised K and tokens a round of a method, c, v, and the speed-up that is expected from them.

        Tokens a round are those of a round of the whole batch over its rows, so that rounds in
        which only the slowest rows are left count as they were; c and v are those of the mean
        number of rows that were left.
        """
        num_rounds, num_batch_rounds = (
            max(counts["num_rounds"], 1),
            max(counts["num_batch_rounds"], 1),
        )
        live = num_rounds / num_batch_rounds
        num_draft_tokens = counts["num_drafted"] / num_rounds
        tokens = counts["num_emitted"] / num_batch_rounds / rows
        return {
            "verified_acceptance_rate": counts["num_accepted"] / max(counts["num_verified"], 1),
            "realised_k": num_draft_tokens,
            "mean_acceptance_length": tokens,
            "live_rows": live,
            "c": self.c(live),
            "v": self.v(live, num_draft_tokens),
            "expected": tokens / self.round_cost(live, num_draft_tokens),
        }


def _between(values: dict[int, float], size: float) -> float:
    """Linear between the two nearest measured places, level outside."""
    below = max((known for known in values if known <= size), default=min(values))
    above = min((known for known in values if known >= size), default=max(values))
    if below == above:
        return values[below]
    share = (size - below) / (above - below)
    return values[below] * (1 - share) + values[above] * share


@torch.inference_mode()  # as the forwards, which the cache's buffers come from
def filled_cache(
    model: PreTrainedModel, batch_size: int, length: int, mask: Tensor | None
) -> tuple[Any, Any]:
    """The library's forward with a cache of `length` random states per row: what they hold costs nothing."""
    language_model, cache = make_forward(model, batch_size, mask)
    language_model.forward(
        torch.zeros(batch_size, 1, dtype=torch.int64, device=model.device), cache, logits_to_keep=1
    )
    if length > 1:
        shapes = [
            (*state.keys.shape[:2], length - 1, state.keys.shape[3])
            for state in cache.get_kv_states()
        ]
        states = [torch.randn(shape, dtype=model.dtype, device=model.device) for shape in shapes]
        cache.update([KVState(state, state.clone()) for state in states])
    return language_model, cache


def forward_calls(
    model: PreTrainedModel,
    batch_size: int,
    length: int,
    mask: Tensor | None,
    queries: Sequence[int],
    name: str,
) -> tuple[dict[str, Any], Any]:
    """Calls that feed so many tokens each, by name, and what rolls back the last one."""
    language_model, cache = filled_cache(model, batch_size, length, mask)
    fed = [0]

    def undo() -> None:
        if fed[0]:
            cache.crop(fed[0])
            fed[0] = 0

    def feed(ids: Tensor) -> None:
        fed[0] = ids.shape[1]
        language_model.forward(ids, cache, logits_to_keep=ids.shape[1])

    ids = torch.zeros(batch_size, max(queries), dtype=torch.int64, device=model.device)
    return {f"{name} {num}": lambda num=num: feed(ids[:, :num]) for num in queries}, undo


def measure_costs(
    subject: Subject,
    batch: Batch,
    max_new_tokens: int,
    plain_s: float,
    repeats: int = 5,
    nums: Sequence[int] = SOME_K,
) -> Costs:
    """Time both models' forwards halfway through the new tokens, with all rows and with half of them.

    Args:
        subject: the models.
        batch: B prompts.
        max_new_tokens: what is decoded after them.
        plain_s: plain decoding's time per token.
        repeats: runs of each forward.
        nums: each K whose forward of K+1 tokens is timed.
    """
    batch_size, prompt_len = batch.input_ids.shape
    length = prompt_len + max_new_tokens // 2
    draft_s: dict[int, float] = {}
    verify_s: dict[int, dict[int, float]] = {}
    for rows in sorted({batch_size, -(-batch_size // 2)}):
        mask = batch.attention_mask[:rows]
        mask = (
            torch.cat([mask, mask.new_ones(rows, length - prompt_len)], dim=1) if rows > 1 else None
        )
        calls, undo_draft = forward_calls(subject.draft, rows, length, mask, [1], "draft")
        queries = [num + 1 for num in nums]
        target_calls, undo_target = forward_calls(
            subject.target, rows, length, mask, queries, "target"
        )

        def undo(undo_draft: Any = undo_draft, undo_target: Any = undo_target) -> None:
            undo_draft()
            undo_target()

        with as_in_a_call(subject.target), as_in_a_call(subject.draft):
            alternate({**calls, **target_calls}, 1, prepare=undo)
            seconds = alternate(
                {**calls, **target_calls}, repeats, f"forwards of {rows} rows", undo
            )
        draft_s[rows] = median(seconds["draft 1"])
        verify_s[rows] = {num: median(seconds[f"target {num + 1}"]) for num in nums}
    return Costs(draft_s, verify_s, plain_s)


def tokens_per_round(runner: Runner, batches: list[Batch], max_k: int = MAX_K) -> dict[int, float]:
    """Tokens a row's round gives at each constant K, counted by decoding; nothing is timed."""
    costs = {}
    for num in tqdm(
        range(1, max_k + 1), desc="tokens a round of each K", leave=False, disable=None
    ):
        totals = dict.fromkeys(COUNTS, 0)
        for batch in batches:
            stats = runner(ours(num), batch).stats
            totals = {name: total + getattr(stats, name) for name, total in totals.items()}
        costs[num] = totals["num_emitted"] / totals["num_rounds"]
    return costs
