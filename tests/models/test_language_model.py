"""A model behind a cache gives the logits of one plain forward over each row's real tokens."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.errors import ShapeError
from hf_speculate.models.language_model import LanguageModel
from tests.cases import each_value
from tests.tiny import KINDS, SLIDING_WINDOW, make_model, ragged_prompts

LOGIT_TOLERANCE = 1e-9  # float64 round-off of attention over masked columns; wrong positions differ by 1e-2 and more
SOFTMAX_FLOAT32 = {"gemma2", "bloom"}  # their attention rounds to float32 whatever the dtype
FLOAT32_TOLERANCE = 1e-4
BATCH_SIZE = 3


def make_cache(model: PreTrainedModel, batch_size: int, attention_mask: Tensor | None = None) -> DynamicKVCache:
    return DynamicKVCache(DynamicCache(config=model.config), batch_size, attention_mask)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model("llama")


@each_value(kind=KINDS, num_pieces=[1, 3])
def test_logits_of_a_padded_batch_equal_plain_forwards_of_its_rows(kind, num_pieces):
    model = make_model(kind)
    prompts = ragged_prompts(BATCH_SIZE, seed=2, min_len=4, max_len=2 * SLIDING_WINDOW)
    ids, mask = prompts["input_ids"], prompts["attention_mask"].bool()
    language_model, cache = LanguageModel(model), make_cache(model, BATCH_SIZE, prompts["attention_mask"])
    logits = torch.cat([language_model.forward(piece, cache) for piece in ids.chunk(num_pieces, dim=1)], dim=1)
    assert logits.shape == (*ids.shape, 64)
    assert logits.dtype == torch.float64
    tolerance = FLOAT32_TOLERANCE if kind in SOFTMAX_FLOAT32 else LOGIT_TOLERANCE
    for row in range(BATCH_SIZE):
        expected = model(ids[row, mask[row]][None]).logits[0]
        assert torch.allclose(logits[row, mask[row]], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_logits_to_keep_are_the_last_ones(kind):
    model = make_model(kind)
    ids = ragged_prompts(1, seed=2, min_len=6)["input_ids"]
    language_model = LanguageModel(model)
    every = language_model.forward(ids, make_cache(model, 1))
    for num in (1, 3, ids.shape[1]):
        last = language_model.forward(ids, make_cache(model, 1), logits_to_keep=num)
        assert last.shape == (1, num, 64)
        assert torch.allclose(last, every[:, -num:], atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("num", [1, 3, 6])
@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma4", {"num_kv_shared_layers": 0})])
def test_the_head_is_given_compact_states(kind, options, num):
    model, strides = make_model(kind, **options), []
    model.lm_head.register_forward_pre_hook(lambda _, args: strides.append((args[0].shape, args[0].stride())))
    ids = torch.full((BATCH_SIZE, 6), 5)
    LanguageModel(model).forward(ids, make_cache(model, BATCH_SIZE), logits_to_keep=num)
    (shape, stride), width = strides[0], model.config.hidden_size
    assert shape == (BATCH_SIZE, num, width)
    assert stride == (num * width, width, 1)


def test_a_model_that_only_counts_is_given_a_count(llama):
    class Counts(type(llama)):
        def forward(self, input_ids=None, logits_to_keep: int = 0, **kwargs):
            assert type(logits_to_keep) is int
            return super().forward(input_ids, logits_to_keep=logits_to_keep, **kwargs)

    model = copy.deepcopy(llama)
    model.__class__ = Counts
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = LanguageModel(model).forward(ids, make_cache(model, 1), logits_to_keep=2)
    assert torch.allclose(logits, llama(ids).logits[:, -2:], atol=LOGIT_TOLERANCE, rtol=0)


def test_layers_that_share_states_skip_the_prompt_but_for_its_last_token():
    model = make_model("gemma4")
    widths = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    ids = torch.full((BATCH_SIZE, 6), 5)
    LanguageModel(model).forward(ids, make_cache(model, BATCH_SIZE), logits_to_keep=1)
    model(ids, logits_to_keep=1)
    assert widths[:4] == widths[4:]  # as in plain decoding


def test_a_model_that_cannot_keep_some_logits_has_them_cut(llama):
    class KeepsAll(type(llama)):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
            assert "logits_to_keep" not in kwargs
            return super().forward(
                input_ids, attention_mask, position_ids=position_ids, past_key_values=past_key_values, **kwargs
            )

    model = copy.deepcopy(llama)
    model.__class__ = KeepsAll
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = LanguageModel(model).forward(ids, make_cache(model, 1), logits_to_keep=2)
    assert logits.shape == (1, 2, 64)
    assert torch.allclose(logits, llama(ids).logits[:, -2:], atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_the_cache_is_advanced_by_the_query(kind):
    model = make_model(kind)
    prompts = ragged_prompts(BATCH_SIZE, seed=2, min_len=4, max_len=9)
    cache = make_cache(model, BATCH_SIZE, prompts["attention_mask"])
    language_model = LanguageModel(model)
    lens = prompts["attention_mask"].sum(1)
    language_model.forward(prompts["input_ids"], cache)
    assert torch.equal(cache.get_lens(), lens)
    language_model.forward(torch.ones(BATCH_SIZE, 2, dtype=torch.int64), cache, logits_to_keep=1)
    assert torch.equal(cache.get_lens(), lens + 2)


def test_an_empty_query_is_refused_before_the_cache_changes(llama):
    cache = make_cache(llama, 2)
    with pytest.raises(ShapeError, match=r"query_token_ids must be \[B, Q\] with Q >= 1, got \[2, 0\]"):
        LanguageModel(llama).forward(torch.zeros(2, 0, dtype=torch.int64), cache)
    assert cache.get_num_tokens() == 0


@pytest.mark.parametrize("keeps_states", [False, True])
def test_states_that_do_not_outlive_the_call_are_inference_tensors(keeps_states):
    model = make_model("llama").requires_grad_(True)
    ids, cache = torch.tensor([[5, 6, 7]]), make_cache(model, 1)
    language_model = LanguageModel(model, keeps_states=keeps_states)
    logits = torch.cat([language_model.forward(ids, cache), language_model.forward(ids, cache)], dim=1)
    assert not logits.requires_grad
    held = cache.get_kv_states()[0].keys
    assert held.is_inference() == (not keeps_states)
    assert not held.requires_grad
    expected = model(torch.cat([ids, ids], dim=1)).logits.detach()
    assert torch.allclose(logits, expected, atol=LOGIT_TOLERANCE, rtol=0)


def test_hidden_states_and_attentions_come_only_where_asked_for():
    model = make_model("llama", attn_implementation="eager")
    ids = torch.tensor([[5, 6, 7]])
    bare = LanguageModel(model).run(ids, make_cache(model, 1))
    assert bare.hidden_states is None
    assert bare.attentions is None
    full = LanguageModel(model).run(ids, make_cache(model, 1), output_hidden_states=True, output_attentions=True)
    assert torch.equal(full.logits, bare.logits)
    assert [states.shape for states in full.hidden_states] == [(1, 3, 32)] * 3  # embeddings and two layers
    assert [weights.shape for weights in full.attentions] == [(1, 4, 3, 3)] * 2


@pytest.mark.parametrize(("eos", "expected"), [(7, 7), ([9, 7], 9)])
def test_eos_token_id_is_the_first_one(eos, expected):
    model = make_model("llama")
    model.generation_config.eos_token_id = eos
    assert LanguageModel(model).eos_token_id == expected


def test_a_model_without_eos_says_so(llama):
    with pytest.raises(ValueError, match="eos_token_id must be set in the model's generation config, got None"):
        _ = LanguageModel(llama).eos_token_id


def test_positions_past_the_bound_are_the_bound():
    """Tokens past a table of eight positions are scored instead of failing; those before it are as ever."""
    model, ids = make_model("gpt2", n_positions=8), torch.arange(1, 12)[None]
    clamped = LanguageModel(model, max_position=7).forward(ids, make_cache(model, 1))
    expected = model(ids, position_ids=torch.arange(11).clamp_max(7)[None]).logits
    assert torch.allclose(clamped, expected, atol=LOGIT_TOLERANCE, rtol=0)
    assert torch.allclose(clamped[:, :8], model(ids[:, :8]).logits, atol=LOGIT_TOLERANCE, rtol=0)
    with pytest.raises(IndexError):
        LanguageModel(model).forward(ids, make_cache(model, 1))


def test_the_bound_counts_each_rows_own_positions():
    model = make_model("gpt2", n_positions=8)
    ids, mask = torch.arange(1, 25).view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :6] = 0
    logits = LanguageModel(model, max_position=7).forward(ids, make_cache(model, 2, mask))
    alone = model(ids[1:, 6:]).logits
    assert torch.allclose(logits[1, 6:], alone[0], atol=LOGIT_TOLERANCE, rtol=0)
