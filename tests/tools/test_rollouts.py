"""Test the rollout values that a trainer logs."""

import warnings

from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler, TrainerControl

import hf_speculate
from hf_speculate.tools.rollouts import RolloutCallback
from tests.support.tiny import make_model, noisy_copy, ragged_prompts


def test_log_holds_acceptance_and_age_of_the_draft():
    target = make_model("llama")
    callback, state, control = RolloutCallback(max_draft_age=2), TrainerState(), TrainerControl()
    trainer = CallbackHandler([callback], target, None, None, None)
    logs, warned = [], []

    def train(num_steps):
        for _ in range(num_steps):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.on_step_begin(None, state, control)
            warned.append([str(each.message) for each in caught])
            target.generate(**ragged_prompts(2), max_new_tokens=9)
            state.global_step += 1
            logs.append({"loss": 1.0})
            state.log_history.append(dict(logs[-1]))
            trainer.on_log(None, state, control, logs=logs[-1])

    train(1)
    assert logs.pop() == {"loss": 1.0}  # nothing was recorded
    draft = noisy_copy(target, 0.05, seed=1)
    for num_steps in (5, 1):
        hf_speculate.enable(
            target, draft, num_assistant_tokens=3, speculation_stats=callback.record
        )
        train(num_steps)
    assert [log["draft/age"] for log in logs] == [1, 2, 3, 4, 5, 1]
    assert state.log_history[1:] == logs
    assert [bool(texts) for texts in warned[1:]] == [False, False, False, True, False, False]
    assert "at most 2 steps old" in warned[4][0]
    hf_speculate.enable(target, prompt_lookup_num_tokens=4, speculation_stats=callback.record)
    train(1)
    assert "draft/age" not in logs[-1]
    assert 0 < logs[0]["draft/acceptance_rate"] < 1 < logs[0]["draft/acceptance_length"]
    hf_speculate.disable(target)
    train(1)
    assert logs[-1] == {"loss": 1.0}  # a log entry leaves nothing for the next one
