"""Compute exact distributions of a round, and test verifiers against them by chi-square."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from hf_speculate.kernels import NoiseKeys, Sampled, Stream, Verdict, row_seeds, sample

# Seeds are fixed, so results never change. For a correct distribution, the p-value falls below PASS
# for one seed in 10,000.
PASS_P_VALUE = 1e-4
# A negative control must have a p-value below this. No correct distribution has one.
FAIL_P_VALUE = 1e-9
# Cells with smaller expected counts are merged, because the chi-square test needs large counts.
MIN_EXPECTED = 10.0
# Distributions computed from float32 probabilities sum to 1 within this tolerance.
WHOLE = 1e-5
CHUNK_ROWS = 125_000

Verify = Callable[[Tensor, Tensor, Tensor, NoiseKeys], Verdict]


def make_keys(
    num_rows: int, *, seed: int = 0, first_row: int = 0, rounds: int = 0, positions: int = 0
) -> NoiseKeys:
    """Return keys for rows that differ only in their seeds."""
    seeds = row_seeds(seed, first_row + num_rows)[first_row:]
    return NoiseKeys(seeds, torch.full_like(seeds, rounds), torch.full_like(seeds, positions))


def rank_reversed_logits(
    vocab_size: int, num_draft_tokens: int, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return target logits [K+1, V] and draft logits [K, V] that rank tokens in opposite order."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(num_draft_tokens + 1, vocab_size, generator=generator)
    ranks = target[:-1].argsort(-1)
    draft = torch.empty(num_draft_tokens, vocab_size)
    draft.scatter_(-1, ranks, target[:-1].gather(-1, ranks.flip(-1)))
    return target, draft


def draw_drafts(
    draft_logits: Tensor,
    keys: NoiseKeys,
    stream: Stream = Stream.DRAFT,
    draw: Callable[..., Sampled] = sample,
) -> Tensor:
    """Draw draft ids [B, K] from logits [K, V] or [B, K, V], as a drafter does."""
    columns = []
    for position, logits in enumerate(draft_logits.unbind(-2)):
        keys_here = keys._replace(positions=keys.positions + position)
        columns.append(
            draw(logits.expand(keys.seeds.shape[0], -1), keys=keys_here, stream=stream).token_ids
        )
    return torch.stack(columns, dim=-1)


def chunks(num_trials: int) -> Iterator[NoiseKeys]:
    """Yield keys for trials with different seeds, a bounded number at a time."""
    seeds = row_seeds(20240501, num_trials)
    for rows in seeds.split(CHUNK_ROWS):
        yield NoiseKeys(rows, torch.full_like(rows, 3), torch.full_like(rows, 17))


def count_cells(verdict: Verdict, vocab_size: int) -> Tensor:
    """Count each (num_accepted, ids), numbered as in `joint_distribution`."""
    num_columns = verdict.token_ids.shape[1]
    powers = vocab_size ** torch.arange(num_columns)
    code = (verdict.token_ids.clamp(min=0) * powers).sum(-1)
    sizes = vocab_size ** (torch.arange(num_columns) + 1)
    starts = sizes.cumsum(0) - sizes
    return torch.bincount(starts[verdict.num_accepted.long()] + code, minlength=int(sizes.sum()))


def joint_distribution(accept: Tensor, reject: Tensor) -> Tensor:
    """Return the probability of every (num_accepted, ids).

    Args:
        accept: [K, V] float64, probability that this token is drafted and accepted here.
        reject: [K+1, V] float64, probability that the round ends here with this token.

    Returns:
        [V + V^2 + ... + V^(K+1)] float64, by num_accepted, then ids; the first id varies fastest.
    """
    prefix = torch.ones(1, dtype=torch.float64)
    blocks = []
    for position in range(reject.shape[0]):
        blocks.append((reject[position].unsqueeze(-1) * prefix).flatten())
        if position < accept.shape[0]:
            prefix = (accept[position].unsqueeze(-1) * prefix).flatten()
    return torch.cat(blocks)


def rejection_distribution(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the joint distribution of rejection sampling.

    Args:
        target_logits: [K+1, V].
        draft_logits: [K, V], the logits of the drafts.
    """
    target = target_logits.double().softmax(-1)
    draft = draft_logits.double().softmax(-1)
    residual = (target[:-1] - draft).clamp(min=0)
    return joint_distribution(torch.minimum(target[:-1], draft), torch.cat((residual, target[-1:])))


