"""The kernels decide as their twins do, whatever the shapes, dtypes, strides, tiles and memory that they get."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import Stream, sample, verify_greedy, verify_rejection, verify_typical
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.on_triton import assert_same, moved, on_triton
from tests.triton_kernels.operations import OPERATIONS, layouts, make_contested_round, make_round

pytest.importorskip("triton", reason="needs Triton")
from hf_speculate.triton_kernels.kernels import launch, operations

# B, K, V and the dtypes of target and draft: one chunk with a remainder; two chunks; more positions than are tested at
# once; nothing to do.
CASES = [
    ((3, 3, 40), torch.float32, torch.float32),
    ((2, 2, 5000), torch.bfloat16, torch.float32),
    ((1, 9, 100), torch.float16, torch.float16),
    ((2, 1, 1), torch.float32, torch.float32),
    ((3, 0, 11), torch.float32, torch.float32),
    ((0, 3, 11), torch.float32, torch.float32),
]


def make_case(num_rows: int, num_draft_tokens: int, vocab_size: int) -> tuple[Any, ...]:
    """A round, its keys, and lengths that differ."""
    target, ids, draft = make_round(num_rows, num_draft_tokens, vocab_size, seed=vocab_size)
    lens = (num_draft_tokens - torch.arange(num_rows) % 2).clamp(min=0)
    return target, ids, draft, make_keys(num_rows, rounds=2**40, positions=2**33), lens


@pytest.mark.parametrize(("shape", "target_dtype", "draft_dtype"), CASES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_decide_as_the_twin_does(
    name: str, shape: tuple[int, int, int], target_dtype: torch.dtype, draft_dtype: torch.dtype
) -> None:
    target, ids, draft, keys, lens = make_case(*shape)
    target, draft = target.to(target_dtype), draft.to(draft_dtype)
    twin = OPERATIONS[name](target, ids, draft, keys, lens, backend="torch")
    assert_same(on_triton(OPERATIONS[name], target, ids.int(), draft, keys, lens.int()), twin)
    if shape == (3, 3, 40):
        for other_target, other_draft in zip(layouts(target), layouts(draft), strict=True):
            assert_same(on_triton(OPERATIONS[name], other_target, ids, other_draft, keys, lens), twin)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [8193, 50_257, 262_144])
@pytest.mark.parametrize("name", OPERATIONS)
def test_large_vocabularies_are_decided_as_in_the_twin(name: str, vocab_size: int) -> None:
    case = make_case(1, 1, vocab_size)
    assert_same(on_triton(OPERATIONS[name], *case), OPERATIONS[name](*case, backend="torch"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_rows", "num_draft_tokens"), [("block", 40, 3), ("block", 8, 11), ("rejection", 24, 2)]
)
def test_rejections_at_every_position_are_drawn_as_in_the_twin(name: str, num_rows: int, num_draft_tokens: int) -> None:
    case = (*make_contested_round(num_rows, num_draft_tokens, 6), make_keys(num_rows, rounds=4, positions=3))
    twin = OPERATIONS[name](*case, backend="torch")
    assert len(twin.num_accepted.unique()) >= 3
    assert_same(on_triton(OPERATIONS[name], *case), twin)


@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_entropies_are_those_of_whole_rows(epsilon: float) -> None:
    """The chunks' maxima lie far apart, and whether a token stays hangs on the entropy alone."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(10, 2, launch.CHUNK + 900, generator=generator)
    target[:5, :, : launch.CHUNK] -= 4.0
    target[5:, :, launch.CHUNK :] += 3.0
    ids = target[:, :1].topk(400).indices[..., -1]
    probs = target[:, 0].double().softmax(-1)
    floors = (probs * (probs + epsilon).log()).sum(-1).exp()
    ratios = probs.gather(1, ids)[:, 0] / floors
    alpha = float(ratios.median()) * 1.0001  # half of the rows stay
    options: dict[str, Any] = {"posterior_threshold": 0.9, "posterior_alpha": alpha, "entropy_epsilon": epsilon}
    mine = on_triton(verify_typical, target, ids, **options)
    assert mine.num_accepted.tolist() == (ratios > alpha).int().tolist()
    assert 0 < int(mine.num_accepted.sum()) < 10


