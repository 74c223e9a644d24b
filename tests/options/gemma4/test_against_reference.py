"""Compare every draft of Gemma 4 assistants in whole calls with the formula applied to one row."""

from typing import NamedTuple

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.cache.preallocated import PreallocatedKVCache
from hf_speculate.compat import CACHE_NAME
from hf_speculate.options.gemma4.assistant import Gemma4Assistant
from hf_speculate.options.gemma4.drafter import Gemma4Drafter
from hf_speculate.tools.checks.positions import check_positions
from hf_speculate.types import DraftOut
from tests.options.gemma4.models import (
    make_assistant,
    make_reader,
    make_target,
    make_unified_target,
    num_scored,
)
from tests.options.gemma4.reference import Reference
from tests.support.tiny import SLIDING_WINDOW, ragged_prompts

TOLERANCE = 1e-5  # transformers computes norms in float32
STALE = 1e4  # value in columns without a token of the row; masks hide finite values only
CAP = {"final_logit_softcapping": 1.0}
DRAFT_LENS = (3, 0, 0, 5, 1, 0, 2)  # the first draft comes right after the prompt
ENDS = {"eos_token_id": [3, 9, 17, 30, 44]}


class Record(NamedTuple):
    texts: list[list[int]]  # one per row, including the newest token
    draft: DraftOut


class Recording(Gemma4Drafter):
    """Drafter that records every draft and the texts of the rows.

    It first overwrites the columns of the target's cache that no row may read.
    """

    def __init__(self, assistant, setup, records):
        super().__init__(assistant, setup)
        self.records, self.pads, self.texts = records, list(setup.num_pads), []

    def draft(self, request):
        if self.texts:
            for text, ids, num in zip(
                self.texts,
                request.kept.token_ids.tolist(),
                request.kept.num_emitted.tolist(),
                strict=True,
            ):
                text += ids[:num]
        else:
            rows = zip(request.query_token_ids.tolist(), self.pads, strict=True)
            self.texts = [ids[pad:] for ids, pad in rows]
        cache = request.target_cache._kv_cache
        fill_stale(cache)
        before = [states.clone() for layer in cache.cache.layers for states in states_of(layer)]
        draft = super().draft(request)
        after = [states for layer in cache.cache.layers for states in states_of(layer)]
        assert all(map(torch.equal, before, after)), "the target's cache was written to"
        self.records.append(Record([list(text) for text in self.texts], draft))
        return draft

    def rows(self, indices):
        super().rows(indices)
        self.pads = [self.pads[row] for row in indices]
        self.texts = [self.texts[row] for row in indices if self.texts]


def states_of(layer):
    return [] if getattr(layer, "keys", None) is None else [layer.keys, layer.values]


def fill_stale(cache):
    """Overwrite the columns before each row's first token and after its last token."""
    end = cache.num_columns
    for layer in cache.cache.layers:
        for states in states_of(layer):
            is_buffer = isinstance(cache, PreallocatedKVCache)
            first = layer.base if is_buffer else end - states.shape[2]
            ends = cache.layout.lens if is_buffer else [end] * len(states)
            for row, (row_end, num) in enumerate(zip(ends, cache.num_real_tokens, strict=True)):
                with torch.inference_mode(states.is_inference()):
                    states[row, :, max(row_end - first, 0) :] = STALE
                    states[row, :, : max(row_end - num - first, 0)] = STALE


def recorded(assistant, target, inputs, position=-1, **options):
    """Return the drafts of a call, and its statistics."""
    records, wrapped = [], Gemma4Assistant(assistant, position)
    stats = hf_speculate.SpeculationStats()
    hf_speculate.generate(
        target,
        **inputs,
        drafter=lambda setup: Recording(wrapped, setup, records),
        speculation_stats=stats,
        **{"do_sample": True, "top_k": 0, "seed": 5, "max_new_tokens": 24, **options},
    )
    return records, stats


def window_of(stats):
    """Return the number of tokens that layers with a window can see.

    A dynamic cache keeps no more tokens than the target needs for its next token.
    """
    return SLIDING_WINDOW - (stats.cache == "dynamic")


def assert_drafts_are_the_references(reference, records, ends=()):
    """Compare drafts with the reference in rows that have not ended."""
    for record in records:
        num = record.draft.token_ids.shape[1]
        for row, (text, ids) in enumerate(
            zip(record.texts, record.draft.token_ids.tolist(), strict=True)
        ):
            if text[-1] in ends:
                continue
            expected = reference.logits(text, ids, num)
            torch.testing.assert_close(
                record.draft.token_logits[row], expected, rtol=0, atol=TOLERANCE
            )


