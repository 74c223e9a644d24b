"""The tiny models are fit to test with: text varies, drafts are right sometimes, padding changes nothing."""

import pytest
import torch
from torch import Tensor

from tests.tiny import KINDS, make_law_model, make_model, noisy_copy, ragged_prompts

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


def test_models_are_repeatable_and_leave_the_global_generator() -> None:
    state = torch.random.get_rng_state()
    first, second = make_model("llama", seed=5), make_model("llama", seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_sharpness_orders_the_entropy_of_a_law_model() -> None:
    token_ids = torch.arange(8)[:, None]

    def entropy(sharpness: float) -> float:
        log_probs = make_law_model(sharpness=sharpness)(token_ids).logits[:, -1].log_softmax(-1)
        return float(-(log_probs.exp() * log_probs).sum(-1).mean())

    flat, medium, sharp = entropy(0.0), entropy(1.0), entropy(4.0)
    assert flat == pytest.approx(torch.tensor(8.0).log().item())
    assert flat > medium + 0.2 > sharp + 0.4


def test_ragged_prompts_are_left_padded() -> None:
    prompts = ragged_prompts(8, min_len=2, max_len=9, vocab_size=4, pad_token_id=2)
    mask = prompts["attention_mask"]
    assert mask.shape == (8, 9)
    assert {int(length) for length in mask.sum(1)} >= {2, 9}
    assert torch.equal(mask, mask.cummax(1).values)
    assert torch.equal(prompts["input_ids"] == 2, mask == 0)
    assert prompts["input_ids"].max() < 4
