"""A model behind a cache against plain forwards over each row's real tokens, and token by token against `generate`."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.types import SampleStrategy
from tests.cases import each_value
from tests.tiny import KINDS, SLIDING_WINDOW, make_law_model, make_model, ragged_prompts
from tests.triton_kernels.distributions import FAIL_P_VALUE, PASS_P_VALUE, p_value

LOGIT_TOLERANCE = 1e-9  # float64 round-off of attention over masked columns; wrong positions differ by 1e-2 and more
SOFTMAX_FLOAT32 = {"gemma2", "bloom"}  # their attention rounds to float32 whatever the dtype
FLOAT32_TOLERANCE = 1e-4
BATCH_SIZE = 3
GREEDY, RANDOM = SampleStrategy.GREEDY, SampleStrategy.RANDOM
VOCAB_SIZE = 64
NUM_NEW = SLIDING_WINDOW + 4
NUM_DRAWS = 20_000


def make_cache(model: PreTrainedModel, batch_size: int, attention_mask: Tensor | None = None) -> DynamicKVCache:
    return DynamicKVCache(DynamicCache(config=model.config), batch_size, attention_mask)


def make_inferencer(model: PreTrainedModel, seed: int | None = None) -> Inferencer:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return Inferencer(LanguageModel(model), generator)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def prompts() -> dict[str, Tensor]:
    return ragged_prompts(3, seed=5, max_len=2 * SLIDING_WINDOW)


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


@each_value(num=[1, 3, 6], kind=["llama", "gemma4"])
def test_logits_to_keep_are_the_last_ones_of_compact_states(kind, num):
    model, strides = make_model(kind, **({"num_kv_shared_layers": 0} if kind == "gemma4" else {})), []
    model.lm_head.register_forward_pre_hook(lambda _, args: strides.append((args[0].shape, args[0].stride())))
    ids = torch.full((BATCH_SIZE, 6), 5)
    last = LanguageModel(model).forward(ids, make_cache(model, BATCH_SIZE), logits_to_keep=num)
    assert torch.allclose(last, model(ids).logits[:, -num:], atol=FLOAT32_TOLERANCE, rtol=0)
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
    assert torch.allclose(logits, llama(ids).logits[:, -2:], atol=LOGIT_TOLERANCE, rtol=0)


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


@pytest.mark.parametrize(("eos", "expected"), [(7, 7), ([9, 7], 9)])
def test_eos_token_id_is_the_first_one_and_a_model_without_says_so(eos, expected):
    model = make_model("llama")
    with pytest.raises(ValueError, match="eos_token_id must be set"):
        _ = LanguageModel(model).eos_token_id
    model.generation_config.eos_token_id = eos
    assert LanguageModel(model).eos_token_id == expected


def test_positions_past_the_bound_are_the_bound_counted_by_row():
    """Tokens past a table of eight positions are scored instead of failing; those before it are as ever."""
    model = make_model("gpt2", n_positions=8)
    ids, mask = torch.arange(1, 25).view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :6] = 0
    logits = LanguageModel(model, max_position=7).forward(ids, make_cache(model, 2, mask))
    alone = model(ids[1:, 6:]).logits
    assert torch.allclose(logits[1, 6:], alone[0], atol=LOGIT_TOLERANCE, rtol=0)
    expected = model(ids[:1], position_ids=torch.arange(12).clamp_max(7)[None]).logits
    assert torch.allclose(logits[0], expected[0], atol=LOGIT_TOLERANCE, rtol=0)


def test_what_decodes_nothing_is_refused(llama):
    empty, cache, inferencer = torch.zeros(2, 0, dtype=torch.int64), make_cache(llama, 2), make_inferencer(llama)
    for call in (inferencer.prefill, LanguageModel(llama).forward):
        with pytest.raises(ShapeError, match="query_token_ids"):
            call(empty, cache, *([GREEDY] if call == inferencer.prefill else []))
    with pytest.raises(ConfigError, match="max_new_tokens"):
        inferencer.decode(torch.ones(2, 2, dtype=torch.int64), cache, 0, GREEDY)
    assert cache.get_num_tokens() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_equals_plain_generate_and_does_not_feed_the_last_token(kind, prompts):
    model = make_model(kind)
    cache = make_cache(model, 3, prompts["attention_mask"])
    out = make_inferencer(model).decode(prompts["input_ids"], cache, NUM_NEW, GREEDY)
    assert torch.equal(out.token_ids, model.generate(**prompts, max_new_tokens=NUM_NEW)[:, -NUM_NEW:])
    assert out.lens.tolist() == [NUM_NEW] * 3
    assert out.token_logits.shape == (3, NUM_NEW, VOCAB_SIZE)
    first = make_inferencer(model).prefill(
        prompts["input_ids"], make_cache(model, 3, prompts["attention_mask"]), GREEDY
    )
    assert torch.equal(first.token_ids, out.token_ids[:, :1])
    assert torch.equal(out.token_logits.argmax(-1), out.token_ids)
    assert torch.equal(cache.get_lens(), prompts["attention_mask"].sum(1) + NUM_NEW - 1)


def test_a_row_counts_its_tokens_up_to_and_with_its_eos(llama, prompts):
    whole = llama.generate(**prompts, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    eos = [int(whole[0, 3]), int(whole[1, 7])]
    model = make_model("llama")
    model.generation_config.eos_token_id = eos
    cache = make_cache(llama, 3, prompts["attention_mask"])
    out = make_inferencer(model).decode(prompts["input_ids"], cache, NUM_NEW, GREEDY)
    is_eos = torch.isin(whole, torch.tensor(eos)).tolist()
    expected = [row.index(True) + 1 if True in row else NUM_NEW for row in is_eos]
    assert out.lens.tolist() == expected
    assert min(expected) < max(expected)
    assert out.token_ids.shape[1] == max(expected)
    for row, length in enumerate(expected):
        assert torch.equal(out.token_ids[row, :length], whole[row, :length])


def test_random_tokens_follow_the_models_law():
    model, prompt = make_law_model(8), torch.tensor([[3, 1, 6]])
    out = make_inferencer(model, 3).decode(prompt.expand(NUM_DRAWS, -1), make_cache(model, NUM_DRAWS), 2, RANDOM)
    counts = torch.bincount(out.token_ids[:, 0] * 8 + out.token_ids[:, 1], minlength=64)
    texts = torch.cat([prompt.expand(8, -1), torch.arange(8)[:, None]], dim=1)
    law = model(prompt).logits[0, -1].softmax(-1)[:, None] * model(texts).logits[:, -1].softmax(-1)  # [V, V]
    assert p_value(counts, law.flatten()) > PASS_P_VALUE
    assert p_value(counts, law.T.flatten()) < FAIL_P_VALUE
