"""Compare recurrent states after rollbacks by row with the model's one-token forwards."""

import inspect
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_speculate.cache.layers import attention_layers
from hf_speculate.compat import CACHE_NAME
from hf_speculate.models.language_model import LanguageModel, cache_name
from hf_speculate.options.recurrent.kind import make_hybrid_cache, rollback_text
from hf_speculate.options.recurrent.states import States
from tests.support.recurrent_cases import (
    FLOAT32_TOLERANCE,
    TOLERANCE,
    error,
    hooks_of,
    recurrent_states,
)
from tests.support.tiny import make_model, ragged_prompts

KEEP_ALL, KEEP_NONE = 1 << 60, -1  # bytes available for the states after each token
IN_FLOAT64 = ("lfm2", "zaya")
FEW_FAMILIES = (
    "qwen3_5",
    "lfm2",
    "falcon_h1",
    "mamba",
    "zaya",
)  # gated delta rule, convolution, both in one layer, scan, tuple


@cache
def model_of(family: str) -> PreTrainedModel:
    return make_model(family)


def tolerance(family: str) -> float:
    return TOLERANCE if family in IN_FLOAT64 else FLOAT32_TOLERANCE


@torch.no_grad()
def step_by_step(
    family: str, prompt: dict[str, Tensor], token_ids: Tensor
) -> tuple[list[Tensor], list[list[States]]]:
    """Return the logits and states after each of `token_ids` [N], which all rows read.

    The rows have read their prompts before. The first states are the ones before the tokens.
    """
    model, mask = model_of(family), prompt["attention_mask"]
    kv_cache = DynamicCache(config=model.config)
    names = inspect.signature(type(model).forward).parameters
    logits, states = [], []
    for number, ids in enumerate(
        [prompt["input_ids"], *token_ids.expand(len(mask), -1).split(1, dim=1)]
    ):
        inputs = {"input_ids": ids, cache_name(model): kv_cache}
        if number:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        if not number or attention_layers(kv_cache.layers):
            inputs["attention_mask"] = mask
        if "position_ids" in names:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        logits.append(model(**inputs, use_cache=True).logits[:, -1])
        states.append(recurrent_states(kv_cache))
    return logits[1:], states


def test_states_over_their_memory_share_are_recomputed():
    model, cpu = model_of("qwen3_5"), torch.device("cpu")
    texts = [
        rollback_text(model, DynamicCache(config=model.config), num, cpu) for num in (5, 1 << 40)
    ]
    assert [text.split()[0] for text in texts] == ["keeps", "computes"]


def test_hooks_ignore_forwards_during_their_registration():
    """Run a forward while torch registers a hook, before the hook gets keyword arguments."""
    model, token = make_model("qwen3_5"), torch.tensor([[7]])
    kv_cache = make_hybrid_cache(
        model, DynamicCache(config=model.config), 1, None, torch.device("cpu")
    )
    language_model = LanguageModel(model)
    language_model.forward(token, kv_cache)
    kv_cache.begin_recording()
    language_model.forward(torch.tensor([[8, 9]]), kv_cache)  # this forward adds the hooks
    mixers = [module for module in model.modules() if hasattr(module, "conv1d")]
    assert all(module._forward_pre_hooks_with_kwargs for module in mixers)
    for module in mixers:
        module._forward_pre_hooks_with_kwargs.clear()
    logits = model(token, **{CACHE_NAME: DynamicCache(config=model.config)}, use_cache=True).logits
    kv_cache.release()
    assert torch.equal(logits, model(token).logits)


@pytest.mark.parametrize("max_kept_bytes", [KEEP_ALL, KEEP_NONE])
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_rows_roll_back_and_skip_tokens_they_hold(family, max_kept_bytes):
    """Feed all rows the same number of tokens, then drop more than since the last rollback."""
    prompt, text = (
        ragged_prompts(3, seed=3),
        torch.randint(1, 64, (16,), generator=torch.Generator().manual_seed(2)),
    )
    model, passed = LanguageModel(model_of(family)), DynamicCache(config=model_of(family).config)
    cpu, mask = torch.device("cpu"), prompt["attention_mask"]
    kv_cache = make_hybrid_cache(model.model, passed, 3, mask, cpu, max_kept_bytes)
    model.forward(prompt["input_ids"], kv_cache)
    for token_ids in text[:3]:
        model.forward(token_ids.expand(3, 1), kv_cache)
    lens = [3, 3, 3]
    for drops, num_query in (([0, 4, 2], 5), ([3, 6, 5], 6)):
        kv_cache.crop(drops)
        lens = [num - drop for num, drop in zip(lens, drops, strict=True)]
        assert kv_cache.num_real_tokens == (mask.sum(1) + torch.tensor(lens)).tolist()
        whole = [torch.cat([prompt["input_ids"][row], text]) for row in range(3)]
        first = [prompt["input_ids"].shape[1] + num for num in lens]
        query = torch.stack(
            [ids[start : start + num_query] for ids, start in zip(whole, first, strict=True)]
        )
        logits = model.forward(query, kv_cache)
        lens = [num + num_query for num in lens]
        plain_logits, plain_states = step_by_step(family, prompt, text[: max(lens)])
        for row, num in enumerate(lens):
            assert error(logits[row, -1], plain_logits[num - 1][row]) <= tolerance(family)
            for states, others in zip(
                recurrent_states(kv_cache.cache), plain_states[num], strict=True
            ):
                assert states.keys() == others.keys()
                assert all(
                    error(states[slot][row], expected[row]) <= tolerance(family)
                    for slot, expected in others.items()
                )
    kv_cache.release()
    assert not hooks_of(model_of(family))


@pytest.mark.parametrize("family", ["jamba", "mamba", "zamba2"])
def test_draft_model_continues_from_earlier_states(family):
    model, ids = model_of(family), torch.arange(1, 12)[None]
    logits = []
    for sizes in ((5, 6), (5, 1, 1, 1, 1, 1, 1)):
        kv_cache = make_hybrid_cache(model, None, 1, None, torch.device("cpu"))
        language_model = LanguageModel(model)
        logits.append(
            [language_model.forward(chunk, kv_cache) for chunk in ids.split(sizes, dim=1)][-1][
                :, -1
            ]
        )
        kv_cache.release()
    assert error(*logits) <= FLOAT32_TOLERANCE