def block_distribution(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Compute the joint distribution of block verification, path by path.

    Takes the same arguments as `rejection_distribution`.
    """
    target = target_logits.double().softmax(-1)
    draft = draft_logits.double().softmax(-1)
    num_draft_tokens, vocab_size = draft.shape
    blocks = [
        torch.zeros(vocab_size ** (num_accepted + 1), dtype=torch.float64)
        for num_accepted in range(num_draft_tokens + 1)
    ]
    for path in product(range(vocab_size), repeat=num_draft_tokens):
        ratio, weight = 1.0, 1.0
        accepted, residuals = [1.0], [(target[0] - draft[0]).clamp(min=0)]
        for position, token_id in enumerate(path, start=1):
            weight *= float(draft[position - 1, token_id])
            ratio = min(
                ratio * float(target[position - 1, token_id] / draft[position - 1, token_id]), 1.0
            )
            if position == num_draft_tokens:
                accepted.append(ratio)
                residuals.append(target[-1])
                continue
            residuals.append((ratio * target[position] - draft[position]).clamp(min=0))
            mass = float(residuals[-1].sum())
            accepted.append(mass / (mass + 1.0 - ratio))
        for num_accepted in range(num_draft_tokens, -1, -1):
            if accepted[num_accepted] == 0.0:
                continue  # a residual without mass is never sampled
            code = sum(
                token_id * vocab_size**position
                for position, token_id in enumerate(path[:num_accepted])
            )
            emitted = residuals[num_accepted] / residuals[num_accepted].sum()
            blocks[num_accepted].view(vocab_size, -1)[:, code] += (
                weight * accepted[num_accepted] * emitted
            )
            weight *= 1.0 - accepted[num_accepted]
    return torch.cat(blocks)


def coupled_distribution(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the joint distribution of coupled verification, with drafts from the same noise.

    Takes the same arguments as `rejection_distribution`. Token x wins both races iff every other
    clock E_y exceeds E_x * max(p_y / p_x, q_y / q_x).
    """
    target = target_logits.double().softmax(-1)
    draft = draft_logits.double().softmax(-1)
    # [K, V, V]: [k, x, y] is p_y / p_x
    of_target = target[:-1].unsqueeze(1) / target[:-1].unsqueeze(2)
    of_draft = draft.unsqueeze(1) / draft.unsqueeze(2)
    accept = 1.0 / torch.maximum(of_target, of_draft).sum(-1)  # [K, V]
    return joint_distribution(accept, torch.cat((target[:-1] - accept, target[-1:])))


def p_value(counts: Tensor, distribution: Tensor) -> float:
    """Return the chi-square p-value of `counts`, or 0 if an impossible cell has a count."""
    assert abs(float(distribution.sum()) - 1.0) < WHOLE, (
        "no distribution: every test against it would pass"
    )
    observed, expected = counts.double().numpy(), distribution.numpy() * float(counts.sum())
    if observed[expected == 0].any():
        return 0.0
    small = expected < MIN_EXPECTED
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    is_frequent = expected >= MIN_EXPECTED
    statistic = ((observed[is_frequent] - expected[is_frequent]) ** 2 / expected[is_frequent]).sum()
    return float(chi2.sf(statistic, int(is_frequent.sum()) - 1))


# Joint distribution of a round and noise stream for its drafts, by verifier.
EXACT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Stream]] = {
    "rejection": (rejection_distribution, Stream.DRAFT),
    "block": (block_distribution, Stream.DRAFT),
    "coupled": (coupled_distribution, Stream.RACE),
}


def round_p_value(
    name: str,
    target_logits: Tensor,
    draft_logits: Tensor,
    num_trials: int,
    verify: Verify,
    *,
    drawn_from: Tensor | None = None,
    draw: Callable[..., Sampled] = sample,
) -> float:
    """Return the p-value over rounds with a verifier in `EXACT`, target [K+1, V] and draft [K, V].

    `draw` draws the drafts from `draft_logits`, or from `drawn_from` [K, V] as a negative control.
    """
    exact, stream = EXACT[name]
    counts = torch.zeros((), dtype=torch.int64)
    for keys in chunks(num_trials):
        rows = (keys.seeds.shape[0], -1, -1)
        ids = draw_drafts(draft_logits if drawn_from is None else drawn_from, keys, stream, draw)
        verdict = verify(target_logits.expand(*rows), ids, draft_logits.expand(*rows), keys)
        counts = counts + count_cells(verdict, target_logits.shape[-1])
    return p_value(counts, exact(target_logits, draft_logits))
