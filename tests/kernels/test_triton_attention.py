"""Compare the kernels for attention with few queries with their reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.kernels import ShapeError
from hf_speculate.kernels.attention import attend, key_spans
from tests.kernels.attention_cases import Case, make_inputs
from tests.kernels.on_triton import DEVICE, moved, on_triton

pytest.importorskip("triton", reason="needs Triton")
from hf_speculate.kernels import kernels
from hf_speculate.kernels._inputs import Attention

# Outputs are below 4. Half precision rounds weights and results. The interpreter truncates
# bfloat16.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}

CASES = {
    "one query": Case(1, 1, width=64),
    "a group": Case(4, 6, width=80, num_heads=2, dtype=torch.bfloat16),
    "several tiles of rows": Case(8, 32, batch_size=1, num_keys=40),
    "a wide tile": Case(4, 16, batch_size=1, dtype=torch.float16),
    "three shares": Case(4, 6, width=96, num_keys=150, num_parts=3, dtype=torch.float16),
    "more shares than keys": Case(1, 6, num_parts=9),
    "more shares than are merged at once": Case(2, 2, num_keys=330, num_parts=10),
    "a window": Case(4, 6, window=9, num_keys=150, num_parts=2),
    "a soft cap": Case(2, 3, softcap=0.5, num_parts=2),
    "sinks": Case(2, 3, num_heads=2, has_sinks=True, num_parts=2),
    "a window, a soft cap and sinks": Case(
        8, 2, width=128, window=20, softcap=2.0, has_sinks=True, num_parts=2, dtype=torch.bfloat16
    ),
    "the widest heads": Case(1, 3, width=256, batch_size=1, num_keys=40, dtype=torch.bfloat16),
}


def run(inputs: dict[str, Any], spans: Tensor, num_parts: int | None) -> Tensor:
    """Return the kernels' result on the CPU."""
    return moved(
        kernels.attend(Attention(**moved_all(inputs), spans=moved(spans, DEVICE)), num_parts), "cpu"
    )


def moved_all(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: moved(value, DEVICE) for name, value in inputs.items()}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str) -> None:
    case = CASES[name]
    inputs, mask = make_inputs(case)
    spans = key_spans(mask)
    assert torch.equal(on_triton(key_spans, mask), spans)
    doubles = {
        key: value.double() if isinstance(value, Tensor) else value for key, value in inputs.items()
    }
    output = run(inputs, spans, case.num_parts)
    assert output.dtype == case.dtype
    expected = attend(**doubles, spans=spans)
    torch.testing.assert_close(output.double(), expected, atol=TOLERANCES[case.dtype], rtol=0)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("has_sinks", [False, True])
def test_row_without_keys_is_zero_and_nan_propagates(has_sinks: bool) -> None:
    inputs, mask = make_inputs(Case(2, 3, has_sinks=has_sinks))
    spans = key_spans(mask)
    spans[0, 0] = spans[1] = 0
    inputs["value"][0, 0, int(spans[0, 1, 0])] = torch.nan
    output = run(inputs, spans, 2)
    assert (output[1] == 0).all() and (output[0, 0] == 0).all()
    assert output[0, 1:].isnan().all()


def test_single_span_serves_all_rows() -> None:
    inputs, _ = make_inputs(Case(2, 3))
    inputs = {
        name: value.nan_to_num() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    spans = torch.tensor([[[5, 31], [0, 32], [7, 33]]], dtype=torch.int32)
    torch.testing.assert_close(
        run(inputs, spans, None), attend(**inputs, spans=spans), atol=5e-6, rtol=0
    )


def test_unsupported_width_runs_in_torch_or_raises_by_name() -> None:
    inputs, mask = make_inputs(Case(2, 3, width=12))
    if DEVICE == "cpu":
        assert attend(**inputs, spans=key_spans(mask)).shape == (2, 3, 2, 12)
    with pytest.raises(ShapeError, match="D must be a multiple of 8 up to 256, got 12"):
        on_triton(attend, **inputs, spans=key_spans(mask))
