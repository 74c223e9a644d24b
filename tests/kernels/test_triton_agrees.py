"""Compare kernels with the reference over shapes, dtypes, strides, tiles and poisoned memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.kernels import Stream, sample, verify_typical
from tests.kernels.distributions import (
    EXACT,
    PASS_P_VALUE,
    draw_drafts,
    make_keys,
    p_value,
    rank_reversed_logits,
    round_p_value,
)
from tests.kernels.on_triton import DEVICE, assert_same, moved, on_triton
from tests.kernels.operations import (
    OPERATIONS,
    assert_well_formed,
    layouts,
    make_contested_round,
    make_faulty_round,
    make_round,
    spoil,
)
from tests.support.fake_cuda import FakeCuda

pytest.importorskip("triton", reason="needs Triton")
from hf_speculate.kernels.kernels import launch

# Sizes B, K, V and the dtypes of target and draft: one chunk with a remainder, two chunks, more
# positions than one step verifies, and empty rounds.
CASES = [
    ((3, 3, 40), torch.float32, torch.float32),
    ((2, 2, 5000), torch.bfloat16, torch.float32),
    ((1, 9, 100), torch.float16, torch.float16),
    ((2, 1, 1), torch.float32, torch.float32),
    ((3, 0, 11), torch.float32, torch.float32),
    ((0, 3, 11), torch.float32, torch.float32),
]


def make_case(num_rows: int, num_draft_tokens: int, vocab_size: int) -> tuple[Any, ...]:
    """Return a round, its keys and different draft lengths."""
    target, ids, draft = make_round(num_rows, num_draft_tokens, vocab_size, seed=vocab_size)
    lens = (num_draft_tokens - torch.arange(num_rows) % 2).clamp(min=0)
    return target, ids, draft, make_keys(num_rows, rounds=2**40, positions=2**33), lens


@pytest.mark.parametrize(("shape", "target_dtype", "draft_dtype"), CASES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_decide_as_the_reference(
    name: str, shape: tuple[int, int, int], target_dtype: torch.dtype, draft_dtype: torch.dtype
) -> None:
    target, ids, draft, keys, lens = make_case(*shape)
    target, draft = target.to(target_dtype), draft.to(draft_dtype)
    expected = OPERATIONS[name](target, ids, draft, keys, lens, backend="torch")
    assert_same(on_triton(OPERATIONS[name], target, ids.int(), draft, keys, lens.int()), expected)
    if shape == (3, 3, 40):
        for target_layout, draft_layout in zip(layouts(target), layouts(draft), strict=True):
            assert_same(
                on_triton(OPERATIONS[name], target_layout, ids, draft_layout, keys, lens), expected
            )


# 8 positions are verified at once
@pytest.mark.parametrize(("num_draft_tokens", "step"), [(2, 1), (8, 9)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_hostile_rows_and_bad_ids_get_the_reference_status(
    name: str, num_draft_tokens: int, step: int
) -> None:
    faulty = make_faulty_round(name, 1, num_draft_tokens, 50)
    for row in faulty.is_target.nonzero()[::2, 0]:  # the rows of both models are hostile
        spoil(faulty.draft[row, faulty.positions[row]], torch.nan)
    rows = torch.arange(0, len(faulty.positions), step)  # subset, because the interpreter is slow
    lens = torch.full_like(rows, num_draft_tokens)
    lens[5::7], lens[6::7] = 100, -5  # lengths out of range are clamped
    case = (faulty.target[rows], faulty.ids[rows], faulty.draft[rows], make_keys(len(rows)), lens)
    verdict, expected = on_triton(OPERATIONS[name], *case), OPERATIONS[name](*case, backend="torch")
    assert_well_formed(verdict, 50, lens.clamp(0, num_draft_tokens))
    assert torch.equal(verdict.num_accepted, expected.num_accepted)
    assert torch.equal(verdict.status, expected.status)
    any_token = (expected.num_accepted == faulty.positions[rows]) & faulty.is_target[rows]
    assert torch.equal(verdict.token_ids[~any_token], expected.token_ids[~any_token])
    assert len(expected.status.unique()) >= (4 if step == 1 else 2)


@pytest.mark.parametrize(
    ("name", "distance"),
    [
        ("greedy", 2**32),
        ("rejection", 2**31),
        ("block", 2**32),
        ("coupled", 2**31),
        ("typical, sampled", 2**31),
    ],
)
def test_rows_beyond_32_bit_offsets_are_read(name: str, distance: int) -> None:
    target, ids, draft = make_round(2, 2, 64)
    target, draft = target.bfloat16(), draft.bfloat16()
    # Memory that is never written is not committed; only the rows at both ends are.
    buffer = torch.empty(distance + 6 * 64, dtype=torch.bfloat16, device=DEVICE)
    far_target = buffer.as_strided((2, 3, 64), (distance, 64, 1))
    far_draft = buffer.as_strided((2, 2, 64), (distance, 64, 1), 3 * 64)
    far_target.copy_(target)
    far_draft.copy_(draft)
    far = on_triton(OPERATIONS[name], far_target, ids, far_draft, make_keys(2))
    assert_same(far, OPERATIONS[name](target, ids, draft, make_keys(2), backend="torch"))


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [8193, 50_257, 262_144])
@pytest.mark.parametrize("name", OPERATIONS)
def test_large_vocabularies_are_decided_as_in_the_reference(name: str, vocab_size: int) -> None:
    case = make_case(1, 1, vocab_size)
    assert_same(on_triton(OPERATIONS[name], *case), OPERATIONS[name](*case, backend="torch"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_rows", "num_draft_tokens"),
    [("block", 40, 3), ("block", 8, 11), ("rejection", 24, 2)],
)
def test_rejections_at_every_position_equal_the_reference(
    name: str, num_rows: int, num_draft_tokens: int
) -> None:
    case = (
        *make_contested_round(num_rows, num_draft_tokens, 6),
        make_keys(num_rows, rounds=4, positions=3),
    )
    expected = OPERATIONS[name](*case, backend="torch")
    assert len(expected.num_accepted.unique()) >= 3
    assert_same(on_triton(OPERATIONS[name], *case), expected)


@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_entropies_cover_whole_rows(epsilon: float) -> None:
    """Spread the maxima over chunks, so acceptance depends on the entropy of the whole row."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(10, 2, launch.CHUNK + 900, generator=generator)
    target[:5, :, : launch.CHUNK] -= 4.0
    target[5:, :, launch.CHUNK :] += 3.0
    ids = target[:, :1].topk(400).indices[..., -1]
    probs = target[:, 0].double().softmax(-1)
    floors = (probs * (probs + epsilon).log()).sum(-1).exp()
    ratios = probs.gather(1, ids)[:, 0] / floors
    alpha = float(ratios.median()) * 1.0001  # accepts half of the rows
    options: dict[str, Any] = {
        "posterior_threshold": 0.9,
        "posterior_alpha": alpha,
        "entropy_epsilon": epsilon,
    }
    mine = on_triton(verify_typical, target, ids, **options)
    assert mine.num_accepted.tolist() == (ratios > alpha).int().tolist()
    assert 0 < int(mine.num_accepted.sum()) < 10


