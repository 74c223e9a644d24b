"""An error in a call that decodes several times is placed in the run that failed."""

import pytest
import torch

import hf_speculate
from tests.reliability.faults import Mistake
from tests.tiny_encoders import NUM_FRAMES, make_whisper, speech


def decode(target, **options):
    """Three windows of audio, each a run of its own."""
    return target.generate(
        input_features=speech(1, num_frames=3 * NUM_FRAMES, seed=4),
        attention_mask=torch.ones(1, 3 * NUM_FRAMES, dtype=torch.int64),
        return_timestamps=True,
        max_new_tokens=20,
        assistant_model=make_whisper(seed=1),
        num_assistant_tokens=2,
        **options,
    )


@pytest.mark.parametrize(("at", "note"), [(0, "the target read the prompt"), (2, "the target scored tokens, round 2")])
def test_an_error_in_a_later_run_of_one_call_is_placed_in_that_run(at, note):
    target = hf_speculate.enable(make_whisper())
    error, lens = Mistake("on purpose"), []  # rounds of each run

    def fail(module, args, kwargs):
        if kwargs["past_key_values"].get_seq_length() == 0:
            lens.append(0)
        else:
            lens[-1] += 1
        if len(lens) == 2 and lens[-1] == at:
            raise error

    handle = target.model.decoder.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with pytest.raises(Mistake) as caught:
            decode(target)
    finally:
        handle.remove()
    assert caught.value is error
    assert lens[0] > at
    assert error.__notes__ == [f"hf_speculate: raised while {note}"]


def test_an_error_between_two_runs_of_one_call_gets_no_note():
    target, error, seen = hf_speculate.enable(make_whisper()), Mistake("on purpose"), []

    def monitor(progress):  # Whisper's own code calls it before each run
        seen.append(progress)
        if len(seen) == 2:
            raise error

    with pytest.raises(Mistake) as caught:
        decode(target, monitor_progress=monitor)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