# Number of rows, number of target layers with shared states, ordered embeddings, cache, position,
# and options.
CALLS = {
    "one row": (1, 2, False, "preallocated", -1, {}),
    "rows that leave": (4, 0, False, "preallocated", -1, ENDS),
    "ordered, rows that leave": (4, 2, True, "preallocated", -1, ENDS),
    "dynamic, rows that leave": (4, 2, False, "dynamic", -1, ENDS),
    "dynamic, ordered": (3, 0, True, "dynamic", -1, {}),
    "the other position": (2, 2, False, "preallocated", 0, {}),
    "chunks": (3, 2, True, "preallocated", -1, {"prefill_chunk_size": 4}),
    "rows that stay": (4, 2, False, "preallocated", -1, {**ENDS, CACHE_NAME: None}),
}


@pytest.mark.parametrize("scripted", [DRAFT_LENS], indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_drafts_equal_the_reference(name, scripted):
    batch_size, num_shared, is_ordered, cache, position, options = CALLS[name]
    target = make_target(num_shared)
    assistant = make_assistant(
        target, is_ordered=is_ordered, scale=0.3, **({} if is_ordered else CAP)
    )
    inputs = ragged_prompts(batch_size, seed=2, max_len=2 * SLIDING_WINDOW)
    if CACHE_NAME in options:  # this cache outlives the call, so finished rows stay
        options = {**options, CACHE_NAME: DynamicCache(config=target.config)}
    records, stats = recorded(
        assistant, target, inputs, position, speculation_cache=cache, **options
    )
    reference = Reference(assistant, target, position, window_of(stats))
    assert_drafts_are_the_references(reference, records, options.get("eos_token_id", ()))
    assert stats.cache == cache
    assert len(records) >= 3
    assert stats.num_accepted > 0
    assert max(len(record.texts[0]) for record in records) > 2 * SLIDING_WINDOW
    if name.endswith(("leave", "stay")):
        assert (len({len(record.texts) for record in records}) == 1) == name.endswith("stay")
    assert not any(scripted[0].num_unread), "the assistant reads no prompt"
    is_finite = torch.cat(
        [record.draft.token_logits.flatten(0, 1) for record in records]
    ).isfinite()
    assert set(is_finite.sum(1).tolist()) == {num_scored(64) if is_ordered else 64}


def test_prefix_in_a_passed_cache_is_read_like_other_tokens():
    target = make_target()
    assistant, ids = make_assistant(target), ragged_prompts(1, seed=4, min_len=12)["input_ids"]
    passed = target(ids[:, :7], use_cache=True)[CACHE_NAME]
    options = {
        CACHE_NAME: passed,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
    }
    records, stats = recorded(assistant, target, {"input_ids": ids}, **options)
    assert stats.cache == "dynamic"
    assert_drafts_are_the_references(Reference(assistant, target, window=window_of(stats)), records)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("make", [make_unified_target, make_reader])
def test_drafts_for_other_target_classes_equal_the_reference(make):
    target = make()
    assistant = make_assistant(target)
    records, stats = recorded(assistant, target, ragged_prompts(3, seed=2))
    assert_drafts_are_the_references(Reference(assistant, target, window=window_of(stats)), records)


def test_row_with_all_proposals_banned_ignores_the_ban():
    target = make_target()
    banned = [token_id for token_id in range(64) if token_id % 16]
    options = {
        "suppress_tokens": banned,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
    }
    assistant = make_assistant(target, is_ordered=True)
    records, _ = recorded(assistant, target, ragged_prompts(3, seed=1), **options)
    drafts = [record.draft for record in records]
    assert torch.cat([draft.logsumexp.flatten() for draft in drafts]).isfinite().all()
    drafted = {token_id for draft in drafts for token_id in draft.token_ids.flatten().tolist()}
    assert drafted & set(banned)
    assert drafted - set(banned)


def test_check_measures_both_positions():
    target = make_target(0)
    assistant, inputs = (
        make_assistant(target, scale=3.0),
        ragged_prompts(2, seed=3, min_len=14, max_len=18),
    )
    check = check_positions(Gemma4Assistant(assistant), target, inputs, num_tokens=20)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    texts = [text[: 8 + 10] for text in texts]
    expected = {}
    for position in (-1, 0):
        reference, are_right = Reference(assistant, target, position), []
        for text in texts:
            choices = target(torch.tensor([text])).logits[0].argmax(-1)
            for num_read in range(min(8, len(text) // 2), len(text)):
                logits = reference.logits(text[: num_read + 1], [], 1)[0]
                are_right.append(bool(logits.argmax() == choices[num_read]))
        expected[position] = sum(are_right) / len(are_right)
    assert check.accuracies == expected
    assert check.num_tokens == len(are_right)