@pytest.mark.slow
def test_rows_of_more_chunks_than_one_merge_equal_the_reference() -> None:
    """Put the second row's mass in its last chunk, and tie the first row's maximum across two."""
    vocab_size, keys = 64 * launch.CHUNK + 7, make_keys(2)
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[0, [5, vocab_size - 3]], logits[1, -5:] = 9.0, logits[1, -5:] + 24.0
    drawn = on_triton(sample, logits, keys=keys, stream=Stream.RACE)
    assert_same(drawn, sample(logits, keys=keys, stream=Stream.RACE, backend="torch"))
    assert int(drawn.token_ids[1]) >= vocab_size - 5
    for name in ("greedy", "rejection"):
        verdict = on_triton(
            OPERATIONS[name],
            logits[:, None],
            torch.zeros(2, 0).long(),
            logits[:, None][:, :0],
            keys,
        )
        assert_same(
            verdict,
            OPERATIONS[name](
                logits[:, None], torch.zeros(2, 0).long(), logits[:, None][:, :0], keys
            ),
        )
        assert name != "greedy" or int(verdict.token_ids[0]) == 5


def on_fake_gpu(operation: Any, *args: Any, **options: Any) -> Any:
    """Run as `on_triton` does, but with atomics: the last program to finish writes the verdict."""
    with FakeCuda():
        options = {name: moved(value, "cuda:0") for name, value in options.items()}
        return moved(operation(*moved(args, "cuda:0"), backend="triton", **options), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_tiles_and_finishing_methods_change_no_bit(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Copy the rows, because with more rows each program reads more chunks of a row."""
    target, ids, draft, keys, lens = make_case(2, 2, 2 * launch.CHUNK + 5)
    rows = torch.arange(2)
    results = []
    for num_copies, run in ((1, on_triton), (4, on_triton), (1, on_fake_gpu), (4, on_fake_gpu)):
        copies = rows.repeat(num_copies)
        case = target[copies], ids[copies], draft[copies], keys.rows(copies), lens[copies]
        verdict = run(OPERATIONS[name], *case)
        drawn = run(sample, target[copies, 0], keys=keys.rows(copies), stream=Stream.DRAFT)
        assert all(torch.equal(tensor, tensor[rows][copies]) for tensor in verdict + drawn)
        results.append([tensor[rows] for tensor in verdict + drawn])
        if len(results) == 1:
            request.getfixturevalue("poisoned_memory")
    for result in results[1:]:
        assert all(torch.equal(first, two) for first, two in zip(result, results[0], strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.7, torch.tensor([0.0, 0.6, 1.0])])
@pytest.mark.parametrize("vocab_size", [33, 5000])
def test_sample_draws_as_the_reference(vocab_size: int, temperature: float | Tensor) -> None:
    logits, keys = make_round(3, 0, vocab_size)[0][:, 0], make_keys(3)
    cutoffs = logits.topk(9).values[:, -1]
    for stream in (Stream.DRAFT, Stream.RACE):
        options: dict[str, Any] = {
            "keys": keys,
            "stream": stream,
            "temperature": temperature,
            "row_cutoffs": cutoffs,
        }
        assert_same(
            on_triton(sample, logits, **options), sample(logits, **options, backend="torch")
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["rejection", "typical"])
def test_float_temperature_and_expanded_draft_row_are_served(name: str, temperature: float) -> None:
    target, ids, _, *rest = make_case(2, 2, 48)
    case = (target, ids, torch.arange(4.0).view(2, 2, 1).expand(2, 2, 48), *rest)
    expected = OPERATIONS[name](*case, temperature=temperature, backend="torch")
    assert_same(on_triton(OPERATIONS[name], *case, temperature=temperature), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize("name", OPERATIONS)
def test_captured_graph_replays_the_same_decision(name: str, vocab_size: int) -> None:
    case = moved(make_case(16, 5, vocab_size))
    eager = OPERATIONS[name](*case, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = OPERATIONS[name](*case, backend="triton")
    for _ in range(3):
        for tensor in captured:
            tensor.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, eager)


NUM_TRIALS = 40_960
draw = partial(on_triton, sample)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_joint_distribution_of_a_round_is_exact_on_a_gpu(name: str) -> None:
    logits = rank_reversed_logits(3, 2)
    assert (
        round_p_value(name, *logits, NUM_TRIALS, partial(on_triton, OPERATIONS[name]), draw=draw)
        > PASS_P_VALUE
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_first_token_has_the_target_distribution_on_a_gpu(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    target = 3 * torch.randn(3, 4096, generator=generator)
    draft = target[:2] + torch.randn(2, 4096, generator=generator)
    keys, rows = make_keys(NUM_TRIALS, seed=7), (NUM_TRIALS, -1, -1)
    ids = draw_drafts(draft.to(DEVICE), keys, EXACT[name][1], draw)
    verdict = on_triton(
        OPERATIONS[name], target.to(DEVICE).expand(*rows), ids, draft.to(DEVICE).expand(*rows), keys
    )
    counts = torch.bincount(verdict.token_ids[:, 0], minlength=4096)
    assert p_value(counts, target[0].double().softmax(-1)) > PASS_P_VALUE
