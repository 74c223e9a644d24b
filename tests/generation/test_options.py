"""What `generate()` users rely on goes on working with an assistant, equal to plain decoding."""

import time

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import hf_speculate
from tests.cases import Streamed, Unchanged, assert_decodes_as_plain, assert_equal_ids, each_value, pair, plain_and_ours
from tests.tiny import make_model, noisy_copy, ragged_prompts

K = 4
NUM_NEW = 24
SCORE_TOLERANCE = 1e-5  # scores are rounded to float32, whose resolution at these magnitudes is 1e-6


def common_ids(kind: str, inputs: dict, count: int) -> list[int]:
    """Ids that appear in the middle of the greedy texts, so that an EOS of them ends rows at different places."""
    target, _ = pair(kind)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, inputs["input_ids"].shape[1] :]
    middles = text[:, 5:15].flatten().tolist()
    return list(dict.fromkeys(middles))[:count]


@each_value(batch_size=[1, 4], num_eos=[1, 3], pad_is_eos=[False, True])
def test_eos_inside_a_block_ends_rows_where_plain_does(batch_size, num_eos, pad_is_eos):
    inputs = ragged_prompts(batch_size, seed=11)
    eos = common_ids("llama", inputs, num_eos)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": eos, "pad_token_id": eos[0] if pad_is_eos else 0}
    assert_decodes_as_plain(*pair("llama"), inputs, **options, num_assistant_tokens=K)


@pytest.mark.parametrize("num_new", [1, 2, 3, 7])
def test_max_new_tokens_is_exact(num_new):
    assert_decodes_as_plain(*pair("qwen2"), ragged_prompts(2, seed=13), max_new_tokens=num_new, num_assistant_tokens=K)


class Recorder(LogitsProcessor):
    """A user's own processor: forbids the id that follows the last one, and keeps all that it was shown."""

    def __init__(self):
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores.scatter(1, ((input_ids[:, -1:] + 1) % scores.shape[1]), -torch.inf)


class StopAtSum(StoppingCriteria):
    """A user's own criterion: ends a row whose last three ids add up to a multiple of seven; answers as it is told."""

    def __init__(self, answer=lambda stops: stops):
        self.seen: list[list[list[int]]] = []
        self.answer = answer

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return self.answer(input_ids[:, -3:].sum(1) % 7 == 0)


PureStop = hf_speculate.register_row_wise(type("PureStop", (StopAtSum,), {}))


@each_value(batch_size=[1, 3], eos_token_id=[None, 17])
def test_foreign_processors_and_criteria_are_called_exactly_as_in_plain(batch_size, eos_token_id):
    target, draft = pair("llama")
    seen, texts, stats = [], [], hf_speculate.SpeculationStats()
    for own in ({}, {"assistant_model": draft, "num_assistant_tokens": K, "speculation_stats": stats}):
        processor, criterion = Recorder(), StopAtSum()
        own |= {"logits_processor": [processor], "stopping_criteria": [criterion], "eos_token_id": eos_token_id}
        texts.append(target.generate(**ragged_prompts(batch_size, seed=16), max_new_tokens=NUM_NEW, **own))
        seen.append((processor.seen, criterion.seen))
    assert_equal_ids(*texts)
    assert seen[0] == seen[1]
    assert stats.lock_step
    assert "Recorder, StopAtSum" in stats.fallbacks[0]
    assert stats.num_batch_rounds < len(seen[1][0])


@each_value(
    batch_size=[1, 3],
    criterion=[StopAtSum, PureStop],
    answer=[lambda stops: stops.to(torch.uint8), lambda stops: stops.long() + 2, lambda stops: 0],
)
def test_criteria_may_answer_with_numbers(answer, criterion, batch_size):
    inputs = ragged_prompts(batch_size, seed=14)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": 17, "stopping_criteria": [criterion(answer)]}
    stats = assert_decodes_as_plain(*pair("llama"), inputs, **options, num_assistant_tokens=K)
    assert stats.num_rounds > 1  # else to stop at once is right


@each_value(batch_size=[1, 4], eos_token_id=[17, None])
def test_without_eos_ended_rows_go_on_until_all_have_ended_as_in_plain(batch_size, eos_token_id):
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": eos_token_id, "return_dict_in_generate": True}
    inputs = ragged_prompts(batch_size, seed=41)  # of 4 rows some run ahead of the end, and some lag behind it
    plain, ours = plain_and_ours(*pair("llama"), inputs, **options, stopping_criteria=[PureStop()])
    assert_equal_ids(plain.sequences, ours.sequences)
    assert plain.sequences.shape[1] < inputs["input_ids"].shape[1] + NUM_NEW  # else no row may run ahead of the end
    assert not ours.speculation.lock_step
    for one, other in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        torch.testing.assert_close(other.keys, one.keys)


def test_a_processor_that_writes_into_its_scores_leaves_the_logits():
    """In float32, since logits of other dtypes are copied anyway."""
    target, draft = pair("llama", dtype=torch.float32)
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    options |= {"logits_processor": [lambda ids, scores: scores.clamp_(max=1.0)], "num_assistant_tokens": K}
    ours = target.generate(**ragged_prompts(2, seed=17), **options, assistant_model=draft)
    assert torch.stack(ours.scores).max() == 1.0 < torch.stack(ours.logits).max()


