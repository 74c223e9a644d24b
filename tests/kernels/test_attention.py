"""Compare torch attention for few queries with SDPA and with a softmax written out in loops."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate.kernels import ConfigError, ShapeError
from hf_speculate.kernels.attention import attend, key_spans
from tests.kernels.attention_cases import Case, make_inputs, written_out

TOLERANCE = 1e-13  # float64 round-off in sums over 70 states of magnitude 1


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("groups", "num_query"), [(1, 1), (4, 6), (8, 32)])
def test_reference_equals_sdpa(groups: int, num_query: int, window: int | None) -> None:
    inputs, mask = make_inputs(
        Case(groups, num_query, num_heads=2, window=window, dtype=torch.float64)
    )
    output = attend(**inputs, spans=key_spans(mask))
    key, value = (inputs[name].nan_to_num() for name in ("key", "value"))
    expected = scaled_dot_product_attention(inputs["query"], key, value, mask, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("softcap", "has_sinks"), [(2.0, False), (None, True), (0.5, True)])
def test_reference_caps_scores_and_counts_sinks(softcap: float | None, has_sinks: bool) -> None:
    case = Case(
        2, 3, num_heads=2, window=9, softcap=softcap, has_sinks=has_sinks, dtype=torch.float64
    )
    inputs, mask = make_inputs(case)
    output = attend(**inputs, spans=key_spans(mask))
    torch.testing.assert_close(output, written_out(inputs, mask), atol=TOLERANCE, rtol=0)


def test_spans_follow_the_mask() -> None:
    mask = torch.full((1, 1, 4, 6), -torch.inf)
    mask[0, 0, 0, 2:5] = mask[0, 0, 1, 5:] = mask[0, 0, 2, :1] = 0.0
    mask[0, 0, 2, 1:] = torch.finfo(mask.dtype).min
    assert key_spans(mask).tolist() == [[[2, 5], [5, 6], [0, 1], [0, 0]]]


def test_mismatched_inputs_are_named() -> None:
    inputs, mask = make_inputs(Case(2, 3))
    spans = key_spans(mask)
    with pytest.raises(
        ShapeError, match=r"spans must be \[B or 1, Q, 2\] = \[2, 3, 2\], got \[2, 3\]"
    ):
        attend(**inputs, spans=spans[..., 0])
    with pytest.raises(ShapeError, match="value must be one of float32, got float16"):
        attend(**{**inputs, "value": inputs["value"].half()}, spans=spans)
    with pytest.raises(ConfigError, match=r"softcap must be > 0, got 0\.0"):
        attend(**{**inputs, "softcap": 0.0}, spans=spans)
    with pytest.raises(ShapeError, match=r"mask must be \[B or 1, 1, Q, T\]"):
        key_spans(mask[:, 0])
