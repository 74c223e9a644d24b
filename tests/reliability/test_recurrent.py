"""Calls with recurrent models leave no hooks, no memory and no trace of a failure, also side by side."""

import itertools
from functools import cache

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_speculate
from hf_speculate.models.language_model import cache_name
from tests.cases import assert_equal_ids, each_value
from tests.recurrent_cases import hooks_of, recurrent_states
from tests.reliability.faults import Mistake
from tests.reliability.test_threads import together
from tests.tiny import make_model, noisy_copy, ragged_prompts

K = 4


@cache
def target_of(kind: str) -> PreTrainedModel:
    return hf_speculate.enable(make_model(kind))


@cache
def draft_of(kind: str) -> PreTrainedModel:
    return noisy_copy(target_of(kind))


@each_value(error=[Mistake("on purpose"), KeyboardInterrupt("on purpose")], kind=["qwen3_5", "mamba2"])
def test_an_error_within_a_mixer_leaves_no_hook_and_the_cache_as_it_was(kind, error):
    target, prompt = target_of(kind), ragged_prompts(3, seed=3)
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    for kv_cache in caches:
        text = target.generate(**prompt, max_new_tokens=8, **{cache_name(target): kv_cache})
    before = recurrent_states(caches[0])
    ids = text[:, -1:] if cache_name(target) == "cache_params" else text
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    mixer = next(module for module in reversed(list(target.modules())) if hasattr(module, "conv1d"))
    calls = itertools.count()

    def fail(module, args, output):
        if next(calls) == 2 * K:  # in the second round, after some of its tokens
            raise error

    handle = mixer.norm.register_forward_hook(fail)
    drafts = {"assistant_model": draft_of(kind), "num_assistant_tokens": K}
    try:
        with pytest.raises(type(error)):
            target.generate(**inputs, **drafts, **{cache_name(target): caches[0]})
    finally:
        handle.remove()
    assert not hooks_of(target)
    for states, others in zip(before, recurrent_states(caches[0]), strict=True):
        assert all(torch.equal(states[slot], others[slot]) for slot in states)
    assert_equal_ids(*(target.generate(**inputs, **{cache_name(target): kv_cache}) for kv_cache in caches))


@pytest.mark.parametrize("kind", ["qwen3_5", "falcon_h1", "mamba"])
def test_calls_on_one_model_in_several_threads_give_their_own_texts(kind):
    target, draft = target_of(kind), draft_of(kind)

    def decode(seed: int, **drafts):
        return target.generate(**ragged_prompts(3, seed=seed), max_new_tokens=12, **drafts)

    expected = [decode(seed) for seed in range(3)]

    def job(seed: int, **drafts):
        def run(barrier):
            barrier.wait()
            return [decode(seed, **drafts) for _ in range(3)]

        return run

    drafts = {"assistant_model": draft, "num_assistant_tokens": K}
    found = together(job(0, **drafts), job(1, prompt_lookup_num_tokens=K), job(2))
    for plain, texts in zip(expected, found, strict=True):
        for text in texts:
            assert_equal_ids(plain, text)
    assert not hooks_of(target)
