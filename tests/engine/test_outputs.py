"""OutputRecorder gives back rows of different lengths as plain `generate` would."""

import pytest
import torch
from torch import Tensor

from hf_speculate.engine.outputs import OutputRecorder, Recorded
from hf_speculate.types import DraftOut, RoundRecord, Scored, StageSeconds, Trimmed, Verified

VOCAB_SIZE = 6
PAD = 4
PROMPT = torch.tensor([[7, 8], [9, 10]])
EVERYTHING = Recorded(scores=True, logits=True, hidden_states=True, attentions=True)


def numbers(num: int, start: int) -> Tensor:
    """[num, V], no two alike."""
    return torch.arange(start, start + num * VOCAB_SIZE, dtype=torch.float64).view(num, VOCAB_SIZE)


def record(
    new_ids: list[list[int]], scores: Tensor, scored: Scored, num_round: int = 1, num_drafted: int = 2, rows=(0,)
) -> RoundRecord:
    """A round in which every row emits all its tokens."""
    nothing = [0] * len(rows)
    draft = DraftOut(torch.zeros(len(rows), num_drafted, dtype=torch.int64), torch.zeros(len(rows)), None, None)
    verified = Verified(torch.zeros(0), new_ids, nothing, nothing, 0, scores)
    trimmed = Trimmed([len(ids) for ids in new_ids], [False] * len(rows), [False] * len(rows))
    live = (True,) * len(rows)
    return RoundRecord(
        num_round, rows, live, 2, 1, (9,) * len(rows), draft, scored, verified, trimmed, StageSeconds(), 0
    )


@pytest.fixture
def recorder() -> OutputRecorder:
    """Row 0 has three tokens of two rounds, row 1 has one; each round has scores of one position more."""
    recorder = OutputRecorder(range(2), Recorded(scores=True, logits=True))
    scores, logits = torch.stack([numbers(3, 0), numbers(3, 100)]), torch.stack([numbers(3, 1000), numbers(3, 1100)])
    recorder.on_round(record([[1, 2], [3]], scores, Scored(logits), rows=(0, 1)))
    recorder.on_round(record([[5]], numbers(2, 200)[None], Scored(numbers(2, 1200)[None])))
    return recorder


