"""Time single forwards of both models over a warm cache."""

import statistics
import time
from typing import NamedTuple

import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_speculate.compat import CACHE_NAME

CONTEXT_LEN = 256
MAX_ROWS = 9
NUM_REPEATS = 21


class Timings(NamedTuple):
    """Medians in milliseconds."""

    target_ms: list[float]  # index Q-1: forward of Q rows, Q = 1..MAX_ROWS
    draft_ms: float  # forward of one row

    @property
    def cost(self) -> float:
        """The ratio c of a draft step to a target step."""
        return self.draft_ms / self.target_ms[0]

    @property
    def factors(self) -> list[float]:
        """The ratios v(Q) for Q = 1..MAX_ROWS."""
        return [rows_ms / self.target_ms[0] for rows_ms in self.target_ms]


def warm_cache(model: LlamaForCausalLM, batch_size: int) -> DynamicCache:
    """Return a cache with CONTEXT_LEN tokens in each row."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(2, model.config.vocab_size, (batch_size, CONTEXT_LEN), device=model.device)
    model(input_ids=ids, **{CACHE_NAME: cache}, use_cache=True, logits_to_keep=1)
    return cache


def forward_ms(
    model: LlamaForCausalLM, cache: DynamicCache, batch_size: int, num_rows: int
) -> float:
    """Time one forward of `num_rows` tokens per sequence and crop the cache back, untimed."""
    ids = torch.randint(2, model.config.vocab_size, (batch_size, num_rows), device=model.device)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    model(input_ids=ids, **{CACHE_NAME: cache}, use_cache=True)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    elapsed_ms = (time.perf_counter() - start_s) * 1000
    cache.crop(-num_rows)
    return elapsed_ms


@torch.inference_mode()
def time_pair(target: LlamaForCausalLM, draft: LlamaForCausalLM, batch_size: int) -> Timings:
    """Time both models; the sizes take turns, so noise affects all of them equally."""
    target_cache, draft_cache = warm_cache(target, batch_size), warm_cache(draft, batch_size)
    target_ms: list[list[float]] = [[] for _ in range(MAX_ROWS)]
    draft_ms: list[float] = []
    for repeat in range(NUM_REPEATS + 2):
        draft_once = forward_ms(draft, draft_cache, batch_size, 1)
        target_once = [
            forward_ms(target, target_cache, batch_size, rows) for rows in range(1, MAX_ROWS + 1)
        ]
        if repeat < 2:
            continue
        draft_ms.append(draft_once)
        for samples, sample in zip(target_ms, target_once, strict=True):
            samples.append(sample)
    medians = [statistics.median(samples) for samples in target_ms]
    return Timings(target_ms=medians, draft_ms=statistics.median(draft_ms))
