"""Test a model with its cache: logits, positions, states, and decoding against `generate`."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.compat import CACHE_NAME
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.types import SampleStrategy
from tests.cases import each_value
from tests.support.tiny import SLIDING_WINDOW, make_model, ragged_prompts

# float64 round-off of attention over masked columns; wrong positions differ by at least 1e-2
LOGIT_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-4
BATCH_SIZE = 3
GREEDY = SampleStrategy.GREEDY
VOCAB_SIZE = 64
NUM_NEW = SLIDING_WINDOW + 4


def make_cache(
    model: PreTrainedModel, batch_size: int, attention_mask: Tensor | None = None
) -> DynamicKVCache:
    return DynamicKVCache(DynamicCache(config=model.config), batch_size, attention_mask)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model("llama")


@each_value(num=[1, 3, 6], family=["llama", "gemma4"])
def test_logits_to_keep_are_the_last_of_compact_states(family, num):
    model, strides = (
        make_model(family, **({"num_kv_shared_layers": 0} if family == "gemma4" else {})),
        [],
    )
    model.lm_head.register_forward_pre_hook(
        lambda _, args: strides.append((args[0].shape, args[0].stride()))
    )
    ids = torch.full((BATCH_SIZE, 6), 5)
    last = LanguageModel(model).forward(ids, make_cache(model, BATCH_SIZE), logits_to_keep=num)
    assert torch.allclose(last, model(ids).logits[:, -num:], atol=FLOAT32_TOLERANCE, rtol=0)
    (shape, stride), width = strides[0], model.config.hidden_size
    assert shape == (BATCH_SIZE, num, width)
    assert stride == (num * width, width, 1)


def only_counts(self, input_ids=None, logits_to_keep: int = 0, **options):
    assert type(logits_to_keep) is int
    return LlamaForCausalLM.forward(self, input_ids, logits_to_keep=logits_to_keep, **options)


def keeps_all(self, input_ids=None, position_ids=None, past_key_values=None, **options):
    assert "logits_to_keep" not in options
    # older versions require the name of the cache
    options = {CACHE_NAME: past_key_values, **options}
    return LlamaForCausalLM.forward(self, input_ids, position_ids=position_ids, **options)


@pytest.mark.parametrize("forward", [only_counts, keeps_all])
def test_model_without_logit_indices_gets_a_count_or_a_cut(llama, forward):
    model = copy.deepcopy(llama)
    model.__class__ = type("Other", (LlamaForCausalLM,), {"forward": forward})
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = LanguageModel(model).forward(ids, make_cache(model, 1), logits_to_keep=2)
    assert torch.allclose(logits, llama(ids).logits[:, -2:], atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("keeps_states", [False, True])
def test_states_within_a_call_are_inference_tensors(keeps_states):
    model = make_model("llama").requires_grad_(True)
    ids, cache = torch.tensor([[5, 6, 7]]), make_cache(model, 1)
    language_model = LanguageModel(model, keeps_states=keeps_states)
    logits = torch.cat(
        [language_model.forward(ids, cache), language_model.forward(ids, cache)], dim=1
    )
    assert not logits.requires_grad
    keys = cache.get_kv_states()[0].keys
    assert keys.is_inference() == (not keeps_states)
    assert not keys.requires_grad
    expected = model(torch.cat([ids, ids], dim=1)).logits.detach()
    assert torch.allclose(logits, expected, atol=LOGIT_TOLERANCE, rtol=0)


def test_positions_past_the_bound_are_clamped_by_row():
    """Score tokens past a table of eight positions; it neither fails nor changes earlier ones."""
    model = make_model("gpt2", n_positions=8)
    ids, mask = torch.arange(1, 25).view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :6] = 0
    logits = LanguageModel(model, max_position=7).forward(ids, make_cache(model, 2, mask))
    alone = model(ids[1:, 6:]).logits
    assert torch.allclose(logits[1, 6:], alone[0], atol=LOGIT_TOLERANCE, rtol=0)
    expected = model(ids[:1], position_ids=torch.arange(12).clamp_max(7)[None]).logits
    assert torch.allclose(logits[0], expected[0], atol=LOGIT_TOLERANCE, rtol=0)


def test_row_length_includes_its_eos(llama):
    prompts = ragged_prompts(3, seed=5, max_len=2 * SLIDING_WINDOW)
    whole = llama.generate(**prompts, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    eos = [int(whole[0, 3]), int(whole[1, 7])]
    model = make_model("llama")
    model.generation_config.eos_token_id = eos
    cache = make_cache(llama, 3, prompts["attention_mask"])
    out = Inferencer(LanguageModel(model)).decode(prompts["input_ids"], cache, NUM_NEW, GREEDY)
    is_eos = torch.isin(whole, torch.tensor(eos)).tolist()
    expected = [row.index(True) + 1 if True in row else NUM_NEW for row in is_eos]
    assert out.lens.tolist() == expected
    assert min(expected) < max(expected)
    assert out.token_ids.shape[1] == max(expected)
    assert torch.equal(out.token_logits.argmax(-1), out.token_ids)
    # the last token is not fed
    assert torch.equal(cache.get_lens(), prompts["attention_mask"].sum(1) + max(expected) - 1)
    for row, length in enumerate(expected):
        assert torch.equal(out.token_ids[row, :length], whole[row, :length])
