"""Prefill and token-by-token decoding of one model, against its own plain `generate`."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.models.inferencer import Choice, Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.types import SampleStrategy
from tests.tiny import KINDS, SLIDING_WINDOW, make_law_model, make_model, ragged_prompts
from tests.triton_kernels.distributions import FAIL_P_VALUE, PASS_P_VALUE, p_value

GREEDY, RANDOM = SampleStrategy.GREEDY, SampleStrategy.RANDOM
VOCAB_SIZE = 64
NUM_NEW = SLIDING_WINDOW + 4
NUM_DRAWS = 20_000
LOGIT_TOLERANCE = 1e-9  # float64 round-off of attention over masked columns; wrong states differ by 1e-2 and more


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


def test_prefill_gives_the_next_token_and_the_logits_of_all_positions(llama, prompts):
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    cache = make_cache(llama, 3, mask)
    out = make_inferencer(llama).prefill(ids, cache, GREEDY)
    assert out.token_ids.shape == (3, 1)
    assert out.token_ids.dtype == torch.int64
    assert out.token_logits.shape == (*ids.shape, VOCAB_SIZE)
    for row in range(3):
        real = mask[row].bool()
        expected = llama(ids[row, real][None]).logits[0]
        assert torch.allclose(out.token_logits[row, real], expected, atol=LOGIT_TOLERANCE, rtol=0)
    assert torch.equal(out.token_ids, llama.generate(**prompts, max_new_tokens=1)[:, -1:])
    assert torch.equal(cache.get_lens(), mask.sum(1))


def test_prefill_keeps_as_many_logits_as_it_is_told(llama, prompts):
    made = [make_cache(llama, 3, prompts["attention_mask"]) for _ in range(2)]
    inferencer = make_inferencer(llama)
    whole = inferencer.prefill(prompts["input_ids"], made[0], GREEDY)
    last = inferencer.prefill(prompts["input_ids"], made[1], GREEDY, logits_to_keep=2)
    assert last.token_logits.shape == (3, 2, VOCAB_SIZE)
    assert torch.allclose(last.token_logits, whole.token_logits[:, -2:], atol=LOGIT_TOLERANCE, rtol=0)
    assert torch.equal(last.token_ids, whole.token_ids)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_an_empty_query_is_refused(llama, stage):
    empty, cache, inferencer = torch.zeros(2, 0, dtype=torch.int64), make_cache(llama, 2), make_inferencer(llama)
    with pytest.raises(ShapeError, match=r"query_token_ids must be \[B, Q\] with Q >= 1, got \[2, 0\]"):
        inferencer.prefill(empty, cache, GREEDY) if stage == "prefill" else inferencer.decode(empty, cache, 1, GREEDY)


@pytest.mark.parametrize("max_new_tokens", [0, -3])
def test_fewer_than_one_new_token_is_refused(llama, max_new_tokens):
    with pytest.raises(ConfigError, match=f"max_new_tokens must be at least 1, got {max_new_tokens}"):
        make_inferencer(llama).decode(torch.ones(1, 2, dtype=torch.int64), make_cache(llama, 1), max_new_tokens, GREEDY)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_equals_plain_generate(kind, prompts):
    model = make_model(kind)
    cache = make_cache(model, 3, prompts["attention_mask"])
    out = make_inferencer(model).decode(prompts["input_ids"], cache, NUM_NEW, GREEDY)
    assert torch.equal(out.token_ids, model.generate(**prompts, max_new_tokens=NUM_NEW)[:, -NUM_NEW:])
    assert out.lens.tolist() == [NUM_NEW] * 3
    assert out.lens.dtype == torch.int32


def test_decode_returns_the_logits_that_each_token_was_chosen_from(llama, prompts):
    cache = make_cache(llama, 3, prompts["attention_mask"])
    out = make_inferencer(llama).decode(prompts["input_ids"], cache, 4, GREEDY)
    assert out.token_logits.shape == (3, 4, VOCAB_SIZE)
    for row in range(3):
        real = prompts["input_ids"][row, prompts["attention_mask"][row].bool()]
        expected = llama(torch.cat([real, out.token_ids[row, :-1]])[None]).logits[0, -4:]
        assert torch.allclose(out.token_logits[row], expected, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("max_new_tokens", [1, 4])
def test_the_last_decoded_token_is_not_fed(llama, prompts, max_new_tokens):
    cache = make_cache(llama, 3, prompts["attention_mask"])
    make_inferencer(llama).decode(prompts["input_ids"], cache, max_new_tokens, GREEDY)
    assert torch.equal(cache.get_lens(), prompts["attention_mask"].sum(1) + max_new_tokens - 1)


def eos_model(eos: int | list[int]) -> PreTrainedModel:
    model = make_model("llama")
    model.generation_config.eos_token_id = eos
    return model


@pytest.mark.parametrize("as_list", [False, True])
def test_a_row_counts_its_tokens_up_to_and_with_its_eos(llama, prompts, as_list):
    whole = llama.generate(**prompts, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    eos = [int(whole[0, 3]), int(whole[1, 7])] if as_list else int(whole[0, 3])
    out = make_inferencer(eos_model(eos)).decode(
        prompts["input_ids"], make_cache(llama, 3, prompts["attention_mask"]), NUM_NEW, GREEDY
    )
    is_eos = torch.isin(whole, torch.tensor(eos)).tolist()
    expected = [row.index(True) + 1 if True in row else NUM_NEW for row in is_eos]
    assert out.lens.tolist() == expected
    assert min(expected) < max(expected)
    assert out.token_ids.shape[1] == max(expected)
    for row, length in enumerate(expected):
        assert torch.equal(out.token_ids[row, :length], whole[row, :length])


def test_decoding_ends_once_every_row_has_met_its_eos(llama, prompts):
    whole = llama.generate(**prompts, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    cache = make_cache(llama, 3, prompts["attention_mask"])
    out = make_inferencer(eos_model(whole[:, 2].tolist())).decode(prompts["input_ids"], cache, NUM_NEW, GREEDY)
    assert out.token_ids.shape[1] == out.lens.max() <= 3
    assert torch.equal(cache.get_lens(), prompts["attention_mask"].sum(1) + out.token_ids.shape[1] - 1)


def test_random_decoding_repeats_by_its_generator_and_leaves_torchs_alone(llama, prompts):
    before, texts = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        cache = make_cache(llama, 3, prompts["attention_mask"])
        texts.append(make_inferencer(llama, seed).decode(prompts["input_ids"], cache, NUM_NEW, RANDOM).token_ids)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_one_generator_moves_on_from_call_to_call(llama):
    inferencer, ids = make_inferencer(llama, 1), torch.tensor([[5, 6, 7]]).expand(16, -1)
    first, second = (inferencer.prefill(ids, make_cache(llama, 16), RANDOM).token_ids for _ in range(2))
    assert not torch.equal(first, second)


def test_random_tokens_follow_the_models_law():
    model, prompt = make_law_model(8), torch.tensor([[3, 1, 6]])
    out = make_inferencer(model, 3).decode(prompt.expand(NUM_DRAWS, -1), make_cache(model, NUM_DRAWS), 2, RANDOM)
    counts = torch.bincount(out.token_ids[:, 0] * 8 + out.token_ids[:, 1], minlength=64)
    texts = torch.cat([prompt.expand(8, -1), torch.arange(8)[:, None]], dim=1)
    law = model(prompt).logits[0, -1].softmax(-1)[:, None] * model(texts).logits[:, -1].softmax(-1)  # [V, V]
    assert p_value(counts, law.flatten()) > PASS_P_VALUE
    assert p_value(counts, law.T.flatten()) < FAIL_P_VALUE


def test_the_callers_own_choice_replaces_strategy_and_eos(prompts):
    model, steps = eos_model([9, 12]), []

    def choose(logits, step):
        steps.append(step)
        return Choice(torch.full((len(logits),), 9 + step), None, torch.tensor([step >= 1, step >= 2, False]))

    out = make_inferencer(model).decode(
        prompts["input_ids"], make_cache(model, 3, prompts["attention_mask"]), 4, RANDOM, choose=choose
    )
    assert out.token_ids.tolist() == [[9, 10, 11, 12]] * 3
    assert out.lens.tolist() == [2, 3, 4]
    assert out.token_logits is None
    assert steps == [0, 1, 2, 3]
