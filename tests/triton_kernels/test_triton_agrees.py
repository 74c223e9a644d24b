"""The kernels decide as their twins do, whatever the shapes, dtypes, strides, tiles and memory that they get."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.triton_kernels import Stream, Verdict, sample, verify_greedy, verify_rejection, verify_typical
from tests.triton_kernels.distributions import make_keys
from tests.triton_kernels.on_triton import assert_same, moved, on_triton, verify_on_triton
from tests.triton_kernels.operations import OPERATIONS, make_contested_round, make_round

pytest.importorskip("triton", reason="needs Triton")
from hf_speculate.triton_kernels.kernels import launch, operations

# B, K, V: one chunk with a remainder; two chunks; more positions than are judged at once.
SHAPES = [(3, 3, 40), (2, 2, 5000), (1, 9, 100)]


def make_case(num_rows: int, num_draft_tokens: int, vocab_size: int) -> tuple[Any, ...]:
    """A round, its keys, and lengths that differ."""
    target, ids, draft = make_round(num_rows, num_draft_tokens, vocab_size, seed=vocab_size)
    lens = num_draft_tokens - torch.arange(num_rows) % 2
    return target, ids, draft, make_keys(num_rows, rounds=2, positions=7), lens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_decide_as_the_twin_does(name: str, shape: tuple[int, int, int]) -> None:
    case = make_case(*shape)
    assert_same(verify_on_triton(name, *case), OPERATIONS[name](*case, backend="torch"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_rows", "num_draft_tokens"), [("block", 40, 3), ("block", 8, 11), ("rejection", 24, 2)]
)
def test_refusals_at_every_position_are_drawn_as_in_the_twin(name: str, num_rows: int, num_draft_tokens: int) -> None:
    target, ids, draft = make_contested_round(num_rows, num_draft_tokens, 6)
    case = (target, ids, draft, make_keys(num_rows, rounds=4, positions=3))
    twin = OPERATIONS[name](*case, backend="torch")
    assert len(twin.num_accepted.unique()) >= 3
    assert_same(verify_on_triton(name, *case), twin)


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


@pytest.mark.parametrize(
    ("target_dtype", "draft_dtype"), [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("name", ["greedy", "rejection, warped", "rejection", "block", "coupled", "typical"])
def test_half_precision_logits_decide_as_in_the_twin(
    name: str, target_dtype: torch.dtype, draft_dtype: torch.dtype
) -> None:
    target, ids, draft, keys, lens = make_case(3, 2, 64)
    case = (target.to(target_dtype), ids.to(torch.int32), draft.to(draft_dtype), keys, lens.to(torch.int32))
    assert_same(verify_on_triton(name, *case), OPERATIONS[name](*case, backend="torch"))


def test_ties_between_groups_of_chunks_go_to_the_lowest_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CHUNK", 16)
    logits = torch.zeros(1, 1, 1100)
    logits[..., [5, 1090]] = 1.0
    verdict = on_triton(verify_greedy, logits, torch.zeros(1, 0, dtype=torch.int64))
    assert verdict.token_ids.tolist() == [[5]]


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same [B, N, V] values with other strides."""
    if kind == "transposed":
        return tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    wide = tensor.new_full((tensor.shape[0], 2 * tensor.shape[1], tensor.shape[2] + 3), torch.nan)
    view = wide[:, ::2, 1 : tensor.shape[2] + 1]
    return view.copy_(tensor)


@pytest.mark.parametrize("kind", ["transposed", "offset rows"])
@pytest.mark.parametrize("name", ["greedy", "rejection", "block", "coupled", "typical, sampled"])
def test_strides_change_nothing(name: str, kind: str) -> None:
    target, ids, draft, keys, lens = make_case(2, 2, 48)
    plain = verify_on_triton(name, target, ids, draft, keys, lens)
    other = verify_on_triton(name, strided(target, kind), ids, strided(draft, kind), keys, lens)
    assert_same(other, plain)


