"""The packed race of the kernels: order of keys and ids, and a residual that is empty in a row of several pieces."""

import pytest
import torch

from hf_speculate.triton_kernels import Status, verify_rejection
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.on_triton import DEVICE, assert_same, on_triton

pytest.importorskip("triton", reason="needs Triton")
import triton
import triton.language as tl

from hf_speculate.triton_kernels.kernels import launch, rows

PIECE = launch.CHUNK // launch.PIECES_PER_CHUNK


@triton.jit
def race_kernel(keys_ptr, ids_ptr, bits_ptr, winners_ptr, vocab_size, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    best = tl.max(rows.pack_race(tl.load(keys_ptr + at), tl.load(ids_ptr + at)), axis=0)
    bits, winner = rows.unpack_race(best, vocab_size)
    tl.store(bits_ptr + tl.program_id(0), bits.to(tl.float32, bitcast=True))
    tl.store(winners_ptr + tl.program_id(0), winner)


def test_packed_keys_are_in_the_order_of_floats_and_ties_go_to_the_lowest_id() -> None:
    least = torch.tensor(1, dtype=torch.int32).view(torch.float32).item()
    races = {  # keys, the place of the winner
        (1.0, 2.0, 2.0, 0.0): 1,
        (0.0, least, 0.0, least): 1,
        (3e38, torch.inf, torch.inf, 1.0): 1,
        (0.0, 0.0, 0.0, 0.0): 0,
        (-5.0, -7.0, 0.0, -0.0): 2,  # a negated key is below every other, also below 0
        (-5.0, -7.0, -0.0, -7.0): 1,  # and the largest before its negation wins
        (-torch.inf, -7.0, -0.0, -7.0): 0,
    }
    keys = torch.tensor(list(races), device=DEVICE)
    ids = torch.tensor([[7, 9, 2**31 - 2, 2**31 - 1]] * len(races), dtype=torch.int32, device=DEVICE)
    bits, winners = torch.empty(len(races), device=DEVICE), torch.empty(len(races), dtype=torch.int32, device=DEVICE)
    race_kernel[(len(races),)](keys, ids, bits, winners, 2**31 - 1, WIDTH=4)
    wanted = torch.tensor(list(races.values()), device=DEVICE).unsqueeze(-1)
    assert winners.tolist() == ids.gather(1, wanted).clamp(max=2**31 - 2).flatten().tolist()
    assert bits.tolist() == keys.gather(1, wanted).flatten().tolist()


def test_an_empty_residual_is_drawn_from_the_target_over_all_pieces() -> None:
    """The last row has a residual, of one entry in the last piece: it wins though its key is tiny."""
    num_rows, vocab_size = 6, 2 * PIECE + 9
    target = torch.randn(num_rows, 2, vocab_size, generator=torch.Generator().manual_seed(1))
    ids = target[:, 0].argmin(-1, keepdim=True)
    draft = target[:, :1].clone()
    draft[-1, 0, vocab_size - 2] = -torch.inf
    options = {
        "keys": make_keys(num_rows),
        "draft_logsumexp": target[:, :1].logsumexp(-1) - 40.0,
    }  # e^40 times too sure
    mine = on_triton(verify_rejection, target, ids, draft, **options)
    assert mine.status.tolist() == [int(Status.EMPTY_RESIDUAL)] * (num_rows - 1) + [0]
    assert int(mine.token_ids[-1, 0]) == vocab_size - 2
    assert (mine.token_ids[:-1, 0] >= PIECE).any()
    assert_same(mine, verify_rejection(target, ids, draft, **options, backend="torch"))
