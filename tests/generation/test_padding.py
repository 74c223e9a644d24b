"""Masked tokens anywhere in a prompt, on the right too: the target reads what it reads in plain decoding."""

import hf_speculate
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.tiny import noisy_copy, ragged_prompts
from tests.tiny_encoders import decoder_of, make_whisper

NUM_NEW = 20


@each_value(kind=["llama", "gpt2", "mistral_window", "bloom"], chunk_size=[None, 3])
def test_a_row_may_be_masked_as_a_whole(kind, chunk_size):
    """The rows of `tests/pairs.json` mask tokens on either side and in the midst."""
    inputs = ragged_prompts(3, seed=4, min_len=6, max_len=10)
    inputs["attention_mask"][1] = 0
    stats = assert_decodes_as_plain(*pair(kind), inputs, max_new_tokens=NUM_NEW, prefill_chunk_size=chunk_size)
    assert stats.num_accepted > 0


def test_a_head_that_names_no_positions_counts_padding_as_in_plain_decoding():
    target = hf_speculate.enable(decoder_of(make_whisper()))
    inputs = ragged_prompts(3, seed=3, vocab_size=48)
    stats = assert_decodes_as_plain(target, noisy_copy(target), inputs, max_new_tokens=NUM_NEW)
    assert stats.num_accepted > 0
    assert stats.lock_step
