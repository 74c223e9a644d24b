"""Split-key attention: the torch reference equals torch's own, and the kernels equal the reference."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate.triton_kernels import split_key_attention
from tests.triton_kernels.on_triton import moved, on, on_triton

pytest.importorskip("triton", reason="needs Triton")

# Of outputs of size 1; a wrong mask or part moves them by 0.1. float32 sums in another order: 5e-6 at width 256 on some
# CPUs. In half precision weights and outputs are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Case(NamedTuple):
    """Sizes of one call, and how many parts its keys are split into; None: as many as the library takes."""

    batch_size: int = 2
    num_kv_heads: int = 2
    groups: int = 2
    num_query: int = 5
    num_keys: int = 150
    width: int = 32
    value_width: int = 32
    num_splits: int | None = 3
    dtype: torch.dtype = torch.float32
    mask: str = "padded"


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query as models make it, and keys and values that are views of longer buffers."""
    generator = torch.Generator().manual_seed(sum(case[:7]))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    query = draw(case.batch_size, case.num_query, case.groups * case.num_kv_heads, case.width).transpose(1, 2)
    key = draw(case.batch_size, case.num_kv_heads, case.num_keys + 9, case.width)[:, :, : case.num_keys]
    value = draw(case.batch_size, case.num_kv_heads, case.num_keys + 9, case.value_width)[:, :, 9:]
    return query, key, value


def make_mask(case: Case) -> Tensor | None:
    """[B or 1, 1 or g*H, Q, T]: rows of different starts and ends, causal at the end."""
    num_query, num_keys = case.num_query, case.num_keys
    if case.mask == "none":
        return None
    seen = torch.ones(case.batch_size, 1, num_query, num_keys, dtype=torch.bool).tril(num_keys - num_query)
    for row in range(case.batch_size):
        seen[row, ..., : 60 * row] = False
        seen[row, ..., num_keys - 7 * row :] = False
    if case.mask == "window":
        seen &= torch.ones(num_query, num_keys, dtype=torch.bool).triu(num_keys - num_query - 20)
    if case.mask == "shared":
        seen = seen[:1]
    if case.mask == "heads":
        seen = seen.repeat(1, case.groups * case.num_kv_heads, 1, 1)
        seen[:, 1::2, :, 70:80] = False
    if case.mask == "hidden":
        seen[-1, :, 1] = False
    if case.mask != "added":
        return seen
    bias = torch.linspace(-1, 1, num_keys + 3).to(case.dtype)[:num_keys].expand(seen.shape)
    return torch.where(seen, bias, torch.finfo(case.dtype).min)


CASES = {
    "window, splits without a visible key": Case(mask="window", num_splits=5, num_keys=331),
    "a row that sees nothing": Case(mask="hidden"),
    "added in float16": Case(mask="added", dtype=torch.float16),
    "added in bfloat16": Case(mask="added", dtype=torch.bfloat16, batch_size=3, num_keys=280),
    "one mask for all, one split": Case(mask="shared", groups=1, num_splits=1),
    "a mask for each head, more splits than blocks": Case(mask="heads", num_splits=64),
    "no mask, one token, one row": Case(mask="none", batch_size=1, num_query=1, groups=8, num_kv_heads=1),
    "more rows than a block": Case(num_query=16, groups=7, num_kv_heads=1),
    "odd width, wider values": Case(width=80, value_width=96),
    "wide": Case(width=256, value_width=256, num_splits=2),
    "splits as the library takes them": Case(num_splits=None, batch_size=1, num_keys=400),
    "a single key": Case(num_keys=1, num_query=1, mask="none", num_splits=4),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention(name: str, backend: str) -> None:
    case = CASES[name]
    splits = {"num_splits": case.num_splits} if backend == "triton" else {}
    ours = on(backend, split_key_attention, *inputs(case), mask=make_mask(case), scaling=0.3, **splits)
    assert ours.dtype == case.dtype
    assert ours.transpose(1, 2).is_contiguous()
    mask = make_mask(case)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    wide = [one.double() for one in inputs(case)]
    expected = scaled_dot_product_attention(*wide, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours.double(), expected, atol=TOLERANCE[case.dtype], rtol=0)


def test_the_scale_is_that_of_torch_unless_told() -> None:
    query, key, value = inputs(Case())
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    found = on_triton(split_key_attention, query, key, value)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=0)


def test_a_row_does_not_depend_on_the_other_rows_of_the_batch() -> None:
    case = Case(batch_size=3, num_keys=280)
    tensors, mask = inputs(case), make_mask(case)
    assert mask is not None
    together = on_triton(split_key_attention, *tensors, mask=mask, num_splits=3)
    for row in range(3):
        alone = [one[row : row + 1] for one in (*tensors, mask)]
        assert torch.equal(on_triton(split_key_attention, *alone[:3], mask=alone[3], num_splits=3)[0], together[row])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_it_compiles_whole_and_for_all_lengths_at_once(backend: str) -> None:
    torch.compiler.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda *args: split_key_attention(*args, backend=backend) * 2, backend=keep, fullgraph=True, dynamic=True
    )
    for num_keys in (140, 150, 290):
        case = Case(num_keys=num_keys)
        args = moved((*inputs(case), make_mask(case)))
        torch.testing.assert_close(compiled(*args), split_key_attention(*args, backend=backend) * 2)
    assert len(graphs) == 1
