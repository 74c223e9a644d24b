"""What `generate()` users rely on goes on working with an assistant, equal to plain decoding."""

import time

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import hf_speculate
from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.engine.batch import Batch
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
    ids = pair("llama")[0].generate(**inputs, **options)
    assert any(token in ids[:, inputs["input_ids"].shape[1] :] for token in eos)
    assert_decodes_as_plain(*pair("llama"), inputs, **options, num_assistant_tokens=K)


@pytest.mark.parametrize("num_new", [1, 2, 3, 7])
def test_max_new_tokens_is_exact(num_new):
    assert_decodes_as_plain(*pair("qwen2"), ragged_prompts(2, seed=13), max_new_tokens=num_new, num_assistant_tokens=K)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_prompts_of_int32_give_what_plain_gives(batch_size):
    target, draft = pair("llama")
    inputs = ragged_prompts(batch_size, seed=8)
    inputs["input_ids"] = inputs["input_ids"].int()
    plain, ours = plain_and_ours(target, draft, inputs, max_new_tokens=12, num_assistant_tokens=3)
    assert_equal_ids(plain, ours)
    assert ours.dtype == plain.dtype


class Recorder(LogitsProcessor):
    """A user's own processor: forbids the id that follows the last one, and keeps all that it was shown."""

    def __init__(self):
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        scores.scatter_(1, ((input_ids[:, -1:] + 1) % scores.shape[1]), -torch.inf)
        return scores


class StopAtSum(StoppingCriteria):
    """A user's own criterion: ends a row whose last three ids add up to a multiple of seven."""

    def __init__(self):
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return input_ids[:, -3:].sum(1) % 7 == 0


@each_value(batch_size=[1, 3], eos_token_id=[None, 17])
def test_foreign_processors_and_criteria_are_called_exactly_as_in_plain(batch_size, eos_token_id):
    target, draft = pair("llama")
    inputs = ragged_prompts(batch_size, seed=16)
    seen, texts, stats = [], [], hf_speculate.SpeculationStats()
    for own in ({}, {"assistant_model": draft, "num_assistant_tokens": K, "speculation_stats": stats}):
        processor, criterion = Recorder(), StopAtSum()
        texts.append(
            target.generate(
                **inputs,
                max_new_tokens=NUM_NEW,
                eos_token_id=eos_token_id,
                logits_processor=[processor],
                stopping_criteria=[criterion],
                **own,
            )
        )
        seen.append((processor.seen, criterion.seen))
    assert_equal_ids(*texts)
    assert seen[0] == seen[1]
    assert stats.lock_step
    assert "Recorder, StopAtSum" in stats.fallbacks[0]
    assert stats.num_batch_rounds < len(seen[1][0])


@hf_speculate.register_row_wise
class PureStop(StoppingCriteria):
    """As StopAtSum, declared pure."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(1) % 7 == 0


class StopsByNumber(StopAtSum):
    """As StopAtSum, with an answer that is no bool."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def __call__(self, input_ids, scores, **kwargs):
        return self.answer(super().__call__(input_ids, scores))


hf_speculate.register_row_wise(StopsByRegisteredNumber := type("StopsByRegisteredNumber", (StopsByNumber,), {}))


@each_value(
    batch_size=[1, 3],
    criterion=[StopsByNumber, StopsByRegisteredNumber],
    answer=[
        lambda stops: stops.int(),
        lambda stops: stops.to(torch.uint8),
        lambda stops: stops.long() + 2,
        lambda stops: 0,
    ],
)
def test_criteria_may_answer_with_numbers(answer, criterion, batch_size):
    inputs = ragged_prompts(batch_size, seed=14)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": 17, "stopping_criteria": [criterion(answer)]}
    stats = assert_decodes_as_plain(*pair("llama"), inputs, **options, num_assistant_tokens=K)
    assert stats.num_rounds > 1  # else to stop at once is right


