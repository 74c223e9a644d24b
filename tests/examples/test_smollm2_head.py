"""The examples' draft head: its drafter against a forward without a cache, and its training against its drafter."""

import functools
from pathlib import Path

import pytest
import torch

import hf_speculate
from tests.cases import assert_equal_ids
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.tiny import make_law_model, make_model, ragged_prompts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_BYTES = 24_000_000
AUX_LAYERS = [1, 2]
NUM_NEW = 24
K = 3
TOLERANCE = 1e-5  # training takes the softmax of its attention in float32


def make_head(import_example, target, draft_ids):
    """A random head that proposes `draft_ids`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = import_example("smollm2_head.head").DraftHead(target.config, AUX_LAYERS, draft_ids, target)
        head = head.to(target.dtype).requires_grad_(False)
        for weight in head.parameters():
            weight.normal_(std=0.5)
    return head


@pytest.fixture(scope="module")
def target():
    return hf_speculate.enable(make_model("llama", num_hidden_layers=3))


@pytest.fixture(scope="module")
def head(import_example, target):
    return make_head(import_example, target, torch.arange(0, 64, 2))


@pytest.fixture(scope="module")
def recording(import_example):
    """A drafter that holds every proposal beside the text it was made for."""

    class Recording(import_example("smollm2_head.drafter").HeadDrafter):
        def __init__(self, head, request, seen, **options):
            super().__init__(head, request, **options)
            self.seen, self.pads, self.texts = seen, list(request.num_pads), None

        def draft(self, request):
            kept = request.kept
            if self.texts is None:
                self.texts = [row[pad:] for row, pad in zip(request.query_token_ids.tolist(), self.pads, strict=True)]
            else:
                counts = kept.num_emitted.tolist()
                for text, ids, count in zip(self.texts, kept.token_ids.tolist(), counts, strict=True):
                    text += ids[:count]
            draft = super().draft(request)
            for text, ids, length in zip(self.texts, draft.token_ids.tolist(), draft.lens.tolist(), strict=True):
                self.seen.append((list(text), ids[:length]))
            return draft

        def rows(self, indices):
            super().rows(indices)
            self.pads = [self.pads[row] for row in indices]
            self.texts = None if self.texts is None else [self.texts[row] for row in indices]

    return Recording


def last_output(head, ids, states):
    """[1, D] after all pairs of ids [1, N] and states [1, M, D]; the pairs' own outputs stand in for the rest."""
    while True:
        count = states.shape[1]
        heads, residual = head.attend_from(ids[:, :count], states, head.turns(torch.arange(count)[None]))
        groups = heads.query.shape[1] // heads.key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (heads.key, heads.value))
        mixed = torch.nn.functional.scaled_dot_product_attention(heads.query, key, value, is_causal=True)
        output = head.finish(residual, mixed)[:, -1:]
        if count == ids.shape[1]:
            return output[:, 0]
        states = torch.cat([states, output], dim=1)


def drafted_without_cache(head, target, text, num_tokens):
    """The greedy draft after `text`, every attention computed anew over all pairs."""
    states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    states = head.project(torch.cat([states[layer] for layer in head.hidden_layers], dim=-1))  # [1, N, D]
    ids = list(text[1:])
    for _ in range(num_tokens):
        output = last_output(head, torch.tensor([ids]), states)
        ids.append(int(head.target_ids[head.logits(output)[0].argmax()]))
    return ids[-num_tokens:]


@pytest.fixture
def drafts(target, recording):
    """Decodes with a recorded head; returns its proposals beside the texts that they were made for."""

    def decode(head, inputs, eos_token_id=None, **options):
        seen, common = [], {"max_new_tokens": NUM_NEW, "eos_token_id": eos_token_id}
        drafter = functools.partial(recording, head, seen=seen, **options)
        ours = target.generate(**inputs, **common, drafter=drafter, num_assistant_tokens=K)
        assert_equal_ids(target.generate(**inputs, **common), ours)
        return seen

    return decode


