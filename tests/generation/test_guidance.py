"""Options of `generate()` that steer a text, processors with state among them, act with an assistant as in plain."""

from typing import Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import Streamed, assert_decodes_as_plain, assert_equal_ids, pair, plain_and_ours
from tests.generation.test_options import SCORE_TOLERANCE
from tests.tiny import make_law_model, make_model, noisy_copy, ragged_prompts
from tests.tiny_tokenizers import byte_level_tokenizer

K = 4
NUM_NEW = 16
VOCAB_SIZE = 64


def allow_by_last_id(batch_id: int, ids: torch.Tensor) -> list[int]:
    """A user's function that knows rows by their place: every third id, from another one on in each row."""
    return [token_id for token_id in range(1, VOCAB_SIZE) if (token_id + batch_id + int(ids[-1])) % 3 == 0]


STEERED: dict[str, dict[str, Any]] = {
    "guidance_scale": {"guidance_scale": 1.8},
    "guidance_scale below 1": {"guidance_scale": 0.4},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "watermarking of the left": {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=2)},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 14, 15, 92, 65], ngram_len=3)},
    "synthid, late": {
        "watermarking_config": SynthIDTextWatermarkingConfig(
            keys=[3, 14, 15], ngram_len=4, context_history_size=2, skip_first_ngram_calls=True
        )
    },
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allow_by_last_id},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "sequence_bias": {"sequence_bias": {(3,): 4.0, (4, 5): -3.0, (17, 18, 19): 2.5}},
    "renormalize_logits": {"renormalize_logits": True, "sequence_bias": {(3,): 4.0}},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 1.3)},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, 60))},
    "forced_eos_token_id": {"forced_eos_token_id": 9, "eos_token_id": 9},
}
IN_LOCK_STEP = (
    "guidance_scale",
    "guidance_scale below 1",
    "synthid",
    "synthid, late",
    "prefix_allowed_tokens_fn",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
)


@pytest.fixture(scope="module")
def models():
    """The smallest pair there is; its query heads share a key-value head."""
    target = hf_speculate.enable(make_law_model(VOCAB_SIZE, seed=0))
    return target, noisy_copy(target, 0.1)


