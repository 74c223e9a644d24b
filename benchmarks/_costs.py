"""Measure the cost of forwards for a pair, and the speed-up of a loop without overhead.

c is the time of a draft step and v that of a target forward of K+1 rows, both divided by the time
per token of plain decoding. At T tokens per round, the speed-up of such a loop is T / (K c + v).
Its maximum over K is the bound of the pair.
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
SOME_K = (0, 1, 3, 5, 8, MAX_K)  # draft lengths for measurements without a bound


@dataclass
class Costs:
    """Seconds of forwards by rows.

    Args:
        draft_s: rows -> time of a draft step.
        verify_s: rows -> K -> time of a target forward of K+1 tokens.
        plain_s: time per token of plain decoding in transformers, with the full batch.
    """

    draft_s: dict[int, float]
    verify_s: dict[int, dict[int, float]]
    plain_s: float

    def c(self, rows: float) -> float:
        """Return the ratio of a draft step to a plain step."""
        return _between(self.draft_s, rows) / self.plain_s

    def v(self, rows: float, num_draft_tokens: float) -> float:
        """Return a K+1-token forward divided by a plain step, interpolated in K and rows."""
        by_rows = {
            draft_len: _between(times, num_draft_tokens)
            for draft_len, times in self.verify_s.items()
        }
        return _between(by_rows, rows) / self.plain_s

    def round_cost(self, rows: float, num_draft_tokens: float) -> float:
        """Return K c + v."""
        return num_draft_tokens * self.c(rows) + self.v(rows, num_draft_tokens)

    def bound(self, rows: int, tokens_per_round: dict[int, float]) -> tuple[float, int]:
        """Return the largest speed-up that the pair allows, and the K that gives it."""
        speeds = {
            draft_len: tokens / self.round_cost(rows, draft_len)
            for draft_len, tokens in tokens_per_round.items()
        }
        best = max(speeds, key=speeds.__getitem__)
        return speeds[best], best

    def report(self, counts: dict[str, float], rows: int) -> dict[str, float]:
        """Return K, tokens per round, c and v of a method, and the speed-up expected from them.

        The number of tokens per round is that of the entire batch divided by its rows, so rounds
        with only the slowest rows count in full. c and v are taken at the mean number of live rows.
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
    """Interpolate linearly between the two nearest measured sizes; constant outside their range."""
    below = max((measured for measured in values if measured <= size), default=min(values))
    above = min((measured for measured in values if measured >= size), default=max(values))
    if below == above:
        return values[below]
    share = (size - below) / (above - below)
    return values[below] * (1 - share) + values[above] * share


@torch.inference_mode()  # forwards in the same mode make the cache buffers
def filled_cache(
    model: PreTrainedModel, batch_size: int, length: int, mask: Tensor | None
) -> tuple[Any, Any]:
    """Return the forward of this library and a cache with `length` states per row.

    The states are random, because their values do not change the time.
    """
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
    """Return forward calls for each number of tokens, by name, and a rollback function."""
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
    return {
        f"{name} {num_query}": lambda num_query=num_query: feed(ids[:, :num_query])
        for num_query in queries
    }, undo


def measure_costs(
    subject: Subject,
    batch: Batch,
    max_new_tokens: int,
    plain_s: float,
    repeats: int = 5,
    nums: Sequence[int] = SOME_K,
) -> Costs:
    """Time forwards of both models halfway through the new tokens, with all and half of the rows.

    Args:
        subject: the models.
        batch: B prompts.
        max_new_tokens: number of tokens decoded after the prompts.
        plain_s: time per token of plain decoding.
        repeats: number of runs of each forward.
        nums: values of K; a forward of K+1 tokens is timed for each.
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
        queries = [draft_len + 1 for draft_len in nums]
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
        verify_s[rows] = {
            draft_len: median(seconds[f"target {draft_len + 1}"]) for draft_len in nums
        }
    return Costs(draft_s, verify_s, plain_s)


def tokens_per_round(runner: Runner, batches: list[Batch], max_k: int = MAX_K) -> dict[int, float]:
    """Count tokens per row and round at each constant K by decoding, without timing."""
    tokens = {}
    for draft_len in tqdm(
        range(1, max_k + 1), desc="tokens a round of each K", leave=False, disable=None
    ):
        totals = dict.fromkeys(COUNTS, 0)
        for batch in batches:
            stats = runner(ours(draft_len), batch).stats
            totals = {name: total + getattr(stats, name) for name, total in totals.items()}
        tokens[draft_len] = totals["num_emitted"] / totals["num_rounds"]
    return tokens