def test_sequences_are_the_prompt_and_the_new_tokens_padded_on_the_right(recorder):
    assert recorder.sequences(PROMPT, PAD).tolist() == [[7, 8, 1, 2, 5], [9, 10, 3, PAD, PAD]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sequences_keep_the_prompts_dtype_and_leave_it_alone(recorder, dtype):
    prompt = PROMPT.to(dtype)
    assert recorder.sequences(prompt, PAD).dtype == dtype
    assert torch.equal(prompt, PROMPT.to(dtype))


def test_without_new_tokens_the_prompt_comes_back():
    assert torch.equal(OutputRecorder(range(2), Recorded()).sequences(PROMPT, PAD), PROMPT)


@pytest.mark.parametrize(("name", "offset"), [("scores", 0), ("logits", 1000)])
def test_scores_are_by_position_and_an_ended_row_holds_its_padding(recorder, name, offset):
    steps = getattr(recorder, name)(PAD)
    assert [step.shape for step in steps] == [(2, VOCAB_SIZE)] * 3
    assert all(step.dtype == torch.float32 for step in steps)
    expected = [numbers(2, offset)[0], numbers(2, offset)[1], numbers(1, offset + 200)[0]]
    assert torch.equal(torch.stack([step[0] for step in steps]), torch.stack(expected).float())
    assert torch.equal(steps[0][1], numbers(1, offset + 100)[0].float())
    ended = [0.0 if token == PAD else -torch.inf for token in range(VOCAB_SIZE)]
    assert [step[1].tolist() for step in steps[1:]] == [ended, ended]


def test_a_pad_id_past_the_vocabulary_has_no_score(recorder):
    assert recorder.scores(VOCAB_SIZE)[2][1].tolist() == [-torch.inf] * VOCAB_SIZE


def test_what_was_recorded_does_not_change_with_the_tensor_it_came_from():
    recorder, scores = OutputRecorder(range(1), Recorded(scores=True, logits=True)), torch.ones(2, VOCAB_SIZE)
    recorder.on_round(record([[1]], scores[None], Scored(scores[None])))
    scores.zero_()
    assert recorder.scores(PAD)[0].eq(1).all()
    assert recorder.logits(PAD)[0].eq(1).all()


def test_what_was_not_asked_for_is_none():
    recorder, states, scores = OutputRecorder(range(1), Recorded()), torch.ones(1, 3, 2), torch.ones(1, 3, VOCAB_SIZE)
    for num_round in (0, 1):
        recorder.on_round(record([[1]], scores, Scored(scores, (states,), (states,)), num_round))
    assert recorder.scores(PAD) is None
    assert recorder.logits(PAD) is None
    assert recorder.hidden_states == recorder.attentions == []


@pytest.mark.parametrize("num", [1, 2, 5])
def test_truncate_cuts_every_row_and_all_that_belongs_to_it(recorder, num):
    whole = recorder.scores(PAD)
    recorder.truncate(num)
    longest = min(num, 3)
    expected = torch.tensor([[7, 8, 1, 2, 5], [9, 10, 3, PAD, PAD]])
    assert torch.equal(recorder.sequences(PROMPT, PAD), expected[:, : 2 + longest])
    assert len(recorder.scores(PAD)) == len(recorder.logits(PAD)) == longest
    for step, before in zip(recorder.scores(PAD), whole, strict=False):
        assert torch.equal(step, before)


def states(num_query: int, num_columns: int) -> Scored:
    """A forward of one row: two layers of hidden states [1, Q, D], two of attentions [1, H, Q, T], no two alike."""
    hidden = torch.arange(2.0 * num_query * 3).view(2, 1, num_query, 3)
    attentions = torch.arange(2.0 * 2 * num_query * num_columns).view(2, 1, 2, num_query, num_columns)
    return Scored(torch.zeros(1, num_query, VOCAB_SIZE), tuple(hidden), tuple(attentions))


def test_the_prompts_states_are_one_entry():
    recorder, prompt = OutputRecorder(range(1), EVERYTHING), states(4, 4)
    recorder.on_round(record([[1]], prompt.logits, prompt, num_round=0))
    assert len(recorder.hidden_states) == len(recorder.attentions) == 1
    assert recorder.hidden_states[0] is prompt.hidden_states
    assert recorder.attentions[0] is prompt.attentions


def test_a_rounds_states_are_one_entry_per_kept_token_over_the_columns_it_saw():
    """Three query tokens over ten columns, of which two were kept: the first saw eight columns, the second nine."""
    recorder, output = OutputRecorder(range(1), EVERYTHING, lambda: [None, None]), states(3, 10)
    recorder.on_round(record([[1, 2]], output.logits, output))
    assert len(recorder.hidden_states) == len(recorder.attentions) == 2
    for position in range(2):
        for layer in range(2):
            assert torch.equal(
                recorder.hidden_states[position][layer], output.hidden_states[layer][:, position : position + 1]
            )
            assert torch.equal(
                recorder.attentions[position][layer],
                output.attentions[layer][:, :, position : position + 1, : 8 + position],
            )


def test_a_window_layers_attentions_begin_where_its_window_does():
    recorder, output = OutputRecorder(range(1), EVERYTHING, lambda: [4, 99]), states(3, 10)
    recorder.on_round(record([[1, 2, 3]], output.logits, output))
    for position in range(3):
        windowed, whole = recorder.attentions[position]
        assert torch.equal(windowed, output.attentions[0][:, :, position : position + 1, 4 + position : 8 + position])
        assert whole.shape[-1] == 8 + position


def test_truncate_cuts_states_too():
    recorder, prompt, output = OutputRecorder(range(1), EVERYTHING, lambda: [None, None]), states(4, 4), states(3, 7)
    recorder.on_round(record([[1]], prompt.logits, prompt, num_round=0))
    recorder.on_round(record([[1, 2, 3]], output.logits, output))
    kept = recorder.hidden_states[:2]
    recorder.truncate(2)
    assert recorder.hidden_states == kept
    assert len(recorder.attentions) == 2