@pytest.mark.parametrize(("num_rows", "has_end"), [(1, False), (3, False), (3, True)])
def test_drafts_are_those_of_a_forward_without_a_cache(target, head, drafts, num_rows, has_end):
    inputs, eos = ragged_prompts(num_rows, seed=4), None
    if has_end:  # a row ends early
        eos = int(target.generate(**inputs, max_new_tokens=6)[0, -1])
    seen = drafts(head, inputs, eos)
    assert len(seen) > num_rows * 4
    for text, ids in seen:
        assert eos in text[-K:] or ids == drafted_without_cache(head, target, text, len(ids))


@pytest.mark.parametrize(("confidence", "lens"), [(0.1, {1, K}), (0.99, {0})])
def test_an_unsure_draft_is_shorter(target, head, drafts, confidence, lens):
    seen = drafts(head, ragged_prompts(2, seed=4), confidence=confidence)
    assert {len(ids) for _, ids in seen} >= lens
    assert all(ids == drafted_without_cache(head, target, text, len(ids)) for text, ids in seen if ids)


def test_a_row_that_repeats_itself_copies_and_the_others_draft(target, head, drafts):
    prompts = torch.tensor([[5, 9, 7, 8, 5, 9, 7, 8, 5, 9], [1, 2, 3, 4, 6, 10, 11, 12, 13, 14]])
    seen = drafts(head, {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}, min_match_len=2)
    num_copied = 0
    for text, ids in seen:
        if ids != drafted_without_cache(head, target, text, len(ids)):
            num_copied += 1
            assert ids == copied(text, len(ids))
    assert 0 < num_copied < len(seen)


def copied(text, num):
    """What followed the latest of the longest earlier matches of the text's end."""
    matches = [
        (length, end)
        for end in range(1, len(text))
        for length in [next((n for n in range(end) if text[end - 1 - n] != text[-1 - n]), end)]
    ]
    _, end = max(matches)
    return (text[end:] + text[end:])[:num]


@pytest.mark.parametrize(("confidence", "min_match_len"), [(0.0, 0), (0.4, 0), (0.0, 1)])
def test_sampled_tokens_keep_the_targets_distribution(import_example, confidence, min_match_len):
    model = hf_speculate.enable(make_law_model(8, num_hidden_layers=3, dtype=torch.float32))
    head = make_head(import_example, model, torch.tensor([0, 2, 3, 5, 6]))
    stats = hf_speculate.SpeculationStats()
    made = import_example("smollm2_head.drafter").HeadDrafter
    options = {
        "drafter": functools.partial(made, head, confidence=confidence, min_match_len=min_match_len),
        "verifier": "rejection",
    }
    counts = draw(model, None, 20_000, **options, num_assistant_tokens=2, speculation_stats=stats)
    assert p_value(counts, joint_distribution(model)) > SIGNIFICANCE
    assert 0 < stats.num_accepted < stats.num_drafted


def test_training_runs_the_head_as_it_drafts(import_example, target, head):
    """Step s of training gives at every pair what s drafted tokens would, had they been the text's."""
    training = import_example("head_training.training")
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(2))
    output = target(ids, output_hidden_states=True)
    aux = torch.cat([output.hidden_states[layer] for layer in head.hidden_layers], dim=-1)
    pair_ids, groups = ids[:, 1:], head.config.num_attention_heads // head.config.num_key_value_heads
    turns, steps, states = head.turns(torch.arange(11)[None]), [], head.project(aux[:, :-1])
    for step in range(3):
        heads, residual = head.attend_from(pair_ids, states, turns)
        steps.append(heads)
        outputs = head.finish(residual, training.attend(steps, groups))
        for last in range(step, 11):
            expected = last_output(head, pair_ids[:, : last + 1], head.project(aux[:, : last + 1 - step]))
            torch.testing.assert_close(outputs[:, last], expected, rtol=0, atol=TOLERANCE)
        states = torch.nn.functional.pad(outputs, (0, 0, 1, 0))[:, :-1]
