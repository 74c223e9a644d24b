"""Folded attention equals transformers' own, passes on what it cannot fold, and only folds where it is asked to."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_speculate.models import folded_attention as attention
from hf_speculate.models.folded_attention import STANDS_FOR, folded_attention, folding
from tests.cases import AttentionCalls

TOLERANCE = 1e-13  # float64 round-off of sums over 11 states of size 1; a row under its neighbour's mask is off by 0.1
H, D, D_VALUE, T = 2, 8, 6, 11


def layer_of(groups: int) -> SimpleNamespace:
    """What an attention function reads of its layer."""
    return SimpleNamespace(num_key_value_groups=groups, is_causal=True)


def states(groups: int, num_query: int, batch_size: int, num_states: int = T):
    """Query as models make it, and keys and values that are views of longer buffers."""
    generator = torch.Generator().manual_seed(groups * 100 + num_query * 10 + batch_size)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = draw(batch_size, num_query, groups * H, D).transpose(1, 2)
    key = draw(batch_size, H, 2 * num_states, D)[:, :, num_states:]
    value = draw(batch_size, H, 2 * num_states, D_VALUE)[:, :, :num_states]
    return query, key, value


def make_mask(kind: str, batch_size: int, num_query: int):
    """Rows that are padded by different amounts, causal at the end."""
    if kind == "none":
        return None
    seen = torch.ones(1 if kind == "shared" else batch_size, 1, num_query, T, dtype=torch.bool).tril(T - num_query)
    for row in range(seen.shape[0]):
        seen[row, ..., :row] = False
    if kind != "float":
        return seen
    bias = torch.linspace(-1, 1, T, dtype=torch.float64).expand(seen.shape)
    return torch.where(seen, bias, torch.finfo(torch.float64).min)


def both(layer, query, key, value, mask, **kwargs):
    """Our result inside `folding()`, checked for its form, transformers', and the shapes of our queries."""
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, **kwargs)
    with folding(), AttentionCalls() as calls:
        ours, weights = folded_attention(layer, query, key, value, mask, **kwargs)
    assert weights is None
    assert ours.is_contiguous()
    assert ours.shape == expected.shape
    return ours, expected, [tuple(query.shape) for query in calls.queries]


@pytest.mark.parametrize("num_query", [1, 6])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("mask", ["bool", "float", "shared", "none"])
def test_the_result_is_that_of_transformers(mask, groups, num_query):
    batch_size, scaling = 3, 0.7 if groups == 1 else None
    given = make_mask(mask, batch_size, num_query)
    layer, (query, key, value) = layer_of(groups), states(groups, num_query, batch_size)
    before = [tensor.clone() for tensor in (query, key, value)]
    ours, expected, shapes = both(layer, query, key, value, given, scaling=scaling)
    assert torch.allclose(ours, expected, atol=TOLERANCE, rtol=0)
    is_folded = groups > 1 and (given is not None or num_query == 1)
    assert shapes == [(batch_size, H, groups * num_query, D) if is_folded else tuple(query.shape)]
    assert all(torch.equal(*one) for one in zip(before, (query, key, value), strict=True))


_MOST = attention._MOST_QUERY_TOKENS + 1
_BIAS = {"position_bias": torch.linspace(-2, 2, 132, dtype=torch.float64).view(1, 4, 3, T)}
PASSED_ON = {
    "a long prompt": (torch.ones(2, 1, _MOST, _MOST, dtype=torch.bool).tril(), {}),
    "a mask by head": (torch.zeros(2, 4, 3, T, dtype=torch.float64), {}),
    "a position bias": (make_mask("bool", 2, 3), _BIAS),
    "dropout": (make_mask("bool", 2, 3), {"dropout": 0.5}),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_it_cannot_fold_is_passed_on(name):
    mask, options = PASSED_ON[name]
    query, key, value = states(2, mask.shape[2], 2, num_states=mask.shape[3])
    results = []
    for function in (sdpa_attention_forward, folded_attention):
        torch.manual_seed(0)
        with folding(), AttentionCalls() as calls:
            results.append(function(layer_of(2), query, key, value, mask, **options)[0])
    assert torch.equal(*results)
    assert all(seen.shape == query.shape for seen in calls.queries)


def test_another_function_under_the_name_is_called_in_place_of_folding(monkeypatch):
    calls = []

    def foreign(*args, **kwargs):
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, STANDS_FOR, foreign)
    query, key, value = states(2, 3, 2)
    ours, expected, shapes = both(layer_of(2), query, key, value, make_mask("bool", 2, 3), scaling=0.7)
    assert torch.equal(ours, expected)
    assert calls == [{"dropout": 0.0, "scaling": 0.7, "is_causal": None}]
    assert shapes == [tuple(query.shape)]
