"""Masked tokens anywhere in a prompt, on the right too: the target reads what it reads in plain decoding."""

import pytest

import hf_speculate
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.tiny import noisy_copy, ragged_prompts
from tests.tiny_encoders import decoder_of, make_whisper

NUM_NEW = 20
WIDTH = 10


def masked(batch_size, place):
    """Prompts with masked tokens at their end, in their midst, or in all of one row."""
    inputs = ragged_prompts(batch_size, seed=4, min_len=6, max_len=WIDTH)
    mask = inputs["attention_mask"]
    if place == "end":
        mask[0, -3:] = 0
    elif place == "last":
        mask[:, -1] = 0
    elif place == "row":
        mask[1] = 0
    else:
        mask[:, -4] = 0
        mask[0, -3] = 0
    return inputs


@each_value(place=["end", "last", "midst", "row"], kind=["llama", "gpt2", "mistral_window", "bloom"])
@pytest.mark.parametrize("options", [{}, pytest.param({"prefill_chunk_size": 3}, marks=pytest.mark.slow)])
def test_text_equals_plain(kind, place, options):  # with chunks, a masked row reads its chunk alone
    stats = assert_decodes_as_plain(*pair(kind), masked(3, place), max_new_tokens=NUM_NEW, **options)
    assert stats.num_accepted > 0


def test_a_head_that_names_no_positions_counts_padding_as_in_plain_decoding():
    target = hf_speculate.enable(decoder_of(make_whisper()))
    inputs = ragged_prompts(3, seed=3, vocab_size=48)
    stats = assert_decodes_as_plain(target, noisy_copy(target), inputs, max_new_tokens=NUM_NEW)
    assert stats.num_accepted > 0
    assert stats.lock_step