@each_value(batch_size=[1, 4], eos_token_id=[17, None])
def test_without_eos_ended_rows_go_on_until_all_have_ended_as_in_plain(batch_size, eos_token_id):
    target, draft = pair("llama")
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": eos_token_id, "stopping_criteria": [PureStop()]}
    options |= {"num_assistant_tokens": K, "speculation_stats": (stats := hf_speculate.SpeculationStats())}
    inputs = ragged_prompts(batch_size, seed=41)  # of 4 rows some run ahead of the end, and some lag behind it
    plain, ours = plain_and_ours(target, draft, inputs, return_dict_in_generate=True, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert plain.sequences.shape[1] < inputs["input_ids"].shape[1] + NUM_NEW  # else no row may run ahead of the end
    assert not stats.lock_step
    for one, other in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        torch.testing.assert_close(other.keys, one.keys)


class WritesInPlace(LogitsProcessor):
    """A user's own processor, which changes what it is shown."""

    def __call__(self, input_ids, scores):
        return scores.clamp_(max=1.0)


def test_a_processor_that_writes_into_its_scores_leaves_the_logits():
    """In float32, since logits of other dtypes are copied anyway."""
    target, draft = pair("llama", dtype=torch.float32)
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    options |= {"logits_processor": [WritesInPlace()], "assistant_model": draft, "num_assistant_tokens": K}
    ours = target.generate(**ragged_prompts(2, seed=17), **options)
    assert torch.stack(ours.scores).max() == 1.0 < torch.stack(ours.logits).max()


def test_max_time_stops_soon():
    target, draft = pair("llama")
    inputs = ragged_prompts(1, seed=18)
    begin = time.monotonic()
    ours = target.generate(**inputs, max_new_tokens=480, max_time=0.05, assistant_model=draft, num_assistant_tokens=2)
    assert inputs["input_ids"].shape[1] < ours.shape[1] < inputs["input_ids"].shape[1] + 480
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma2", "gemma3n"])
def test_hidden_states_and_attentions_are_those_of_plain(kind):
    target = hf_speculate.enable(make_model(kind, attn_implementation="eager"))
    draft = noisy_copy(target, 0.02, seed=1)
    inputs = ragged_prompts(1, seed=20, min_len=10)
    plain, ours = plain_and_ours(
        target,
        draft,
        inputs,
        max_new_tokens=11,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
        num_assistant_tokens=K,
    )
    assert_equal_ids(plain.sequences, ours.sequences)
    for name in ("hidden_states", "attentions"):
        expected, got = getattr(plain, name), getattr(ours, name)
        assert len(expected) == len(got) == 11
        for one, other in zip(expected, got, strict=True):
            for layer, other_layer in zip(one, other, strict=True):
                assert layer.shape == other_layer.shape
                assert torch.allclose(layer, other_layer, atol=SCORE_TOLERANCE)


def test_an_attention_that_gives_no_weights_returns_none_as_in_plain():
    target = hf_speculate.enable(make_model("llama"))
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_attentions": True}
    plain, ours = plain_and_ours(target, noisy_copy(target), ragged_prompts(1, seed=20), **options)
    assert plain.attentions == ours.attentions


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
    inputs = ragged_prompts(2, seed=22)
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 10, "assistant_model": draft}
    first = target.generate(**inputs, **options, seed=3, num_assistant_tokens=3)
    again = target.generate(**inputs, **options, seed=3, num_assistant_tokens=3)
    other = target.generate(**inputs, **options, seed=4, num_assistant_tokens=3)
    assert first.shape == (8, inputs["input_ids"].shape[1] + 10)
    assert len({tuple(row) for row in first.tolist()}) > 4
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_greedy_decoding_leaves_torchs_generator_alone():
    target, draft = pair("llama")
    before = torch.get_rng_state()
    target.generate(**ragged_prompts(1, seed=1), max_new_tokens=5, assistant_model=draft, num_assistant_tokens=5)
    assert torch.equal(before, torch.get_rng_state())


def test_speculation_comes_with_the_output_object():
    target, draft = pair("llama")
    stats = hf_speculate.SpeculationStats()
    output = target.generate(
        **ragged_prompts(2, seed=25),
        max_new_tokens=12,
        assistant_model=draft,
        num_assistant_tokens=3,
        return_dict_in_generate=True,
        speculation_stats=stats,
    )
    assert output.speculation is stats
    assert stats.num_emitted == 2 * 11  # the first token of each row comes with the prompt's own forward
    assert stats.num_host_syncs == stats.num_batch_rounds + 1
    assert "verifier: greedy" in str(stats)