@pytest.mark.slow
def test_more_chunks_than_are_merged_at_once() -> None:
    vocab_size = 66 * launch.CHUNK + 7
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[1, -5:] += 14.0  # the second row's mass lies at its end
    options: dict[str, Any] = {"keys": make_keys(2), "stream": Stream.RACE}
    drawn = on_triton(sample, logits, **options)
    assert_same(drawn, sample(logits, **options, backend="torch"))
    assert int(drawn.token_ids[1]) >= vocab_size - 5
    no_ids = torch.zeros(2, 0, dtype=torch.int64)
    verdict = on_triton(verify_greedy, logits[:, None], no_ids)
    assert verdict.token_ids[:, 0].tolist() == logits.argmax(-1).tolist()
    verdict = on_triton(verify_rejection, logits[:, None], no_ids, keys=make_keys(2))
    assert_same(verdict, verify_rejection(logits[:, None], no_ids, keys=make_keys(2), backend="torch"))


def test_ties_between_groups_of_chunks_go_to_the_lowest_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CHUNK", 16)
    logits = torch.zeros(1, 1, 1100)
    logits[..., [5, 1090]] = 1.0
    verdict = on_triton(verify_greedy, logits, torch.zeros(1, 0, dtype=torch.int64))
    assert verdict.token_ids.tolist() == [[5]]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_tiles_methods_of_finishing_and_fresh_memory_change_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    case, found = make_case(2, 2, 3 * launch.CHUNK + 5), []
    found.append(
        on_triton(OPERATIONS[name], *case) + on_triton(sample, case[0][:, 0], keys=case[3], stream=Stream.DRAFT)
    )
    request.getfixturevalue("poisoned_memory")
    for num_chunks, is_fused in ((1, False), (1, True), (2, True), (8, False)):
        monkeypatch.setattr(launch, "chunks_per_program", lambda num_rows, num=num_chunks: num)
        monkeypatch.setattr(operations, "has_atomics", lambda device, is_fused=is_fused: is_fused)
        drawn = on_triton(sample, case[0][:, 0], keys=case[3], stream=Stream.DRAFT)
        found.append(on_triton(OPERATIONS[name], *case) + drawn)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(other, found[0], strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.7, torch.tensor([0.0, 0.6, 1.0])])
@pytest.mark.parametrize("vocab_size", [33, 5000])
def test_sample_draws_as_the_twin_does(vocab_size: int, temperature: float | Tensor) -> None:
    logits, keys = make_round(3, 0, vocab_size)[0][:, 0], make_keys(3)
    cutoffs = logits.topk(9).values[:, -1]
    for stream in (Stream.DRAFT, Stream.RACE):
        options: dict[str, Any] = {"keys": keys, "stream": stream, "temperature": temperature, "row_cutoffs": cutoffs}
        assert_same(on_triton(sample, logits, **options), sample(logits, **options, backend="torch"))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["rejection", "typical"])
def test_one_float_temperature_serves_all_rows_and_a_draft_row_may_be_one_number_expanded(
    name: str, temperature: float
) -> None:
    target, ids, _, *rest = make_case(2, 2, 48)
    case = (target, ids, torch.arange(4.0).view(2, 2, 1).expand(2, 2, 48), *rest)
    twin = OPERATIONS[name](*case, temperature=temperature, backend="torch")
    assert_same(on_triton(OPERATIONS[name], *case, temperature=temperature), twin)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_captured_graph_replays_the_same_decision(name: str, vocab_size: int) -> None:
    case = moved(make_case(16, 5, vocab_size))
    eager = OPERATIONS[name](*case, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = OPERATIONS[name](*case, backend="triton")
    for _ in range(3):
        for part in captured:
            part.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, eager)
