"""Options of `generate()` that steer a text, processors with state among them, act with an assistant as in plain."""

from typing import Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import Streamed, assert_decodes_as_plain, assert_equal_ids, plain_and_ours
from tests.generation.test_options import SCORE_TOLERANCE
from tests.tiny import make_law_model, noisy_copy, ragged_prompts
from tests.tiny_tokenizers import byte_level_tokenizer

K = 4
NUM_NEW = 16
VOCAB_SIZE = 64


# What the table of `tests/compatibility_rows.py` leaves out, and whether rows move in lock step.
STEERED: dict[str, tuple[bool, dict[str, Any]]] = {
    "guidance": (True, {"guidance_scale": 0.4}),
    "watermarking of the left": (False, {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=2)}),
    "synthid, late": (
        True,
        {
            "watermarking_config": SynthIDTextWatermarkingConfig(
                keys=[3, 14, 15], ngram_len=4, context_history_size=2, skip_first_ngram_calls=True
            )
        },
    ),
    "sequence_bias": (False, {"sequence_bias": {(3,): 4.0, (4, 5): -3.0, (17, 18, 19): 2.5}}),
}


@pytest.fixture(scope="module")
def models():
    """The smallest pair there is; its query heads share a key-value head."""
    target = hf_speculate.enable(make_law_model(VOCAB_SIZE, seed=0))
    return target, noisy_copy(target, 0.1)


@pytest.mark.parametrize("name", STEERED)
def test_greedy_text_and_scores_are_those_of_plain(models, name):
    (target, draft), (is_lock_step, steering), inputs = models, STEERED[name], ragged_prompts(3, seed=15)
    options = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    unsteered = target.generate(**inputs, **options)
    options |= {"eos_token_id": int(unsteered.sequences[-1, -NUM_NEW // 2]), **steering}
    plain, ours = plain_and_ours(target, draft, inputs, **options, num_assistant_tokens=K)
    assert_equal_ids(plain.sequences, ours.sequences)
    steps = zip(plain.scores, unsteered.scores, strict=False)
    assert not all(torch.equal(one.float(), other) for one, other in steps)  # the option does something
    assert ours.speculation.lock_step == is_lock_step
    is_live = torch.ones(3, dtype=torch.bool)
    for position, (one, other) in enumerate(zip(plain.scores, ours.scores, strict=True)):
        # guidance over a float64 model gives float64 scores
        assert torch.allclose(one[is_live].float(), other[is_live], rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE)
        is_live &= ours.sequences[:, inputs["input_ids"].shape[1] + position] != options["eos_token_id"]


@pytest.fixture(scope="module")
def healed():
    """A tokenizer in which words begin with others, and models of its size."""
    words = ["http", "https", "https:", "hell", "hello", "help", " se", " see", " the", " their"]
    tokenizer = byte_level_tokenizer(words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    target = make_law_model(len(tokenizer), seed=6)
    target.generation_config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, hf_speculate.enable(target), noisy_copy(target, 0.1)


@pytest.mark.parametrize(
    ("prompts", "is_healed"),
    [(["go to http", "say hell", "I see the"], True), (["x y z"], False), (["go to http "], None)],
)
def test_a_healed_prompt_is_that_of_plain(healed, prompts, is_healed):
    tokenizer, target, draft = healed
    inputs = dict(tokenizer(prompts, return_tensors="pt", padding=True))
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 12, "num_assistant_tokens": 3}
    assert_decodes_as_plain(target, draft, inputs, **options)
    assert_decodes_as_plain(target, None, inputs, **options, prompt_lookup_num_tokens=3)
    prompt = target.generate(**inputs, **options)[:, : inputs["input_ids"].shape[1]]
    assert is_healed is None or torch.equal(prompt, inputs["input_ids"]) != is_healed


def test_healing_asks_for_an_enabled_model_and_streams_what_it_healed(healed):
    tokenizer, target, draft = healed
    inputs, streamed = dict(tokenizer(["go to http"], return_tensors="pt")), Streamed()
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 8, "assistant_model": draft}
    ids = target.generate(**inputs, **options, streamer=streamed)
    assert streamed.ids == ids[0].tolist()
    with pytest.raises(UnsupportedGenerationError, match="token_healing must be left out for a model that is not"):
        hf_speculate.generate(make_law_model(len(tokenizer), seed=6), **inputs, **options)
