"""A batch whose rows end apart leaves the cache of plain `generate`: every row as long, padding included."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hf_speculate
from tests.cases import ACCEPTED_ALL, Unchanged, assert_equal_ids, each_value, pair
from tests.draft.test_custom import watched
from tests.generation.test_compiled import compile_config, small_pair
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.generation.test_ownership import STATE_TOLERANCE, assert_same_contents, cache_contents, prefilled
from tests.reliability.faults import Fault, Mistake, hook
from tests.tiny import make_model, noisy_copy, ragged_prompts

K = 4
NUM_NEW = 24
BATCH_SIZE = 4
PAD = 2  # not the id of the padding before the prompts: plain `generate` feeds it like any other token
FLOAT32_TOLERANCE = 1e-4  # attention of Gemma 2 and Bloom takes its softmax in float32, whatever the dtype
SAID = torch.tensor([[9, 8], [7, 6], [5, 4], [3, 11]])
DRAFTS: dict[str, dict[str, Any]] = {
    "model": {"num_assistant_tokens": K},
    "long drafts": {"num_assistant_tokens": 2 * NUM_NEW},
    "adaptive": {"num_assistant_tokens_schedule": "adaptive"},
    "hybrid": {"prompt_lookup_num_tokens": K},
    "copying": {"prompt_lookup_num_tokens": K, "assistant_model": None},
    "chunked": {"num_assistant_tokens": K, "prefill_chunk_size": 3},
    "lock step": {"num_assistant_tokens": K, "logits_processor": [Unchanged()]},
}


def prompts() -> dict[str, Tensor]:
    return ragged_prompts(BATCH_SIZE, seed=12, min_len=3, max_len=11)


@cache
def ends(kind: str) -> tuple[int, ...]:
    """Ids in the plain texts that end rows one after the other."""
    target, _ = pair(kind)
    inputs = prompts()
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, inputs["input_ids"].shape[1] :]
    return tuple(int(text[row, 3 + 5 * row]) for row in range(BATCH_SIZE - 1))


def num_lacking(text: Tensor, eos: tuple[int, ...]) -> list[int]:
    """[B] how much earlier than the longest row each one ends."""
    is_end = torch.isin(text, torch.tensor(eos))  # [B, N]
    last = torch.where(is_end.any(1), is_end.int().argmax(1), text.shape[1] - 1)
    return (last.max() - last).tolist()


def assert_same_caches(kind: str, models: Any = None, tolerance: float = STATE_TOLERANCE, **own: Any) -> None:
    """One call of a batch twice, plainly and with the draft: text and passed cache."""
    target, draft = models or pair(kind)
    inputs, eos = prompts(), ends(kind)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(eos), "pad_token_id": PAD}
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    plain = target.generate(**inputs, **options, past_key_values=caches[0])
    ours = target.generate(**inputs, **options, past_key_values=caches[1], **{"assistant_model": draft, **own})
    assert_equal_ids(plain, ours)
    assert max(num_lacking(plain[:, inputs["input_ids"].shape[1] :], eos)) > K  # or nothing is shown
    assert_same_contents(*(cache_contents(one) for one in caches), tolerance)


@pytest.mark.parametrize(
    ("kind", "cache_kind", "drafts"),
    [
        *(("llama", "preallocated", drafts) for drafts in DRAFTS),
        *(("mistral_window", "dynamic", drafts) for drafts in DRAFTS),
        ("llama", "dynamic", "model"),
        ("mistral_window", "preallocated", "model"),
        ("gpt2", "preallocated", "model"),
    ],
)
def test_rows_that_end_apart_leave_the_cache_of_plain(kind, cache_kind, drafts):
    assert_same_caches(kind, speculation_cache=cache_kind, **DRAFTS[drafts])


@pytest.mark.parametrize(("kind", "cache_kind"), [("gemma2", "preallocated"), ("bloom", "dynamic")])
def test_models_that_round_leave_the_cache_of_plain(kind, cache_kind):
    assert_same_caches(kind, tolerance=FLOAT32_TOLERANCE, speculation_cache=cache_kind, **DRAFTS["model"])


def test_a_drafter_that_reads_hidden_states_leaves_the_cache_of_plain():
    factory, _ = watched(pair("llama")[0])
    assert_same_caches("llama", drafter=factory, num_assistant_tokens=K, assistant_model=None)


@pytest.mark.slow
def test_a_draft_state_and_compiled_rounds_leave_the_cache_of_plain():
    assert_same_caches("llama", draft_state=hf_speculate.DraftState(), **DRAFTS["model"])
    static = {"speculation_cache": "preallocated", "compile_config": compile_config()}
    assert_same_caches("llama", small_pair("llama"), **static, **DRAFTS["model"])


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoders_leave_the_cache_of_plain(kind):
    target, draft = encoder_pair(kind)
    inputs = inputs_of(kind, 3)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)
    eos = (int(text[0, -NUM_NEW + 3]), int(text[1, -NUM_NEW + 9]))
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(eos), "pad_token_id": PAD}
    options |= {"return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=K)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert max(num_lacking(plain.sequences[:, -NUM_NEW:], eos)) > K
    for name in ("self_attention_cache", "cross_attention_cache"):
        caches = [getattr(one.past_key_values, name) for one in (plain, ours)]
        for one in caches:
            one.layers = [layer for layer in one.layers if layer.is_initialized]
        assert_same_contents(*map(cache_contents, caches), STATE_TOLERANCE)


@pytest.mark.parametrize("masks_padding", [True, False])
@pytest.mark.parametrize(
    ("kind", "cache_kind", "drafts", "num_turns"),
    [
        ("llama", "dynamic", "model", 4),
        ("llama", "preallocated", "copying", 4),
        ("mistral_window", "dynamic", "hybrid", 4),
        ("mistral_window", "preallocated", "model", 2),
        ("gpt2", "auto", "model", 2),
        ("bloom", "auto", "copying", 4),
    ],
)
def test_turns_of_a_batched_chat_are_those_of_plain(kind, cache_kind, drafts, num_turns, masks_padding):
    """The second turn attends to what the first left; a mask over the padding of ended rows has holes."""
    target, draft = pair(kind)
    texts = []
    for own in ({}, {"assistant_model": draft, **DRAFTS[drafts]}):
        held, inputs, lacking = DynamicCache(config=target.config), prompts(), 0
        for _ in range(num_turns):
            has_holes = bool((inputs["attention_mask"].diff(dim=1) < 0).any())
            options = {**own, "speculation_cache": "auto" if has_holes else cache_kind} if own else {}
            options |= {"max_new_tokens": NUM_NEW, "eos_token_id": list(ends(kind)), "pad_token_id": PAD}
            ids = target.generate(**inputs, **options, past_key_values=held)
            num_before = inputs["input_ids"].shape[1]
            lacking += sum(num_lacking(ids[:, num_before:], ends(kind)))
            inputs = next_turn(inputs, ids, masks_padding)
        assert lacking
        texts.append(ids)
    assert_equal_ids(*texts)


def next_turn(inputs: dict[str, Tensor], ids: Tensor, masks_padding: bool) -> dict[str, Tensor]:
    """The text so far with what is said next, and a mask over it."""
    num_before = inputs["input_ids"].shape[1]
    new = ids[:, num_before:]
    is_text = torch.ones_like(new) if not masks_padding else (new != PAD).long()
    mask = torch.cat([inputs["attention_mask"], is_text, torch.ones_like(SAID)], dim=1)
    return {"input_ids": torch.cat([ids, SAID], dim=1), "attention_mask": mask}


@each_value(cache_kind=["dynamic", "preallocated"], kind=["llama", "mistral_window"])
def test_an_error_while_padding_is_read_brings_a_passed_cache_back(kind, cache_kind):
    target, same = pair(kind, ACCEPTED_ALL)  # so that all rows end in the first round, and lack what is fed last
    inputs, error = prompts(), Mistake("on purpose")
    cache = prefilled(target, *(part[:, :3] for part in inputs.values()))
    before = cache_contents(cache)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(ends(kind)), "pad_token_id": PAD}
    options |= {"assistant_model": same, "speculation_cache": cache_kind, **DRAFTS["long drafts"]}
    with hook(target, Fault(3, error)), pytest.raises(Mistake):
        target.generate(**inputs, **options, past_key_values=cache)
    assert error.__notes__ == ["hf_speculate: raised while the target read the padding of finished rows, round 1"]
    assert_same_contents(before, cache_contents(cache))


def test_a_pad_id_without_an_embedding_leaves_every_row_as_long():
    """Plain `generate` cannot feed it."""
    target, draft = pair("llama")
    inputs, eos = prompts(), ends("llama")
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(eos), "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options, pad_token_id=PAD)
    ours = target.generate(**inputs, **options, pad_token_id=64, assistant_model=draft, num_assistant_tokens=K)
    assert_equal_ids(plain.sequences[ours.sequences != 64], ours.sequences[ours.sequences != 64])
    num_before = inputs["input_ids"].shape[1]
    lacking = num_lacking(plain.sequences[:, num_before:], eos)
    for one, other in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        for row, num in enumerate(lacking):
            num_text = one.keys.shape[2] - num
            torch.testing.assert_close(one.keys[row, :, :num_text], other.keys[row, :, :num_text])


@each_value(dtype=[torch.float32, torch.float64], attention=["eager", "sdpa"])
def test_padding_before_a_prompt_in_chunks_is_read_as_in_plain(attention, dtype):
    """A mask that hides all columns from a token of padding makes NaNs of its states, and then of real tokens'."""
    target = hf_speculate.enable(make_model("llama", attn_implementation=attention, dtype=dtype))
    options = {"max_new_tokens": 8, "prefill_chunk_size": 3, "return_dict_in_generate": True}
    plain = target.generate(**prompts(), **options)
    ours = target.generate(**prompts(), **options, assistant_model=noisy_copy(target), num_assistant_tokens=K)
    assert_equal_ids(plain.sequences, ours.sequences)
    contents = [cache_contents(one.past_key_values) for one in (plain, ours)]
    is_exact = attention == "sdpa" and dtype == torch.float64  # eager attention takes its softmax in float32
    assert_same_contents(*contents, STATE_TOLERANCE if is_exact else FLOAT32_TOLERANCE)
