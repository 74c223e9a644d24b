"""Rounds of changing length, plain steps among them, decode what plain `generate` does."""

from functools import partial

import pytest
import torch

import hf_speculate
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.engine.stage_clock import StageClock
from hf_speculate.schedule import AdaptiveSchedule
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.schedule.scripted import LENS
from tests.tiny import noisy_copy, ragged_prompts

NUM_NEW = 40
PROCESSED = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}


@pytest.fixture
def histories(monkeypatch):
    """Checks at every call of the drafter that what its processors read is the text."""
    checked, draft = [], ModelDrafter.draft

    def checking(self, request):
        out, query = draft(self, request), request.query_token_ids
        lens = self.chooser.history.lens
        for row, length in enumerate(lens):
            num = min(query.shape[1], length)
            assert torch.equal(self.chooser.history.token_ids[row, length - num : length], query[row, -num:])
        checked.append([self.chooser.history.token_ids[row, :length].tolist() for row, length in enumerate(lens)])
        return out

    monkeypatch.setattr(ModelDrafter, "draft", checking)
    return checked


@each_value(options=[{}, PROCESSED], batch_size=[1, 3], kind=["llama", "mistral_window", "gpt2"])
def test_plain_steps_between_drafts_leave_greedy_text_as_it_is(scripted, kind, batch_size, options):
    stats = assert_decodes_as_plain(*pair(kind), ragged_prompts(batch_size, seed=3), max_new_tokens=NUM_NEW, **options)
    assert stats.rounds_by_draft_len[0] > 3
    assert stats.num_accepted > 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_drafter_reads_the_whole_text_after_plain_steps(scripted, histories, batch_size):
    target, draft = pair("llama")
    inputs = ragged_prompts(batch_size, seed=3)
    ids = target.generate(**inputs, max_new_tokens=NUM_NEW, assistant_model=draft, **PROCESSED)
    assert len(histories) > 5
    for rows in histories:
        if len(rows) == batch_size:
            assert rows == [ids[row, : len(text)].tolist() for row, text in enumerate(rows)]


@pytest.mark.parametrize("keeps_rows", [False, True], ids=["rows leave", "rows stay"])
def test_rows_that_end_early_do_not_disturb_plain_steps(scripted, keeps_rows):
    target, draft = pair("qwen2")
    inputs = ragged_prompts(4, seed=5)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    options = {"eos_token_id": [int(text[0, 1]), int(text[2, 7])], "pad_token_id": 0, "max_new_tokens": NUM_NEW}
    assert_decodes_as_plain(target, draft, inputs, **options, return_dict_in_generate=keeps_rows)


def test_lock_step_takes_plain_steps_too(scripted):
    options = {"max_new_tokens": NUM_NEW, "logits_processor": [lambda ids, scores: scores + (ids[:, -1:] % 3)]}
    assert assert_decodes_as_plain(*pair("llama"), ragged_prompts(3, seed=4), **options).lock_step
    assert all(len(outcome.row_ids) == 1 and outcome.num_rows == 3 for outcome in scripted[0].outcomes)


def test_the_schedule_is_told_what_a_round_was(scripted):
    target, draft = pair("llama")
    target.generate(**ragged_prompts(1, seed=3), max_new_tokens=NUM_NEW, assistant_model=draft)
    outcomes = scripted[0].outcomes
    assert tuple(outcome.num_draft_tokens for outcome in outcomes[:5]) == LENS[:5]
    assert outcomes[0].num_fed == outcomes[2].num_fed == 0
    assert outcomes[1].num_fed > 3  # the prompt
    assert outcomes[4].num_fed in (3, 4)  # the round before emitted one token that was not read, or two; then two steps
    assert all(outcome.draft_s >= 0 and outcome.score_s > 0 and outcome.other_s > 0 for outcome in outcomes)


class FakeClock:
    """A clock that only forwards move on."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def charge(self, model, seconds):
        """Let every forward of `model` take `seconds`."""

        def advance(*_):
            self.now_s += seconds

        return model.register_forward_pre_hook(advance)


@pytest.fixture
def adaptive(monkeypatch):
    """A function that decodes adaptively where a draft step costs a share of a plain step; returns ids, stats, time."""
    clock = FakeClock()
    monkeypatch.setattr("hf_speculate.generation.decoding_method.StageClock", partial(StageClock, clock))

    def decode(noise, draft_s, ratio=0.1, batch_size=1, **options):
        target, draft = pair("llama")[0], noisy_copy(pair("llama")[0], noise)
        schedule = AdaptiveSchedule(10, ratio)
        monkeypatch.setattr("hf_speculate.engine.builder.build_schedule", lambda *_: schedule)
        handles = [clock.charge(target, 1.0), clock.charge(draft, draft_s)]
        stats, begin = hf_speculate.SpeculationStats(), clock()
        inputs = ragged_prompts(batch_size, seed=3)
        ids = target.generate(**inputs, max_new_tokens=120, assistant_model=draft, speculation_stats=stats, **options)
        for handle in handles:
            handle.remove()
        assert_equal_ids(target.generate(**inputs, max_new_tokens=120, **options), ids)
        return stats, clock() - begin

    return decode


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_good_draft_is_used(adaptive, batch_size):
    stats, seconds = adaptive(0.01, 0.05, batch_size=batch_size)
    assert seconds < 0.7 * 120
    assert max(stats.rounds_by_draft_len, key=stats.rounds_by_draft_len.get) >= 5


@pytest.mark.parametrize("draft_s", [0.1, 0.5])
def test_a_useless_draft_costs_little(adaptive, draft_s):
    stats, seconds = adaptive(10.0, draft_s, ratio=draft_s)
    assert seconds < 1.05 * 120
    assert stats.rounds_by_draft_len[0] > 0.75 * 120


def test_a_draft_as_large_as_the_target_is_never_called():
    target, draft = pair("llama", 0.0)
    calls: list[int] = []
    handle = draft.register_forward_pre_hook(lambda *_: calls.append(1))
    options = {"max_new_tokens": 12, "num_assistant_tokens": None}
    stats = assert_decodes_as_plain(target, draft, ragged_prompts(2, seed=3), **options)
    handle.remove()
    assert not calls
    assert set(stats.rounds_by_draft_len) == {0}


def test_adaptive_is_the_default_and_a_number_bounds_it():
    target = pair("llama")[0]
    draft = noisy_copy(target, 0.0).float()  # half the bytes
    for schedule, num, most in ((None, None, 10), ("adaptive", 3, 3)):
        options = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": num, "max_new_tokens": 24}
        stats = assert_decodes_as_plain(target, draft, ragged_prompts(2, seed=3), **options)
        assert 0 < max(stats.rounds_by_draft_len) <= most
