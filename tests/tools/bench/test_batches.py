"""Batches hold prompts of one category, each of them once."""

import pytest
import torch

from hf_speculate.tools.bench.batches import make_batches, take_in_turn
from tests.tiny_tokenizers import byte_level_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def tokenizer():
    return byte_level_tokenizer([], eos_token="<end>", pad_token="<pad>")


def ids_of(texts, tokenizer):
    return tokenizer(texts)["input_ids"]


def test_categories_take_turns():
    items, categories = ["a1", "a2", "a3", "b1", "c1", "c2"], ["a", "a", "a", "b", "c", "c"]
    assert take_in_turn(items, categories, 4) == ["a1", "b1", "c1", "a2"]
    assert sorted(take_in_turn(items, categories, None)) == sorted(items)
    assert take_in_turn(items, [""] * 6, 3) == items[:3]


def test_a_batch_has_one_category_and_pads_on_the_left(tokenizer):
    texts, categories = ["aa", "x", "a", "aaa", "xx"], ["a", "x", "a", "a", "x"]
    batches = make_batches(ids_of(texts, tokenizer), categories, tokenizer.pad_token_id, 2, CPU)
    assert [batch.category for batch in batches] == ["a", "x", "a"]
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert [len(batch.input_ids) for batch in batches] == [2, 2, 1]
    assert batches[0].attention_mask.tolist() == [[1, 1], [0, 1]]
    assert [tokenizer.decode(row) for row in batches[0].rows] == ["aa", "a"]
    assert batches[0].input_ids[1, 0] == tokenizer.pad_token_id


def test_what_is_left_over_is_decoded_together(tokenizer):
    texts, categories = ["aa", "x", "a", "y", "z"], ["a", "x", "a", "y", "z"]
    batches = make_batches(ids_of(texts, tokenizer), categories, tokenizer.pad_token_id, 2, CPU)
    assert [batch.category for batch in batches] == ["a", "", "z"]
    assert [[tokenizer.decode(row) for row in batch.rows] for batch in batches] == [["aa", "a"], ["x", "y"], ["z"]]
