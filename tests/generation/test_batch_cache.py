"""A batch whose rows end apart leaves the cache of plain `generate`: every row as long, padding included."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.cases import ACCEPTED_ALL, Unchanged, assert_equal_ids, pair
from tests.generation.test_ownership import STATE_TOLERANCE, assert_same_contents, cache_contents, prefilled
from tests.reliability.faults import Fault, Mistake, hook
from tests.tiny import ragged_prompts

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


@pytest.mark.parametrize(
    ("kind", "cache_kind", "drafts"),
    [
        *(("llama", "preallocated", drafts) for drafts in DRAFTS),
        *(("mistral_window", "dynamic", drafts) for drafts in DRAFTS),
        ("mistral_window", "preallocated", "model"),
        ("gemma2", "preallocated", "model"),
        ("bloom", "dynamic", "model"),
    ],
)
def test_rows_that_end_apart_leave_the_cache_of_plain(kind, cache_kind, drafts):
    target, draft = pair(kind)
    inputs, eos = prompts(), ends(kind)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(eos), "pad_token_id": PAD}
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    own = {"assistant_model": draft, "speculation_cache": cache_kind, **DRAFTS[drafts]}
    plain = target.generate(**inputs, **options, past_key_values=caches[0])
    ours = target.generate(**inputs, **options, past_key_values=caches[1], **own)
    assert_equal_ids(plain, ours)
    assert max(num_lacking(plain[:, inputs["input_ids"].shape[1] :], eos)) > K  # or nothing is shown
    tolerance = FLOAT32_TOLERANCE if kind in ("gemma2", "bloom") else STATE_TOLERANCE
    assert_same_contents(*map(cache_contents, caches), tolerance)


def test_an_error_while_padding_is_read_brings_a_passed_cache_back():
    target, same = pair("mistral_window", ACCEPTED_ALL)  # so that all rows end in the first round
    inputs, error = prompts(), Mistake("on purpose")
    cache = prefilled(target, *(part[:, :3] for part in inputs.values()))
    before = cache_contents(cache)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(ends("mistral_window")), "pad_token_id": PAD}
    options |= {"assistant_model": same, "past_key_values": cache, **DRAFTS["long drafts"]}
    with hook(target, Fault(3, error)), pytest.raises(Mistake):
        target.generate(**inputs, **options)
    assert error.__notes__ == ["hf_speculate: raised while the target read the padding of finished rows, round 1"]
    assert_same_contents(before, cache_contents(cache))


def test_a_pad_id_without_an_embedding_leaves_every_row_as_long():
    """Plain `generate` cannot feed it."""
    target, draft = pair("llama")
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": list(ends("llama")), "return_dict_in_generate": True}
    plain = target.generate(**prompts(), **options, pad_token_id=PAD)
    ours = target.generate(**prompts(), **options, pad_token_id=64, assistant_model=draft, num_assistant_tokens=K)
    assert_equal_ids(plain.sequences, ours.sequences.where(ours.sequences != 64, PAD))
    assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
