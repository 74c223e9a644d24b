"""Test races in the kernels: clocks, packed keys, their bounds, and residuals in several pieces."""

import pytest
import torch

from hf_speculate.kernels import (
    NoiseKeys,
    Status,
    Stream,
    exponentials,
    noise,
    uniforms,
    verify_rejection,
)
from tests.kernels.distributions import make_keys
from tests.kernels.on_triton import DEVICE, assert_same, on_triton

pytest.importorskip("triton", reason="needs Triton")
import triton
import triton.language as tl

from hf_speculate.kernels.kernels import acceptance, launch, race, rows
from hf_speculate.kernels.kernels import noise as kernel_noise

PIECE = launch.CHUNK // launch.PIECES_PER_CHUNK

# The series and the logarithm meet at 2**-5. Both are accurate to a few units in the last place of
# float32.
CLOCK_TOLERANCE = 2e-6
HERE = torch.zeros(1, 1, dtype=torch.int64)


@triton.jit
def race_kernel(keys_ptr, ids_ptr, bits_ptr, winners_ptr, vocab_size, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    best = tl.max(rows.pack_race(tl.load(keys_ptr + at), tl.load(ids_ptr + at)), axis=0)
    bits, winner = rows.unpack_race(best, vocab_size)
    tl.store(bits_ptr + tl.program_id(0), bits.to(tl.float32, bitcast=True))
    tl.store(winners_ptr + tl.program_id(0), winner)


def test_packed_keys_sort_as_floats_then_by_lowest_id() -> None:
    smallest = torch.tensor(1, dtype=torch.int32).view(torch.float32).item()
    races = {  # keys -> index of the winner
        (1.0, 2.0, 2.0, 0.0): 1,
        (0.0, smallest, 0.0, smallest): 1,
        (3e38, torch.inf, torch.inf, 1.0): 1,
        (0.0, 0.0, 0.0, 0.0): 0,
        (-5.0, -7.0, 0.0, -0.0): 2,  # a negated key is below every other key, including 0
        (-5.0, -7.0, -0.0, -7.0): 1,  # the key that was largest before negation wins
        (-torch.inf, -7.0, -0.0, -7.0): 0,
    }
    keys = torch.tensor(list(races), device=DEVICE)
    ids = torch.tensor(
        [[7, 9, 2**31 - 2, 2**31 - 1]] * len(races), dtype=torch.int32, device=DEVICE
    )
    bits, winners = (
        torch.empty(len(races), device=DEVICE),
        torch.empty(len(races), dtype=torch.int32, device=DEVICE),
    )
    race_kernel[(len(races),)](keys, ids, bits, winners, 2**31 - 1, WIDTH=4)
    wanted = torch.tensor(list(races.values()), device=DEVICE).unsqueeze(-1)
    assert winners.tolist() == ids.gather(1, wanted).clamp(max=2**31 - 2).flatten().tolist()
    assert bits.tolist() == keys.gather(1, wanted).flatten().tolist()


def test_empty_residual_is_drawn_from_all_pieces_of_the_target() -> None:
    """Give the last row's residual one entry, in the last piece, which wins with a tiny key."""
    num_rows, vocab_size = 6, 2 * PIECE + 9
    target = torch.randn(num_rows, 2, vocab_size, generator=torch.Generator().manual_seed(1))
    ids = target[:, 0].argmin(-1, keepdim=True)
    draft = target[:, :1].clone()
    draft[-1, 0, vocab_size - 2] = -torch.inf
    too_sure = target[:, :1].logsumexp(-1) - 40.0  # too large by a factor of e^40
    options = {"keys": make_keys(num_rows), "draft_logsumexp": too_sure}
    mine = on_triton(verify_rejection, target, ids, draft, **options)
    assert mine.status.tolist() == [int(Status.EMPTY_RESIDUAL)] * (num_rows - 1) + [0]
    assert int(mine.token_ids[-1, 0]) == vocab_size - 2
    assert (mine.token_ids[:-1, 0] >= PIECE).any()
    assert_same(mine, verify_rejection(target, ids, draft, **options, backend="torch"))


STREAM = noise.stream_offset(Stream.CORRECTION)


def seeded(num_seeds: int) -> NoiseKeys:
    """Return keys with different seeds."""
    seeds = torch.arange(num_seeds)
    return NoiseKeys(seeds, torch.zeros_like(seeds), torch.zeros_like(seeds))


@triton.jit
def bounds_kernel(
    seeds_ptr, ids_ptr, weights_ptr, bounds_ptr, keys_ptr, STREAM: tl.constexpr, WIDTH: tl.constexpr
):
    zero = tl.zeros([], tl.int64)
    state = kernel_noise.noise_states(tl.load(seeds_ptr + tl.program_id(0)), zero, zero, STREAM)
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    ids, weights = tl.load(ids_ptr + at), tl.load(weights_ptr + at)
    tl.store(bounds_ptr + at, kernel_noise.key_bounds(weights, state, ids))
    tl.store(keys_ptr + at, weights / kernel_noise.exponentials(state, ids))


def test_keys_equal_the_reference_within_their_bounds() -> None:
    keys, width, many = seeded(8), 1024, torch.arange(1 << 18)
    coins, clocks = (make(keys, Stream.CORRECTION, HERE, many) for make in (uniforms, exponentials))
    order = coins.argsort(-1)
    # Take the smallest and largest words, the ones between series and logarithm, and some others.
    parts = order[:, :256], order[:, : 1 << 14 : 64], order[:, ::1024], order[:, -256:]
    ids = torch.cat(parts, dim=-1).to(torch.int32)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -30, 0, width
    )
    bounds, exact = torch.empty(2, *ids.shape, device=DEVICE)
    inputs = [tensor.to(DEVICE) for tensor in (keys.seeds, ids, weights)]
    bounds_kernel[(8,)](*inputs, bounds, exact, STREAM=STREAM, WIDTH=width)
    clocks = clocks.gather(1, ids.long())
    assert clocks.min() < 2**-5 < clocks.max()  # both branches of the logarithm were taken
    torch.testing.assert_close(exact.cpu(), weights / clocks, rtol=CLOCK_TOLERANCE, atol=0.0)
    assert (bounds.abs() > exact.abs()).all()
    assert torch.equal(bounds.sign(), exact.sign())


