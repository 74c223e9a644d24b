"""Hostile rows and far rows on the kernels."""

import pytest
import torch

from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.on_triton import DEVICE, assert_same, on_triton
from tests.triton_kernels.operations import OPERATIONS, assert_well_formed, make_faulty_round, make_round, spoil

pytest.importorskip("triton", reason="needs Triton")


@pytest.mark.parametrize(("num_draft_tokens", "step"), [(2, 1), (8, 9)])  # 8 positions are tested at once
@pytest.mark.parametrize("name", OPERATIONS)
def test_hostile_rows_and_bad_ids_are_named_as_by_the_twin(name: str, num_draft_tokens: int, step: int) -> None:
    faulty = make_faulty_round(name, 1, num_draft_tokens, 50)
    for row in faulty.is_target.nonzero()[::2, 0]:  # both models' rows are hostile
        spoil(faulty.draft[row, faulty.positions[row]], torch.nan)
    rows = torch.arange(0, len(faulty.positions), step)  # the interpreter is slow
    lens = torch.full_like(rows, num_draft_tokens)
    lens[5::7], lens[6::7] = 100, -5  # as the nearest in range
    case = (faulty.target[rows], faulty.ids[rows], faulty.draft[rows], make_keys(len(rows)), lens)
    verdict, twin = on_triton(OPERATIONS[name], *case), OPERATIONS[name](*case, backend="torch")
    assert_well_formed(verdict, 50, lens.clamp(0, num_draft_tokens))
    assert torch.equal(verdict.num_accepted, twin.num_accepted)
    assert torch.equal(verdict.status, twin.status)
    any_token = (twin.num_accepted == faulty.positions[rows]) & faulty.is_target[rows]
    assert torch.equal(verdict.token_ids[~any_token], twin.token_ids[~any_token])
    assert len(twin.status.unique()) >= (4 if step == 1 else 2)


@pytest.mark.parametrize(
    ("name", "distance"),
    [("greedy", 2**32), ("rejection", 2**31), ("block", 2**32), ("coupled", 2**31), ("typical, sampled", 2**31)],
)
def test_rows_farther_apart_than_32_bits_are_found(name: str, distance: int) -> None:
    target, ids, draft = make_round(2, 2, 64)
    target, draft = target.bfloat16(), draft.bfloat16()
    # Untouched memory is not committed: only the two rows at its ends are.
    buffer = torch.empty(distance + 6 * 64, dtype=torch.bfloat16, device=DEVICE)
    far_target = buffer.as_strided((2, 3, 64), (distance, 64, 1))
    far_draft = buffer.as_strided((2, 2, 64), (distance, 64, 1), 3 * 64)
    far_target.copy_(target)
    far_draft.copy_(draft)
    far = on_triton(OPERATIONS[name], far_target, ids, far_draft, make_keys(2))
    assert_same(far, OPERATIONS[name](target, ids, draft, make_keys(2), backend="torch"))
