"""Compare folded attention with transformers', in functions and in whole calls."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models import folded_attention as attention
from hf_speculate.models.folded_attention import STANDS_FOR, folded_attention, folding
from tests.cases import AttentionCalls, assert_decodes_as_plain, each_value, pair
from tests.support.tiny import make_model, ragged_prompts

# float64 round-off in sums over 11 states of magnitude 1; the mask of a wrong row gives 0.1
TOLERANCE = 1e-13
H, D, D_VALUE, T = 2, 8, 6, 11


def layer_of(groups: int) -> SimpleNamespace:
    """Return the fields of a layer that attention functions read."""
    return SimpleNamespace(num_key_value_groups=groups, is_causal=True)


def states(groups: int, num_query: int, batch_size: int, num_states: int = T):
    """Return a query as models make it, and keys and values as views of longer buffers."""
    generator = torch.Generator().manual_seed(groups * 100 + num_query * 10 + batch_size)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = draw(batch_size, num_query, groups * H, D).transpose(1, 2)
    key = draw(batch_size, H, 2 * num_states, D)[:, :, num_states:]
    value = draw(batch_size, H, 2 * num_states, D_VALUE)[:, :, :num_states]
    return query, key, value


def make_mask(mask_type: str, batch_size: int, num_query: int):
    """Make a causal mask for rows with different padding."""
    if mask_type == "none":
        return None
    seen = torch.ones(
        1 if mask_type == "shared" else batch_size, 1, num_query, T, dtype=torch.bool
    ).tril(T - num_query)
    for row in range(seen.shape[0]):
        seen[row, ..., :row] = False
    if mask_type != "float":
        return seen
    bias = torch.linspace(-1, 1, T, dtype=torch.float64).expand(seen.shape)
    return torch.where(seen, bias, torch.finfo(torch.float64).min)


def both(layer, query, key, value, mask, **kwargs):
    """Return our checked result, transformers' result and the shapes of our queries."""
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
def test_folded_attention_equals_transformers(mask, groups, num_query):
    batch_size, scaling = 3, 0.7 if groups == 1 else None
    mask_values = make_mask(mask, batch_size, num_query)
    layer, (query, key, value) = layer_of(groups), states(groups, num_query, batch_size)
    before = [tensor.clone() for tensor in (query, key, value)]
    ours, expected, shapes = both(layer, query, key, value, mask_values, scaling=scaling)
    assert torch.allclose(ours, expected, atol=TOLERANCE, rtol=0)
    is_folded = groups > 1 and (mask_values is not None or num_query == 1)
    assert shapes == [(batch_size, H, groups * num_query, D) if is_folded else tuple(query.shape)]
    assert all(torch.equal(*tensors) for tensors in zip(before, (query, key, value), strict=True))


_MOST = attention._MAX_QUERY_TOKENS + 1
_BIAS = {"position_bias": torch.linspace(-2, 2, 132, dtype=torch.float64).view(1, 4, 3, T)}
PASSED_ON = {
    "a long prompt": (torch.ones(2, 1, _MOST, _MOST, dtype=torch.bool).tril(), {}),
    "a mask by head": (torch.zeros(2, 4, 3, T, dtype=torch.float64), {}),
    "a position bias": (make_mask("bool", 2, 3), _BIAS),
    "dropout": (make_mask("bool", 2, 3), {"dropout": 0.5}),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_unsupported_arguments_are_passed_on(name):
    mask, options = PASSED_ON[name]
    query, key, value = states(2, mask.shape[2], 2, num_states=mask.shape[3])
    results = []
    for function in (sdpa_attention_forward, folded_attention):
        torch.manual_seed(0)
        with folding(), AttentionCalls() as calls:
            results.append(function(layer_of(2), query, key, value, mask, **options)[0])
    assert torch.equal(*results)
    assert all(seen.shape == query.shape for seen in calls.queries)


def test_replaced_sdpa_function_is_called_instead_of_folding(monkeypatch):
    calls = []

    def foreign(*args, **kwargs):
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, STANDS_FOR, foreign)
    query, key, value = states(2, 3, 2)
    ours, expected, shapes = both(
        layer_of(2), query, key, value, make_mask("bool", 2, 3), scaling=0.7
    )
    assert torch.equal(ours, expected)
    assert calls == [{"dropout": 0.0, "scaling": 0.7, "is_causal": None}]
    assert shapes == [tuple(query.shape)]


def folds_in(calls, target):
    """Return the numbers of query rows in calls that fold several query tokens.

    transformers itself packs single tokens.
    """
    num_heads, num_kv_heads = target.config.num_attention_heads, target.config.num_key_value_heads
    folded = [query.shape[2] for query in calls.queries if query.shape[1] == num_kv_heads]
    return [num_rows for num_rows in folded if num_rows > num_heads // num_kv_heads]


OPTIONS = {"num_assistant_tokens": 4, "max_new_tokens": 12}


# Cohere 2 has full layers and layers with a window
@each_value(batch_size=[1, 3], family=["llama", "cohere2"])
def test_speculative_call_folds_and_gives_plain_ids(family, batch_size):
    target, draft = pair(family)
    inputs = ragged_prompts(batch_size, seed=2)
    with AttentionCalls() as plain:
        target.generate(**inputs, max_new_tokens=12)
    assert plain.queries and not folds_in(plain, target)
    with AttentionCalls() as calls:
        assert_decodes_as_plain(target, draft, inputs, **OPTIONS)
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    assert 5 * groups in folds_in(calls, target)  # verifications of four drafted tokens
    assert target.config._attn_implementation == draft.config._attn_implementation == STANDS_FOR


def test_concurrent_plain_call_is_bit_identical():
    target, draft = pair("llama")
    others, logits, nested = ragged_prompts(3, seed=5), [], []

    def plain():
        with AttentionCalls() as calls:
            output = target.generate(
                **others, max_new_tokens=6, output_logits=True, return_dict_in_generate=True
            )
        logits.append(torch.stack(output.logits))
        nested.extend(folds_in(calls, target))

    plain()
    options = {
        **ragged_prompts(2, seed=2),
        **OPTIONS,
        "speculation_callback": lambda report: plain(),
    }
    with AttentionCalls() as calls:
        target.generate(**options, assistant_model=draft)
    assert len(logits) > 2 and all(torch.equal(logits[0], others) for others in logits)
    assert folds_in(calls, target) and not nested


def own_attention(module, query, key, value, attention_mask, **kwargs):
    """Attend as sdpa does; without a mask, assume that rows start at the first position."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.mark.fallback("its attention is own_to_be_masked")
def test_attention_without_masks_is_refused_with_the_line_to_add():
    AttentionInterface.register("own_to_be_masked", own_attention)
    target = hf_speculate.enable(make_model("llama", attn_implementation="own_to_be_masked"))
    options = {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3}
    with pytest.raises(UnsupportedModelError) as error:
        target.generate(**ragged_prompts(1, seed=3), **options)
    line = (
        "transformers.AttentionMaskInterface.register('own_to_be_masked', "
        "transformers.masking_utils.sdpa_mask)"
    )
    assert line in str(error.value)
    exec(line, {"transformers": transformers})
    assert (
        assert_decodes_as_plain(target, None, ragged_prompts(3, seed=3), **options).num_drafted > 0
    )
