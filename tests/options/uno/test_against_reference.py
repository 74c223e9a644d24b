"""Compare the drafts of Uno adapters in whole calls with the formula applied to each row."""

from typing import NamedTuple

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate import UnoAdapter
from hf_speculate.compat import CACHE_NAME
from hf_speculate.kernels import NoiseKeys, row_seeds, uniforms
from hf_speculate.options.uno.drafter import UnoDrafter, noise_ids
from hf_speculate.types import DraftOut, Stream
from tests.generation.test_caches import FLOAT32_TOLERANCE, assert_same_contents, cache_contents
from tests.options.uno.adapters import Reference, make_tensors, write_adapter
from tests.support.tiny import SLIDING_WINDOW, make_model, ragged_prompts

TOLERANCE = 1e-5  # transformers computes norms in float32
DRAFT_LENS = (3, 0, 0, 5, 1, 0, 2)
ENDS = {"eos_token_id": [3, 9, 17, 30, 44]}


class Record(NamedTuple):
    texts: list[list[int]]  # one per row, including the newest token
    noise: list[list[int]]  # noise tokens by row
    draft: DraftOut
    max_position: int  # later positions are clamped to this one

    def rows(self, ends=()):
        """Yield text, noise and logits of each row that has not ended, up to the last position."""
        for text, noise, logits in zip(
            self.texts, self.noise, self.draft.token_logits, strict=True
        ):
            num = self.max_position + 2 - len(text)
            if text[-1] not in ends:
                yield text, noise[: num - 1], logits[:num]


class Recording(UnoDrafter):
    """Drafter that records every draft with the texts and the noise of the rows."""

    reads_kept = True

    def __init__(self, drafter, setup, records):
        super().__init__(drafter.layers, drafter.noise_end, setup)
        self.records, self.pads, self.texts = records, list(setup.num_pads), []
        self.max_position = setup.max_position

    def draft(self, request):
        if self.texts:
            kept = zip(
                request.kept.token_ids.tolist(), request.kept.num_emitted.tolist(), strict=True
            )
            for text, (ids, num) in zip(self.texts, kept, strict=True):
                text += ids[:num]
        else:
            rows = zip(request.query_token_ids.tolist(), self.pads, strict=True)
            self.texts = [ids[pad:] for ids, pad in rows]
        read = []

        def run_target(token_ids):
            read.append(token_ids)
            return request.run_target(token_ids)

        draft = super().draft(request._replace(run_target=run_target))
        noise = [ids[1:] for ids in read[0].tolist()]
        texts = [list(text) for text in self.texts]
        self.records.append(Record(texts, noise, draft, self.max_position))
        return draft

    def rows(self, indices):
        super().rows(indices)
        self.pads = [self.pads[row] for row in indices]
        self.texts = [self.texts[row] for row in indices if self.texts]


def recorded(adapter, target, inputs, **options):
    """Return the drafts of a call, its output and its statistics."""
    records, stats = [], hf_speculate.SpeculationStats()
    output = hf_speculate.generate(
        target,
        **inputs,
        drafter=lambda setup: Recording(adapter(setup), setup, records),
        speculation_stats=stats,
        **{"do_sample": True, "top_k": 0, "seed": 5, "max_new_tokens": 24, **options},
    )
    return records, output, stats


# Family, number of rows, cache and options.
CALLS = {
    "one row": ("llama", 1, "preallocated", {}),
    "rows that leave": ("qwen3", 4, "preallocated", ENDS),
    "dynamic, rows that leave": ("qwen2", 4, "dynamic", ENDS),
    "windows": ("mistral_window", 3, "preallocated", {}),
    "dynamic windows": ("mistral_window", 3, "dynamic", {}),
    "windows and full attention": ("gemma3", 3, "preallocated", {}),
    "rows that stay": ("llama", 4, "preallocated", {**ENDS, CACHE_NAME: None}),
    "fixed buffers": ("llama", 3, "auto", {"cache_implementation": "static"}),
}