def test_prefill_in_chunks_gives_the_same_text():
    inputs = ragged_prompts(2, seed=26, min_len=10, max_len=20)
    options = {"max_new_tokens": 12, "prefill_chunk_size": 4, "num_assistant_tokens": 3}
    assert_decodes_as_plain(*pair("mistral_window"), inputs, **options)


def test_a_pad_id_outside_the_vocabulary_is_no_trouble():
    target, draft = pair("llama")
    inputs = ragged_prompts(1, seed=27)
    eos = common_ids("llama", inputs, 1)
    options = {"max_new_tokens": 14, "eos_token_id": eos, "pad_token_id": 64, "return_dict_in_generate": True}
    plain, ours = plain_and_ours(target, draft, inputs, output_scores=True, num_assistant_tokens=K, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    assert len(ours.scores) == len(plain.scores)


def test_a_large_bound_on_the_length_reserves_no_memory():
    target, draft = pair("llama")
    options = {"max_new_tokens": 10**12, "assistant_model": draft, "stopping_criteria": [StopAtSum()]}
    assert target.generate(**ragged_prompts(1, seed=1), **options, num_assistant_tokens=5).shape[1] < 200


def test_a_separate_copy_of_the_rows_on_the_host_gives_the_same_text(monkeypatch):
    """As with a target on an accelerator."""
    target, draft = pair("llama")
    inputs = ragged_prompts(4, seed=28)
    eos = common_ids("llama", inputs, 2)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": eos, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)

    def begin(batch, input_ids, *args):
        begin_on_host(batch, input_ids, *args)
        batch.host_tokens = TokenBuffer(input_ids)
        separated.append(batch)

    separated: list[Batch] = []
    begin_on_host = Batch.__init__
    monkeypatch.setattr(Batch, "__init__", begin)
    assert_equal_ids(plain, target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=K))
    assert separated[0].host_tokens is not separated[0].tokens


def test_statistics_are_reset_by_a_call_without_an_assistant():
    target, draft = pair("llama")
    stats = hf_speculate.SpeculationStats()
    inputs = ragged_prompts(1, seed=1)
    target.generate(**inputs, max_new_tokens=9, assistant_model=draft, num_assistant_tokens=5, speculation_stats=stats)
    assert stats.num_rounds > 0
    target.generate(**inputs, max_new_tokens=9, speculation_stats=stats)
    assert stats.num_rounds == 0


def test_lock_step_of_one_row_counts_what_a_row_on_its_own_counts():
    target, draft = pair("llama")
    alone, lock_step = hf_speculate.SpeculationStats(), hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 20, "assistant_model": draft, "num_assistant_tokens": K}
    inputs = ragged_prompts(1, seed=29)
    target.generate(**inputs, **options, speculation_stats=alone)
    target.generate(**inputs, **options, speculation_stats=lock_step, logits_processor=[Unchanged()])
    assert (lock_step.lock_step, alone.lock_step) == (True, False)
    assert lock_step.verified_per_position == alone.verified_per_position
    assert lock_step.accepted_per_position == alone.accepted_per_position


def test_lock_step_does_not_judge_what_a_neighbour_cut_off():
    """A row that was cut because its neighbour refused has accepted all that was judged of it."""
    target, draft = pair("llama")
    inputs = ragged_prompts(8, seed=30)
    options = {"max_new_tokens": 20, "assistant_model": draft, "num_assistant_tokens": K}
    alone, lock_step = hf_speculate.SpeculationStats(), hf_speculate.SpeculationStats()
    target.generate(**inputs, **options, speculation_stats=alone)
    target.generate(**inputs, **options, speculation_stats=lock_step, logits_processor=[Unchanged()])
    # 8 rows of 20 tokens; it was a third lower when wrong
    assert abs(lock_step.verified_acceptance_rate - alone.verified_acceptance_rate) < 0.2
    assert lock_step.num_host_syncs > 0