@triton.jit
def row_kernel(
    target_ptr, draft_ptr, seeds_ptr, fast_ptr, full_ptr, vocab_size, num_pieces,
    STREAM: tl.constexpr, RULE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    zero = tl.zeros([], tl.int64)
    state = kernel_noise.noise_states(tl.load(seeds_ptr + tl.program_id(0)), zero, zero, STREAM)
    fast = race.race_row(
        target_ptr, 1, draft_ptr, 1, None, None, 0.0, 0.0, 1.0, -1, vocab_size > 0, state, 0,
        num_pieces, vocab_size, RULE, False, PIECE,
    )  # fmt: skip
    full = race.race_all(
        target_ptr, 1, draft_ptr, 1, None, None, 0.0, 0.0, 1.0, -1, vocab_size > 0, state, 0,
        num_pieces, vocab_size, RULE, False, PIECE,
    )  # fmt: skip
    tl.store(fast_ptr + tl.program_id(0), fast)
    tl.store(full_ptr + tl.program_id(0), full)


@pytest.mark.parametrize("rule", ["target", "residual"])
def test_entries_of_one_lane_win_by_key_not_by_bound(rule: str) -> None:
    piece, many = 16, seeded(3000)
    probs = torch.zeros(3 * piece)
    probs[[5, 5 + piece, 5 + 2 * piece]] = torch.tensor([0.9, 0.06, 0.04])  # all in one lane
    draft = torch.tensor([0.0, 0.01, 0.0]).repeat_interleave(piece)
    weights = probs if rule == "target" else probs - draft
    clocks = exponentials(many, Stream.CORRECTION, HERE, torch.arange(3 * piece))
    coins = uniforms(many, Stream.CORRECTION, HERE, torch.arange(3 * piece))
    winners = (weights / clocks).argmax(-1)
    # the bounds alone would choose the wrong token
    differ = (weights / coins).argmax(-1) != winners
    keys = many.rows(torch.cat([differ.nonzero()[:6, 0], torch.arange(3)]))
    num_seeds = len(keys.seeds)
    assert num_seeds == 9
    inputs = [tensor.to(DEVICE) for tensor in (probs.log(), draft.log(), keys.seeds)]
    fast, full = torch.empty(2, num_seeds, dtype=torch.int64, device=DEVICE)
    number = int(acceptance.TYPICAL if rule == "target" else acceptance.REJECTION)
    row_kernel[(num_seeds,)](
        *inputs, fast, full, 3 * piece, 3, STREAM=STREAM, RULE=number, PIECE=piece
    )
    assert torch.equal(fast, full)
    assert (2**31 - 1 - (fast & (2**31 - 1))).tolist() == winners[keys.seeds].tolist()
