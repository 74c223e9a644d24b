"""The tiny models are fit to test with: text varies, drafts are right sometimes."""

import pytest
import torch
from torch import Tensor

from tests.tiny import KINDS, make_model, noisy_copy, ragged_prompts

NUM_TOKENS = 24


def new_tokens(model, prompts: dict[str, Tensor]) -> Tensor:
    sequences = model.generate(**prompts, max_new_tokens=NUM_TOKENS)
    return sequences[:, prompts["input_ids"].shape[1] :]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_varies(kind: str) -> None:
    token_ids = new_tokens(make_model(kind), ragged_prompts(4))
    assert token_ids.shape == (4, NUM_TOKENS)
    assert len(set(token_ids.flatten().tolist())) >= 12
    assert all(len(set(row)) > 1 for row in token_ids.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_noisy_copy_is_right_sometimes(kind: str) -> None:
    model = make_model(kind)
    prompts = ragged_prompts(1, min_len=8)
    sequences = model.generate(**prompts, max_new_tokens=64)
    choices = noisy_copy(model)(sequences).logits[:, prompts["input_ids"].shape[1] - 1 : -1].argmax(-1)
    agreement = (choices == sequences[:, prompts["input_ids"].shape[1] :]).double().mean()
    assert 0.2 < agreement < 0.95
    assert torch.equal(noisy_copy(model, scale=0)(sequences).logits, model(sequences).logits)