@pytest.mark.parametrize("name", STEERED)
def test_greedy_text_and_scores_are_those_of_plain(models, name):
    batch_size, (target, draft) = 3, models
    inputs = ragged_prompts(batch_size, seed=15)
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    unsteered = target.generate(**inputs, **options)
    options["eos_token_id"] = int(unsteered.sequences[-1, -NUM_NEW // 2])
    options |= STEERED[name]
    plain, ours = plain_and_ours(target, draft, inputs, **options, num_assistant_tokens=K, speculation_stats=stats)
    assert_equal_ids(plain.sequences, ours.sequences)
    steps = zip(plain.scores, unsteered.scores, strict=False)
    assert not all(torch.equal(one.float(), other) for one, other in steps)  # the option does something
    assert stats.lock_step == (name in IN_LOCK_STEP)
    assert len(plain.scores) == len(ours.scores)
    is_live = torch.ones(batch_size, dtype=torch.bool)
    for position, (one, other) in enumerate(zip(plain.scores, ours.scores, strict=True)):
        # guidance over a float64 model gives float64 scores
        assert torch.allclose(one[is_live].float(), other[is_live], rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE)
        token_ids = ours.sequences[:, inputs["input_ids"].shape[1] + position]
        is_live &= token_ids != options["eos_token_id"]


def negative_prompts(batch_size: int) -> dict[str, torch.Tensor]:
    prompts = ragged_prompts(batch_size, seed=17, max_len=6)
    return {"negative_prompt_ids": prompts["input_ids"], "negative_prompt_attention_mask": prompts["attention_mask"]}


@pytest.fixture
def guided(monkeypatch):
    """What every guidance processor is shown, and what its own forward gives, call by call."""
    seen, forward = [], UnbatchedClassifierFreeGuidanceLogitsProcessor.get_unconditional_logits

    def watched(self, input_ids):
        logits = forward(self, input_ids)
        seen.append((input_ids.tolist(), logits[:, -1].clone()))
        return logits

    monkeypatch.setattr(UnbatchedClassifierFreeGuidanceLogitsProcessor, "get_unconditional_logits", watched)
    return seen


@pytest.mark.parametrize(("kind", "batch_size"), [("llama", 3), ("gpt2", 1)])
def test_guidance_runs_the_model_on_what_plain_shows_it(guided, kind, batch_size):
    """Query heads that share key-value heads attend by our function meanwhile, the guidance's own forwards too."""
    target, draft = pair(kind)
    inputs = ragged_prompts(batch_size, seed=18)
    options = {"guidance_scale": 1.8, "max_new_tokens": NUM_NEW, **negative_prompts(batch_size)}
    plain = target.generate(**inputs, **options)
    num_calls = len(guided)
    ours = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=K)
    assert_equal_ids(plain, ours)
    assert num_calls == NUM_NEW == len(guided) - num_calls
    for (ids, logits), (other_ids, other_logits) in zip(guided[:num_calls], guided[num_calls:], strict=True):
        assert ids == other_ids
        assert torch.allclose(logits, other_logits, rtol=0, atol=1e-9)  # float64, attention grouped otherwise


def test_guidance_runs_in_inference_mode_and_over_a_passed_cache():
    target, draft = pair("llama")
    inputs, texts = ragged_prompts(1, seed=19), []
    options = {"guidance_scale": 1.8, "max_new_tokens": 12}
    for own in ({}, {"assistant_model": draft, "num_assistant_tokens": K}):
        with torch.inference_mode():
            first = target.generate(**inputs, **negative_prompts(1), **own, **options, return_dict_in_generate=True)
            longer = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
            texts.append(target.generate(longer, **own, **options, past_key_values=first.past_key_values))
    assert_equal_ids(*texts)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_users_function_of_allowed_tokens_is_called_row_by_row_as_in_plain(batch_size):
    """So it may count its calls, or know a row by its number."""
    target, draft = pair("llama")
    inputs = ragged_prompts(batch_size, seed=20)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": [7, 8, 9], "pad_token_id": 0}
    calls, texts = [], []
    for assistant in ({}, {"assistant_model": draft, "num_assistant_tokens": K}):
        seen = []

        def allow(batch_id, ids, seen=seen):
            seen.append((batch_id, ids.tolist()))
            return [*allow_by_last_id(batch_id, ids), 7 + len(seen) % 3]

        texts.append(target.generate(**inputs, **options, **assistant, prefix_allowed_tokens_fn=allow))
        calls.append(seen)
    assert_equal_ids(*texts)
    assert calls[0] == calls[1]


@pytest.mark.parametrize(("value", "batch_size"), [(torch.nan, 3), (torch.inf, 1), (-torch.inf, 3)])
def test_invalid_values_are_removed(batch_size, value):
    target, inputs = hf_speculate.enable(make_model("llama")), ragged_prompts(batch_size, seed=21)
    draft = noisy_copy(target, 0.05)
    options = {"remove_invalid_values": True, "max_new_tokens": NUM_NEW, "repetition_penalty": 1.2}
    clean = target.generate(**inputs, **options)
    target.get_output_embeddings().weight[clean[-1, -3]] = value  # gives NaN, or infinities of either sign
    assert_decodes_as_plain(target, draft, inputs, **options)
    assert not torch.equal(target.generate(**inputs, **options), clean)


@pytest.fixture(scope="module")
def healed():
    """A tokenizer in which words begin with others, and models of its size."""
    words = ["http", "https", "https:", "hell", "hello", "help", " se", " see", " the", " their"]
    tokenizer = byte_level_tokenizer(words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    target = make_law_model(len(tokenizer), seed=6)
    target.generation_config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, hf_speculate.enable(target), noisy_copy(target, 0.1)


HEALED_PROMPTS = {
    "one row": ["go to http"],
    "rows": ["go to http", "say hell", "I see the"],
    "nothing to heal": ["x y z"],
    "trailing space": ["go to http "],
}


@pytest.mark.parametrize("name", HEALED_PROMPTS)
def test_a_healed_prompt_is_that_of_plain(healed, name):
    tokenizer, target, draft = healed
    inputs = dict(tokenizer(HEALED_PROMPTS[name], return_tensors="pt", padding=True))
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 12, "num_assistant_tokens": 3}
    assert_decodes_as_plain(target, draft, inputs, **options)
    assert_decodes_as_plain(target, None, inputs, **options, prompt_lookup_num_tokens=3)
    if name in ("one row", "rows"):
        prompt = target.generate(**inputs, **options)[:, : inputs["input_ids"].shape[1]]
        assert not torch.equal(prompt, inputs["input_ids"])


def test_a_streamer_is_given_the_healed_prompt(healed):
    tokenizer, target, draft = healed
    inputs, streamed = dict(tokenizer(["go to http"], return_tensors="pt")), Streamed()
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 8, "streamer": streamed}
    ids = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=3)
    assert streamed.ids == ids[0].tolist()


def test_healing_asks_for_an_enabled_model(healed):
    tokenizer, target, draft = healed
    inputs = dict(tokenizer(["go to http"], return_tensors="pt"))
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 8}
    plain_model = make_law_model(len(tokenizer), seed=6)
    with pytest.raises(UnsupportedGenerationError, match="token_healing must be left out for a model that is not"):
        hf_speculate.generate(plain_model, **inputs, **options, assistant_model=draft)
    beforehand = plain_model.heal_tokens(inputs["input_ids"], tokenizer)
    ids = hf_speculate.generate(plain_model, beforehand, max_new_tokens=8, assistant_model=draft)
    assert_equal_ids(target.generate(**inputs, **options), ids)
