"""Temperatures and cutoffs act row by row, as if the logits had been divided and masked."""

import pytest
import torch

from hf_speculate.triton_kernels import Status, verify_greedy
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.on_triton import assert_same
from tests.triton_kernels.operations import OPERATIONS, WARPABLE, make_round


@pytest.mark.parametrize("vocab_size", [40, 5000])
@pytest.mark.parametrize("name", WARPABLE)
def test_mixed_temperatures_act_row_by_row(name: str, vocab_size: int) -> None:
    target, ids, draft = make_round(6, 3, vocab_size)
    target[0, :, [2, 4, vocab_size - 1]] = 20.0  # tied: the lowest index is the argmax
    ids[0, 0], ids[0, 1] = 2, 4
    keys = make_keys(6)
    mixed = torch.tensor([0.0, 0.7, 1.0, 0.0, 2.0, 1e-3])
    together = OPERATIONS[name](target, ids, draft, keys, temperature=mixed)
    for row, temperature in enumerate(mixed.tolist()):
        rows = torch.tensor([row])
        alone = OPERATIONS[name](target[rows], ids[rows], draft[rows], keys.rows(rows), temperature=temperature)
        assert torch.equal(alone.token_ids[0], together.token_ids[row])
    assert torch.equal(together.token_ids[[0, 3]], verify_greedy(target, ids).token_ids[[0, 3]])
    assert together.status.tolist() == [0] * 6


@pytest.mark.parametrize("name", WARPABLE)
def test_cutoffs_act_as_masked_logits(name: str) -> None:
    target, ids, draft = make_round(6, 3, 40)
    temperature = torch.full((6,), 0.8)
    scaled = target / temperature.view(-1, 1, 1)
    cutoffs = scaled.topk(10).values[..., -1]
    cutoffs[5] = 1e9  # nothing is left
    masked = scaled.masked_fill(scaled < cutoffs.unsqueeze(-1), -torch.inf)
    cut = OPERATIONS[name](target, ids, draft, make_keys(6), temperature=temperature, row_cutoffs=cutoffs)
    assert_same(cut, OPERATIONS[name](masked, ids, draft, make_keys(6)))
    assert cut.status.tolist() == [0] * 5 + [int(Status.ALL_MASKED)]
    assert cut.num_accepted[5] == 0
    assert 0 <= cut.token_ids[5, 0] < 40
