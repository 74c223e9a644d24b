"""Temperatures and cutoffs act row by row, as if the logits had been divided and masked."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import (
    NoiseKeys,
    Status,
    Verdict,
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
    verify_typical,
)
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.operations import make_round

VERIFIERS: dict[str, Callable[..., Verdict]] = {
    "rejection": verify_rejection,
    "block": verify_block,
    "coupled": verify_coupled,
    "typical": verify_typical,
    "typical, sampled": partial(verify_typical, correction="sample"),
}
READ_DRAFT = ("rejection", "block")


def run(name: str, target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, **warp: Any) -> Verdict:
    drafted = (draft,) if name in READ_DRAFT else ()
    return VERIFIERS[name](target, ids, *drafted, keys=keys, **warp)


@pytest.mark.parametrize("vocab_size", [40, 5000])
@pytest.mark.parametrize("name", VERIFIERS)
def test_mixed_temperatures_act_row_by_row(name: str, vocab_size: int) -> None:
    target, ids, draft = make_round(6, 3, vocab_size)
    keys = make_keys(6)
    mixed = torch.tensor([0.0, 0.7, 1.0, 0.0, 2.0, 1e-3])
    together = run(name, target, ids, draft, keys, temperature=mixed)
    for row, temperature in enumerate(mixed.tolist()):
        rows = torch.tensor([row])
        alone = run(name, target[rows], ids[rows], draft[rows], keys.rows(rows), temperature=temperature)
        assert torch.equal(alone.token_ids[0], together.token_ids[row])
    greedy = verify_greedy(target, ids)
    assert torch.equal(together.token_ids[[0, 3]], greedy.token_ids[[0, 3]])
    assert ((together.token_ids >= -1) & (together.token_ids < vocab_size)).all()
    assert together.status.tolist() == [0] * 6


@pytest.mark.parametrize("name", VERIFIERS)
def test_ties_in_half_precision_go_to_the_lowest_index_at_temperature_zero(name: str) -> None:
    logits = torch.zeros(1, 3, 600, dtype=torch.bfloat16)
    logits[..., [2, 4, 599]] = 1.0
    for temperature in (0.0, torch.zeros(1)):
        for drafted, expected in [([2, 2], [2, 2, 2]), ([2, 4], [2, 2, -1]), ([4, 2], [2, -1, -1])]:
            ids = torch.tensor([drafted])
            verdict = run(name, logits, ids, logits[:, :-1], make_keys(1), temperature=temperature)
            assert verdict.token_ids.tolist() == [expected]
            assert verdict.status.tolist() == [0]


@pytest.mark.parametrize("name", VERIFIERS)
def test_cutoffs_act_as_masked_logits(name: str) -> None:
    target, ids, draft = make_round(6, 3, 40)
    temperature = torch.full((6,), 0.8)
    scaled = target / temperature.view(-1, 1, 1)
    cutoffs = scaled.topk(10).values[..., -1]
    masked = scaled.masked_fill(scaled < cutoffs.unsqueeze(-1), -torch.inf)
    keys = make_keys(6)
    cut = run(name, target, ids, draft, keys, temperature=temperature, row_cutoffs=cutoffs)
    plain = run(name, masked, ids, draft, keys)
    assert all(torch.equal(mine, yours) for mine, yours in zip(cut, plain, strict=True))
    assert cut.status.tolist() == [0] * 6


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_cutoff_above_everything_leaves_no_distribution(name: str) -> None:
    target, ids, draft = make_round(6, 3, 40)
    cutoffs = torch.full((6, 4), 1e9)
    verdict = run(name, target, ids, draft, make_keys(6), row_cutoffs=cutoffs)
    assert verdict.num_accepted.tolist() == [0] * 6
    assert ((verdict.token_ids[:, 0] >= 0) & (verdict.token_ids[:, 0] < 40)).all()
    assert verdict.status.tolist() == [int(Status.ALL_MASKED)] * 6
