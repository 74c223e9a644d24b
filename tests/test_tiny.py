"""The tiny models are fit to test with: text varies, drafts are right sometimes."""

import pytest
import torch

from tests.tiny import KINDS, make_model, noisy_copy, ragged_prompts


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_varies_and_a_noisy_copy_is_right_sometimes(kind: str) -> None:
    model, prompts = make_model(kind), ragged_prompts(4)
    sequences = model.generate(**prompts, max_new_tokens=24)
    token_ids = sequences[:, prompts["input_ids"].shape[1] :]
    assert len(token_ids.unique()) >= 12
    assert all(len(row.unique()) > 1 for row in token_ids)
    inputs = {"input_ids": sequences, "attention_mask": (sequences.cumsum(1) > 0).long()}
    exact, choices = noisy_copy(model, scale=0)(**inputs).logits, noisy_copy(model)(**inputs).logits.argmax(-1)
    assert torch.equal(exact, model(**inputs).logits)
    assert 0.2 < (choices[:, -25:-1] == token_ids).double().mean() < 0.95
