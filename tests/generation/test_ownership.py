"""What is the user's stays the user's: caches advance as in plain `generate`, and failed calls leave no trace."""

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from tests.cases import assert_equal_ids, pair
from tests.tiny import SLIDING_WINDOW

K = 4
STATE_TOLERANCE = 1e-9  # float64 round-off between a forward of one token and one of several


@torch.no_grad()
def prefilled(target, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> DynamicCache:
    positions = None if attention_mask is None else (attention_mask.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=target.config)
    target(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, past_key_values=cache)
    return cache


def cache_contents(cache: DynamicCache) -> list[tuple]:
    return [
        (layer.keys.clone(), layer.values.clone(), layer.get_seq_length(), getattr(layer, "record_past", None))
        for layer in cache.layers
    ]


def assert_same_contents(one: list[tuple], other: list[tuple], tolerance: float = 0.0) -> None:
    assert len(one) == len(other)
    for (keys, values, *rest), (other_keys, other_values, *other_rest) in zip(one, other, strict=True):
        assert rest == other_rest
        assert torch.allclose(keys, other_keys, atol=tolerance, rtol=0)
        assert torch.allclose(values, other_values, atol=tolerance, rtol=0)


@pytest.mark.parametrize("cache_kind", ["dynamic", "preallocated"])
@pytest.mark.parametrize(("kind", "num_held"), [("llama", 3), ("mistral_window", 2 * SLIDING_WINDOW), ("gemma2", 0)])
def test_a_passed_cache_advances_in_place_as_in_plain(kind, num_held, cache_kind):
    target, draft = pair(kind)
    ids = torch.randint(1, 64, (1, 2 * SLIDING_WINDOW + 4), generator=torch.Generator().manual_seed(1))
    caches, texts = [], []
    for own in ({}, {"assistant_model": draft, "num_assistant_tokens": K, "speculation_cache": cache_kind}):
        caches.append(prefilled(target, ids[:, :num_held]) if num_held else DynamicCache(config=target.config))
        texts.append(target.generate(ids, past_key_values=caches[-1], max_new_tokens=15, **own))
    assert_equal_ids(*texts)
    assert_same_contents(*map(cache_contents, caches), 1e-4 if kind == "gemma2" else STATE_TOLERANCE)


@pytest.mark.parametrize("cache_kind", ["dynamic", "preallocated"])
def test_a_second_chat_turn_may_leave_out_what_the_cache_holds(cache_kind):
    target, draft = pair("mistral_window")
    texts = []
    for own in ({}, {"assistant_model": draft, "num_assistant_tokens": K, "speculation_cache": cache_kind}):
        cache = DynamicCache(config=target.config)
        options = {"past_key_values": cache, "max_new_tokens": 9, **own}
        first = target.generate(torch.tensor([[5, 6, 7]]), **options)
        text = torch.cat([first, torch.tensor([[8, 9]])], dim=1)
        new, mask = text[:, cache.get_seq_length() :], torch.ones_like(text)
        texts.append(target.generate(new, attention_mask=mask, **options))
    assert_equal_ids(*texts)


class Failing:
    """Raises at its n-th call."""

    def __init__(self, at: int, error: type[BaseException]):
        self.at, self.error, self.calls = at, error, 0

    def tick(self):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("on purpose")


class FailingCriterion(Failing, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class FailingStreamer(Failing):
    def put(self, value):
        self.tick()

    def end(self):
        pass