def test_a_draft_row_may_be_one_number_expanded() -> None:
    target, ids, _, keys, lens = make_case(2, 2, 48)
    case = (target, ids, torch.arange(4.0).view(2, 2, 1).expand(2, 2, 48), keys, lens)
    assert_same(verify_on_triton("rejection", *case), OPERATIONS["rejection"](*case, backend="torch"))


def poisoned(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
    """Fresh memory at its worst: NaN, or the smallest integer."""
    kind = dtype or torch.get_default_dtype()
    worst = torch.nan if kind.is_floating_point else torch.iinfo(kind).min
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return torch.full(tuple(shape), worst, dtype=kind, device=device, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_fresh_memory_holds_is_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(3, 3, 40)
    wanted = OPERATIONS[name](*case, backend="torch")
    monkeypatch.setattr(torch, "empty", poisoned)
    for is_fused in (False, True):
        monkeypatch.setattr(operations, "has_atomics", lambda device, is_fused=is_fused: is_fused)
        assert_same(verify_on_triton(name, *case), wanted)
    drawn = on_triton(sample, case[0][:, 0], keys=case[3], stream=Stream.DRAFT)
    assert_same(drawn, sample(case[0][:, 0], keys=case[3], stream=Stream.DRAFT, backend="torch"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rejection", "point mass", "block, warped", "typical, sampled", "coupled"])
def test_tiles_and_ways_to_finish_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(2, 2, 3 * launch.CHUNK + 5)
    verdicts: list[Verdict] = []
    for num_chunks, is_fused in ((1, False), (1, True), (2, True), (8, False)):
        monkeypatch.setattr(launch, "chunks_per_program", lambda num_rows, num=num_chunks: num)
        monkeypatch.setattr(operations, "has_atomics", lambda device, is_fused=is_fused: is_fused)
        verdicts.append(verify_on_triton(name, *case))
        drawn = on_triton(sample, case[0][:, 0], keys=case[3], stream=Stream.DRAFT)
        verdicts[-1] = Verdict(verdicts[-1].token_ids, drawn.token_ids, drawn.logsumexp)
    for verdict in verdicts[1:]:
        assert all(torch.equal(one, other) for one, other in zip(verdict, verdicts[0], strict=True))


@pytest.mark.parametrize("name", ["rejection", "block", "coupled", "typical, sampled"])
def test_a_row_is_decided_as_if_it_were_alone(name: str) -> None:
    target, ids, draft, keys, lens = make_case(4, 2, 40)
    together = verify_on_triton(name, target, ids, draft, keys, lens)
    for row in (0, 3):
        only = torch.tensor([row])
        alone = verify_on_triton(name, target[only], ids[only], draft[only], keys.rows(only), lens[only])
        assert all(torch.equal(one[0], other[row]) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.7, torch.tensor([0.0, 0.6, 1.0])])
@pytest.mark.parametrize("vocab_size", [33, 5000])
def test_sample_draws_as_the_twin_does(vocab_size: int, temperature: float | Tensor) -> None:
    logits, keys = make_round(3, 0, vocab_size)[0][:, 0], make_keys(3)
    cutoffs = logits.topk(9).values[:, -1]
    for stream in (Stream.DRAFT, Stream.RACE):
        options: dict[str, Any] = {"keys": keys, "stream": stream, "temperature": temperature, "row_cutoffs": cutoffs}
        assert_same(on_triton(sample, logits, **options), sample(logits, **options, backend="torch"))


def test_one_float_temperature_serves_all_rows() -> None:
    target, ids, draft, keys, _ = make_case(2, 2, 40)
    for temperature in (0.0, 0.7):
        options: dict[str, Any] = {"keys": keys, "temperature": temperature}
        mine = on_triton(verify_rejection, target, ids, draft, **options)
        assert_same(mine, verify_rejection(target, ids, draft, **options, backend="torch"))
        mine = on_triton(verify_typical, target, ids, temperature=temperature)
        assert_same(mine, verify_typical(target, ids, temperature=temperature, backend="torch"))


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
        assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