def test_max_time_stops_soon():
    target, draft = pair("llama")
    inputs, begin = ragged_prompts(1, seed=18), time.monotonic()
    ours = target.generate(**inputs, max_new_tokens=480, max_time=0.05, assistant_model=draft, num_assistant_tokens=2)
    assert inputs["input_ids"].shape[1] < ours.shape[1] < inputs["input_ids"].shape[1] + 480
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma3n"])
def test_hidden_states_and_attentions_are_those_of_plain(kind):
    target = hf_speculate.enable(make_model(kind, attn_implementation="eager"))
    draft, inputs = noisy_copy(target, 0.02, seed=1), ragged_prompts(1, seed=20, min_len=10)
    options = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    plain, ours = plain_and_ours(target, draft, inputs, **options, max_new_tokens=11, num_assistant_tokens=K)
    assert_equal_ids(plain.sequences, ours.sequences)
    tolerance = {"atol": SCORE_TOLERANCE, "rtol": SCORE_TOLERANCE}
    torch.testing.assert_close(ours.hidden_states, plain.hidden_states, **tolerance)
    torch.testing.assert_close(ours.attentions, plain.attentions, **tolerance)


def test_a_streamer_gets_the_same_tokens_as_in_plain_one_by_one():
    target, draft = pair("llama")
    inputs = ragged_prompts(1, seed=21)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": common_ids("llama", inputs, 1)}
    streams = [Streamed(), Streamed()]
    target.generate(**inputs, **options, streamer=streams[0])
    target.generate(**inputs, **options, streamer=streams[1], assistant_model=draft, num_assistant_tokens=5)
    assert streams[0].values == streams[1].values
    assert streams[1].has_ended


def test_num_return_sequences_draws_different_rows_and_repeats_by_seed():
    target, draft = pair("llama")
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 10, "assistant_model": draft}
    first, again, other = (target.generate(torch.tensor([[5, 6]]), **options, seed=seed) for seed in (3, 3, 4))
    assert len({tuple(row) for row in first.tolist()}) == 4
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_speculation_comes_with_the_output_object():
    target, draft = pair("llama")
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "speculation_stats": stats}
    output = target.generate(**ragged_prompts(2, seed=25), **options, assistant_model=draft, num_assistant_tokens=3)
    assert output.speculation is stats
    assert stats.num_emitted == 2 * 11  # the first token of each row comes with the prompt's own forward
    assert stats.num_host_syncs == stats.num_batch_rounds + 1
    assert "verifier: greedy" in str(stats)
    target.generate(**ragged_prompts(1), max_new_tokens=3, speculation_stats=stats)
    assert stats.num_rounds == 0


def test_prefill_in_chunks_gives_the_same_text():
    inputs = ragged_prompts(2, seed=26, min_len=10, max_len=20)
    options = {"max_new_tokens": 12, "prefill_chunk_size": 4, "num_assistant_tokens": 3}
    assert_decodes_as_plain(*pair("mistral_window"), inputs, **options)


def test_a_pad_id_outside_the_vocabulary_and_prompts_of_int32_are_taken():
    inputs = ragged_prompts(1, seed=27)
    options = {"max_new_tokens": 14, "eos_token_id": common_ids("llama", inputs, 1), "pad_token_id": 64}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    inputs["input_ids"] = inputs["input_ids"].int()
    plain, ours = plain_and_ours(*pair("llama"), inputs, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert ours.sequences.dtype == plain.sequences.dtype
    assert len(ours.scores) == len(plain.scores)


def test_a_large_bound_on_the_length_reserves_no_memory():
    target, draft = pair("llama")
    options = {"max_new_tokens": 10**12, "assistant_model": draft, "stopping_criteria": [StopAtSum()]}
    assert target.generate(**ragged_prompts(1, seed=1), **options, num_assistant_tokens=5).shape[1] < 200


@pytest.mark.parametrize("batch_size", [1, 8])
def test_lock_step_does_not_count_what_a_neighbour_cut_off_as_verified(batch_size):
    """A row that was cut because its neighbour refused has accepted all that was verified of it."""
    target, draft = pair("llama")
    options = {
        "max_new_tokens": 20,
        "assistant_model": draft,
        "num_assistant_tokens": K,
        **ragged_prompts(batch_size, seed=30),
    }
    alone, lock_step = hf_speculate.SpeculationStats(), hf_speculate.SpeculationStats()
    target.generate(**options, speculation_stats=alone)
    target.generate(**options, speculation_stats=lock_step, logits_processor=[Unchanged()])
    assert (lock_step.lock_step, alone.lock_step) == (True, False)
    if batch_size == 1:
        assert lock_step.verified_per_position == alone.verified_per_position
        assert lock_step.accepted_per_position == alone.accepted_per_position
    # 8 rows of 20 tokens; it was a third lower when wrong
    assert abs(lock_step.verified_acceptance_rate - alone.verified_acceptance_rate) < 0.2
