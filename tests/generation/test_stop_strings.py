"""Stop strings end the text where token-by-token decoding would have ended it."""

import pytest

from hf_speculate import SpeculationStats
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.tiny import noisy_copy, ragged_prompts
from tests.tiny_tokenizers import letters_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"  # one for each of the 64 ids


@pytest.fixture(scope="module")
def tokenizer():
    return letters_tokenizer(CHARACTERS)


@each_value(batch_size=[1, 3], num_assistant_tokens=[2, 8], eos_token_id=[None, 63])
def test_text_ends_where_plain_ends_it(tokenizer, batch_size, num_assistant_tokens, eos_token_id):
    target, draft = pair("llama")
    inputs = ragged_prompts(batch_size, seed=31)
    options = {"max_new_tokens": 24, "eos_token_id": eos_token_id, "pad_token_id": 0}
    text = target.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    stop = "".join(tokenizer.convert_ids_to_tokens(text[8:10].tolist()))  # spans two tokens
    options |= {"stop_strings": [stop], "tokenizer": tokenizer, "num_assistant_tokens": num_assistant_tokens}
    assert_decodes_as_plain(target, draft, inputs, **options)


def test_drafts_that_a_stop_cuts_off_did_not_stay(tokenizer):
    target, _ = pair("llama")
    inputs = ragged_prompts(1, seed=31)
    options = {"max_new_tokens": 24, "pad_token_id": 0, "tokenizer": tokenizer}
    new = target.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    stop = "".join(tokenizer.convert_ids_to_tokens(new[8:10].tolist()))
    stats = SpeculationStats()
    options |= {"stop_strings": [stop], "assistant_model": noisy_copy(target, 0.0), "num_assistant_tokens": 6}
    target.generate(**inputs, **options, speculation_stats=stats)
    # the prompt's token, a whole round of 6 drafts and a token of the target's, and 2 of the next 6 drafts
    assert (stats.num_emitted, stats.num_accepted, stats.num_verified, stats.num_rounds) == (9, 8, 8, 2)
