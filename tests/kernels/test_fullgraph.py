"""Test that the operations compile with `torch.compile(fullgraph=True)` on both backends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.kernels import Stream, custom_ops, sample, warp_logits
from hf_speculate.kernels.drop_ins.chain import chain_speculative_sampling
from tests.kernels.distributions import make_keys
from tests.kernels.on_triton import BACKENDS, NEEDS_TRITON, assert_same, moved
from tests.kernels.operations import OPERATIONS, make_round


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="eager")


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(
    "name", ["greedy", "rejection", "block, warped", "coupled", "point mass", "typical, sampled"]
)
def test_verifiers_compile_whole(name: str, backend: str) -> None:
    target, ids, draft = make_round(3, 2, 40)
    case = moved((target, ids, draft, make_keys(3), torch.tensor([2, 1, 2])))
    operation = OPERATIONS[name]
    mine = whole(lambda *args: operation(*args, backend=backend))(*case)
    assert_same(mine, operation(*case, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sample_and_cutoffs_compile_whole(backend: str) -> None:
    logits, keys = moved((make_round(3, 0, 40)[0][:, 0], make_keys(3)))
    options: dict[str, Any] = {"keys": keys, "stream": Stream.DRAFT, "backend": backend}

    def draw(temperature: float | Tensor) -> Any:
        warped = warp_logits(logits, temperature=0.8, top_k=5, backend=backend)
        return (*sample(warped, temperature=temperature, **options), warped)

    for temperature in (0.7, torch.tensor([0.0, 0.5, 1.0], device=logits.device)):
        for tensor, expected in zip(whole(draw)(temperature), draw(temperature), strict=True):
            torch.testing.assert_close(tensor, expected)


def test_drop_in_with_in_place_counters_runs_outside_of_graphs() -> None:
    target, ids, draft = make_round(3, 2, 40)
    args = draft.softmax(-1), ids, target.softmax(-1)

    def verify(*args: Tensor) -> list[Tensor]:
        return list(chain_speculative_sampling(*args, seed=0, offset=0))

    compiled = torch.compile(verify, backend="aot_eager")(*args)
    for tensor, expected in zip(compiled, verify(*args), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("is_triton", [False, pytest.param(True, marks=NEEDS_TRITON)])
def test_operators_are_registered_as_torch_asks(is_triton: bool) -> None:
    target, ids, draft, keys = moved((*make_round(2, 2, 40), make_keys(2)))
    seeds = list(keys)
    for verifier, rule in (("greedy", []), ("reject", []), ("typical", [0.09, 0.3, 0.0, 0.0])):
        args = (is_triton, verifier, target, ids, None, 0.7, None, None, draft, None, seeds, rule)
        torch.library.opcheck(custom_ops._verify, args)
    if is_triton:
        torch.library.opcheck(
            custom_ops._sample, (target[:, 0], 0.7, None, None, seeds, int(Stream.RACE))
        )
        torch.library.opcheck(custom_ops._cut, (target[:, 0], 0.7, 5, 0.9, 3.0))