@pytest.mark.parametrize("scripted", [DRAFT_LENS], indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_drafts_follow_the_formula(name, scripted, tmp_path):
    family, batch_size, cache, options = CALLS[name]
    target = make_model(family)
    tensors = make_tensors(target)
    adapter = UnoAdapter(write_adapter(tmp_path, tensors))
    if CACHE_NAME in options:  # ended rows stay in the batch
        options = {**options, CACHE_NAME: DynamicCache(config=target.config)}
    inputs = ragged_prompts(batch_size, seed=2, max_len=2 * SLIDING_WINDOW)
    records, _, stats = recorded(adapter, target, inputs, speculation_cache=cache, **options)
    reference, ends = Reference(target, tensors), options.get("eos_token_id", ())
    for text, noise, logits in (row for record in records for row in record.rows(ends)):
        torch.testing.assert_close(logits, reference.logits(text, noise), rtol=0, atol=TOLERANCE)
    assert len(records) >= 3
    assert stats.num_accepted > 0
    assert max(len(text) for record in records for text in record.texts) > 2 * SLIDING_WINDOW
    if name.endswith(("leave", "stay")):
        assert (len({len(record.texts) for record in records}) == 1) == name.endswith("stay")
    assert not any(scripted[0].num_unread), "an adapter reads no prompt"


@pytest.mark.parametrize("scripted", [(4,)], indirect=True)
def test_a_zero_adapter_is_the_target_over_noise(scripted, tmp_path):
    target = make_model("llama")
    adapter = UnoAdapter(write_adapter(tmp_path, make_tensors(target, size=0.0)))
    records, _, _ = recorded(adapter, target, ragged_prompts(2, seed=3))
    for text, noise, logits in (row for record in records for row in record.rows()):
        expected = target(torch.tensor([text + noise])).logits[0, -len(logits) :]
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def test_noise_is_uniform_below_the_mask_token():
    keys = NoiseKeys(row_seeds(7, 4000), torch.ones(4000).long(), torch.full((4000,), 9))
    ids = noise_ids(keys, 5, end=9)
    counts = ids.flatten().bincount(minlength=10)
    assert counts[0] == counts[9] == 0
    expected = ids.numel() / 8
    statistic = ((counts[1:9] - expected) ** 2 / expected).sum()
    assert statistic < 29.9  # critical value for a p-value of 1e-4 with 7 degrees of freedom
    assert not torch.equal(ids, noise_ids(keys._replace(rounds=keys.rounds + 1), 5, end=9))
    assert noise_ids(keys, 3, end=2).eq(1).all()


def test_noise_has_random_numbers_of_its_own():
    keys, offsets = (
        NoiseKeys(row_seeds(7, 2), torch.ones(2).long(), torch.tensor([9, 4])),
        torch.arange(8)[None],
    )
    noise = noise_ids(keys, 8, end=62)
    drawn = {
        stream: uniforms(keys, stream, offsets, torch.zeros_like(offsets)) for stream in Stream
    }
    equal = [stream for stream in Stream if torch.equal((drawn[stream] * 61).long() + 1, noise)]
    assert equal == [Stream.NOISE]


@pytest.mark.parametrize("cache", ["preallocated", "dynamic"])
@pytest.mark.parametrize("scripted", [DRAFT_LENS], indirect=True)
def test_the_returned_cache_holds_no_noise(cache, scripted, tmp_path):
    target = make_model("qwen3")
    adapter = UnoAdapter(write_adapter(tmp_path, make_tensors(target)))
    inputs, options = ragged_prompts(3, seed=2), {"return_dict_in_generate": True}
    plain = target.generate(**inputs, **options, max_new_tokens=24)
    own = {"speculation_cache": cache, "do_sample": False, "top_k": None}
    _, output, stats = recorded(adapter, target, inputs, **options, **own)
    caches = plain[CACHE_NAME], output[CACHE_NAME]
    assert_same_contents(*map(cache_contents, caches), FLOAT32_TOLERANCE)
    assert stats.num_accepted > 0
