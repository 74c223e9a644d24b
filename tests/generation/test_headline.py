"""Compare the headline of the statistics with a clock that advances by known times."""

from functools import partial

import pytest
import torch

from hf_speculate.draft.assistant_model import AssistantModel
from hf_speculate.engine.stage_clock import StageClock
from hf_speculate.generation import generate as generation
from hf_speculate.generation import request
from hf_speculate.stats import SpeculationStats
from tests.cases import ACCEPTED_NONE, assert_equal_ids, new_pair
from tests.schedule.scripted import ScriptedSchedule
from tests.support.tiny import ragged_prompts

NUM_NEW = 96
PREPARATION_S, VOCABULARY_S, INPUTS_S = 1.5, 0.5, 1.0
FEW_REJECTED = 0.02  # noise in the draft's weights
CLOSE = 0.03  # relative tolerance of the speedup


class Script:
    """Clock that advances during forwards and when a test advances it."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds

    def charge(self, model, base_s, token_s):
        """Charge each forward of the model `base_s`, plus `token_s` per token."""

        def pass_by(module, args, kwargs):
            self.seconds += base_s + token_s * kwargs["input_ids"].numel()

        model.register_forward_pre_hook(pass_by, with_kwargs=True)

    def after(self, function, seconds):
        """Wrap a function so that each call takes this long."""

        def slow(*args, **kwargs):
            self.seconds += seconds
            return function(*args, **kwargs)

        return slow


@pytest.fixture
def script(monkeypatch):
    script = Script()
    monkeypatch.setattr(generation, "StageClock", partial(StageClock, now=script))
    monkeypatch.setattr(request, "check_call", script.after(request.check_call, PREPARATION_S))
    monkeypatch.setattr(
        AssistantModel, "resolve", script.after(AssistantModel.resolve, VOCABULARY_S)
    )
    return script


@pytest.mark.parametrize("noise", [FEW_REJECTED, ACCEPTED_NONE])
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_headline_speedup_is_the_measured_one(script, monkeypatch, batch_size, noise):
    target, draft = new_pair(noise=noise)
    draft.to(torch.float32)  # half the bytes, so the schedule tries the draft
    inputs = ragged_prompts(batch_size, seed=5)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    ends = [int(text[0, NUM_NEW // 4]), int(text[-1, NUM_NEW // 2])] if batch_size > 1 else []
    options = {
        "max_new_tokens": NUM_NEW,
        "eos_token_id": ends or None,
        "pad_token_id": 0,
        "assistant_model": draft,
    }
    script.charge(target, 1.0, 0.05)
    script.charge(draft, 0.2, 0.005)
    target._prepare_cache_for_generation = script.after(
        target._prepare_cache_for_generation, INPUTS_S
    )
    stats, plain = SpeculationStats(), SpeculationStats()
    make_schedule = "hf_speculate.engine.draft_length.make_schedule"
    with monkeypatch.context() as patched:
        patched.setattr(make_schedule, lambda *_: ScriptedSchedule([0]))
        began_s = script.seconds
        plainly = target.generate(**inputs, **options, speculation_stats=plain)
        plain_s = script.seconds - began_s - PREPARATION_S - VOCABULARY_S
    began_s = script.seconds
    assert_equal_ids(plainly, target.generate(**inputs, **options, speculation_stats=stats))
    seconds = script.seconds - began_s

    assert stats.rounds_by_draft_len.keys() > {0}
    assert batch_size == 1 or len(stats.replaced_steps) > 1  # rows end at different times
    assert stats.replaced_steps == plain.replaced_steps
    assert stats.speedup == pytest.approx(plain_s / seconds, rel=CLOSE)
    assert stats.total_s == pytest.approx(seconds)
    before_s = PREPARATION_S, VOCABULARY_S, INPUTS_S
    assert (stats.preparation_s, stats.vocabulary_s, stats.inputs_s) == pytest.approx(before_s)
    assert stats.time_to_first_token_s == pytest.approx(sum(before_s) + stats.prefill_s)
    assert noise == FEW_REJECTED or stats.speedup < 1
    assert f"{stats.speedup:.2f}x the speed" in stats.headline
