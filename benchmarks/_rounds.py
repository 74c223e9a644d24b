"""Rounds to verify, with logits of a target and a similar draft and tokens sampled from it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_speculate.kernels import NoiseKeys, Stream, row_seeds, sample

TEMPERATURE = 0.7
TOP_K = 50
# Measured on 2 cores of an AMD EPYC CPU, V = 151,936: 32 to 128 entries take the same time, a third
# of that of a single topk.
BLOCK_SIZE = 128
PROMPT_LEN = 64
NUM_PEAKS = 12
# With this noise, about two of three drafted tokens are accepted, with or without temperature and
# top-k.
DRAFT_NOISE = 0.8


class Warp(NamedTuple):
    """Sampling settings that change raw logits."""

    temperature: float
    top_k: int | None

    @property
    def name(self) -> str:
        return (
            "plain" if self.top_k is None else f"temperature {self.temperature}, top-k {self.top_k}"
        )


WARPED = Warp(TEMPERATURE, TOP_K)
PLAIN = Warp(1.0, None)


class Round(NamedTuple):
    """One round, as input for a verifier."""

    target_logits: Tensor  # [B, K+1, V], raw
    draft_logits: Tensor  # [B, K, V], final: after temperature and top-k
    draft_scores: Tensor  # [B, K, V] float32, the same in the form of transformers' assistant
    draft_token_ids: Tensor  # [B, K] int64
    draft_logsumexp: Tensor  # [B, K] float32
    candidate_ids: Tensor  # [B, PROMPT_LEN + K] int64: a prompt and the drafted ids
    keys: NoiseKeys
    warp: Warp

    @property
    def num_draft_tokens(self) -> int:
        return self.draft_token_ids.shape[1]


def kth_largest(rows: Tensor, k: int) -> Tensor:
    """Return the k-th largest entry [...] of every row [..., V]; each tied entry counts.

    Larger entries are in the k blocks with the largest maxima, so the result is exact with one
    cheap pass over a row.
    """
    width = rows.shape[-1]
    num_blocks = width // BLOCK_SIZE
    if num_blocks <= k:
        return rows.topk(min(k, width), sorted=False).values.amin(-1)
    blocks = rows[..., : num_blocks * BLOCK_SIZE].unflatten(-1, (num_blocks, BLOCK_SIZE))
    best = blocks.amax(-1).topk(k, sorted=False).indices  # [..., k]
    # [..., k * BLOCK_SIZE]
    entries = blocks.gather(-2, best.unsqueeze(-1).expand(*best.shape, BLOCK_SIZE)).flatten(-2)
    if width % BLOCK_SIZE:
        entries = torch.cat((entries, rows[..., num_blocks * BLOCK_SIZE :]), dim=-1)
    return entries.topk(k, sorted=False).values.amin(-1)


def cutoffs(logits: Tensor, warp: Warp) -> Tensor | None:
    """Return the top-k `row_cutoffs` [...] float32 for raw logits [..., V].

    Ties at the cutoff are kept, as in transformers. Division preserves the order, so only the k-th
    largest entry is divided.
    """
    if warp.top_k is None:
        return None
    return kth_largest(logits, warp.top_k).to(torch.float32) / warp.temperature


def warped(logits: Tensor, warp: Warp) -> Tensor:
    """Return float32 logits after temperature and top-k, computed without optimisations."""
    scores = logits.to(torch.float32) / warp.temperature
    if warp.top_k is None:
        return scores
    kth = scores.topk(min(warp.top_k, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < kth, -torch.inf)


def make_keys(num_rows: int, device: torch.device) -> NoiseKeys:
    seeds = row_seeds(20260501, num_rows).to(device)
    return NoiseKeys(seeds, torch.full_like(seeds, 3), torch.full_like(seeds, PROMPT_LEN))


def make_logits(
    shape: tuple[int, int, int], device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    """Return raw float32 logits for a target [B, K+1, V] and a draft [B, K, V].

    Each row has a broad tail and a few likely tokens.
    """
    num_rows, num_draft_tokens, vocab_size = shape
    generator = torch.Generator(device).manual_seed(seed)
    target = torch.randn(
        num_rows, num_draft_tokens + 1, vocab_size, generator=generator, device=device
    ).mul_(2.0)
    peaks = torch.randint(
        vocab_size, (*target.shape[:2], NUM_PEAKS), generator=generator, device=device
    )
    heights = torch.randn(peaks.shape, generator=generator, device=device) * 2.0 + 14.0
    target.scatter_(-1, peaks, heights)
    noise = torch.randn(target[:, :-1].shape, generator=generator, device=device)
    return target, noise.mul_(DRAFT_NOISE).add_(target[:, :-1])


def draw(draft_logits: Tensor, keys: NoiseKeys, how: str) -> tuple[Tensor, Tensor]:
    """Draft ids [B, K] and log-sum-exps [B, K]; `how` is "sampled", "raced" or "argmax"."""
    if how == "argmax":
        return draft_logits.argmax(-1), draft_logits.to(torch.float32).logsumexp(-1)
    stream = Stream.RACE if how == "raced" else Stream.DRAFT
    drawn = [
        sample(
            logits,
            keys=keys._replace(positions=keys.positions + position),
            stream=stream,
            backend="torch",
        )
        for position, logits in enumerate(draft_logits.unbind(1))
    ]
    return torch.stack([draw.token_ids for draw in drawn], -1), torch.stack(
        [draw.logsumexp for draw in drawn], -1
    )


def make_round(target: Tensor, draft: Tensor, warp: Warp, how: str) -> Round:
    """Draft a round from raw logits [B, K+1, V] and [B, K, V], as the draft loop does."""
    keys = make_keys(target.shape[0], target.device)
    draft_logits = warped(draft, warp).to(target.dtype)
    ids, logsumexp = draw(draft_logits, keys, how)
    prompt = torch.zeros(target.shape[0], PROMPT_LEN, dtype=torch.int64, device=target.device)
    candidate_ids = torch.cat((prompt, ids), dim=-1)
    draft_scores = draft_logits.to(torch.float32)
    return Round(
        target.clone(), draft_logits, draft_scores, ids, logsumexp, candidate_ids, keys, warp
    )


def overlap(round_: Round) -> float:
    """Return the mean probability in [0, 1] that rejection sampling accepts a drafted token."""
    total = 0.0
    for target, draft in zip(
        _rows(round_.target_logits[:, :-1]), _rows(round_.draft_scores), strict=True
    ):
        probs = warped(target, round_.warp).softmax(-1)
        total += torch.minimum(probs, draft.softmax(-1)).sum(-1).mean().item()
    return total / round_.target_logits.shape[0]


def _rows(logits: Tensor) -> Iterator[Tensor]:
    """Yield one row of the batch at a time, so that a check needs little memory."""
    yield from logits.unbind(0)
