"""Compare options that steer or end a text, or extend the output, with plain `generate`."""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import (
    Streamed,
    assert_decodes_as_plain,
    assert_equal_ids,
    each_value,
    pair,
    plain_and_ours,
)
from tests.compatibility_rows import CHARACTERS, TOKENIZER
from tests.support.tiny import make_model, make_small_model, noisy_copy, ragged_prompts
from tests.support.tiny_tokenizers import byte_level_tokenizer

K = 4
NUM_NEW = 24
# Scores are rounded to float32, whose resolution is 1e-6 at these magnitudes.
SCORE_TOLERANCE = 1e-5


def new_ids(inputs: dict, row: int = 0) -> list[int]:
    """Return the greedy text of a row that no EOS ends."""
    return (
        pair("llama")[0]
        .generate(**inputs, max_new_tokens=NUM_NEW)[row, inputs["input_ids"].shape[1] :]
        .tolist()
    )


@pytest.mark.parametrize("num_new", [1, 2, 7])
def test_max_new_tokens_is_exact_also_for_int32_prompts(num_new):
    inputs = ragged_prompts(2, seed=13)
    inputs["input_ids"] = inputs["input_ids"].int()
    plain, ours = plain_and_ours(
        *pair("qwen2"), inputs, max_new_tokens=num_new, num_assistant_tokens=K
    )
    assert_equal_ids(plain, ours)
    assert plain.dtype == ours.dtype


def test_max_time_stops_soon():
    target, draft = pair("llama")
    inputs, num_new = ragged_prompts(1, seed=18), 480
    draft_options = {"assistant_model": draft, "num_assistant_tokens": 2}
    ours = target.generate(**inputs, max_new_tokens=num_new, max_time=0.05, **draft_options)
    assert inputs["input_ids"].shape[1] < ours.shape[1] < inputs["input_ids"].shape[1] + num_new


@each_value(batch_size=[1, 3], num_assistant_tokens=[2, 8], eos_token_id=[None, 63])
def test_stop_strings_end_the_text_as_in_plain(batch_size, num_assistant_tokens, eos_token_id):
    inputs = ragged_prompts(batch_size, seed=31)
    stop = "".join(CHARACTERS[token_id] for token_id in new_ids(inputs)[8:10])  # spans two tokens
    options = {
        "max_new_tokens": NUM_NEW,
        "stop_strings": [stop],
        "tokenizer": TOKENIZER,
        "eos_token_id": eos_token_id,
    }
    options |= {"num_assistant_tokens": num_assistant_tokens, "pad_token_id": 0}
    assert_decodes_as_plain(*pair("llama"), inputs, **options)


def test_drafts_cut_off_by_a_stop_are_not_accepted():
    target, _ = pair("llama")
    inputs, stats = ragged_prompts(1, seed=31), hf_speculate.SpeculationStats()
    stop = "".join(CHARACTERS[token_id] for token_id in new_ids(inputs)[8:10])
    options = {
        "max_new_tokens": NUM_NEW,
        "stop_strings": [stop],
        "tokenizer": TOKENIZER,
        "num_assistant_tokens": 6,
    }
    target.generate(
        **inputs, **options, assistant_model=noisy_copy(target, 0.0), speculation_stats=stats
    )
    # The prefill emits 1 token, the first round emits 6 drafted tokens and 1 target token, and the
    # next round emits 2 of its 6 drafted tokens.
    assert (stats.num_emitted, stats.num_accepted, stats.num_verified, stats.num_rounds) == (
        9,
        8,
        8,
        2,
    )


class Recorder(LogitsProcessor):
    """Custom processor that forbids the successor of the last id.

    It records its inputs.
    """

    def __init__(self):
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores.scatter(1, ((input_ids[:, -1:] + 1) % scores.shape[1]), -torch.inf)


class StopAtSum(StoppingCriteria):
    """Custom criterion that ends a row if its last three ids add up to a multiple of seven.

    It returns its result in the given form.
    """

    def __init__(self, answer=lambda stops: stops):
        self.seen: list[list[list[int]]] = []
        self.answer = answer

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return self.answer(input_ids[:, -3:].sum(1) % 7 == 0)


PureStop = hf_speculate.register_row_wise(type("PureStop", (StopAtSum,), {}))


@pytest.mark.fallback("lock step")
@each_value(batch_size=[1, 3], eos_token_id=[None, 17])
def test_custom_processors_and_criteria_are_called_as_in_plain(batch_size, eos_token_id):
    target, draft = pair("llama")
    seen, texts, stats = [], [], hf_speculate.SpeculationStats()
    for draft_options in (
        {},
        {"assistant_model": draft, "num_assistant_tokens": K, "speculation_stats": stats},
    ):
        processor, criterion = Recorder(), StopAtSum()
        draft_options |= {
            "logits_processor": [processor],
            "stopping_criteria": [criterion],
            "eos_token_id": eos_token_id,
        }
        texts.append(
            target.generate(
                **ragged_prompts(batch_size, seed=16), max_new_tokens=NUM_NEW, **draft_options
            )
        )
        seen.append((processor.seen, criterion.seen))
    assert_equal_ids(*texts)
    assert seen[0] == seen[1]
    assert stats.lock_step
    assert "Recorder, StopAtSum" in stats.fallbacks[0]
    assert stats.num_batch_rounds < len(seen[1][0])


@pytest.mark.fallback("lock step")
@each_value(
    batch_size=[1, 3],
    criterion=[StopAtSum, PureStop],
    answer=[lambda stops: stops.to(torch.uint8), lambda stops: stops.long() + 2, lambda stops: 0],
)
def test_criteria_may_return_numbers(answer, criterion, batch_size):
    inputs = ragged_prompts(batch_size, seed=14)
    options = {
        "max_new_tokens": NUM_NEW,
        "eos_token_id": 17,
        "stopping_criteria": [criterion(answer)],
    }
    stats = assert_decodes_as_plain(*pair("llama"), inputs, **options, num_assistant_tokens=K)
    assert stats.num_rounds > 1  # otherwise, stopping at once would be correct


@each_value(batch_size=[1, 4], eos_token_id=[17, None])
def test_stopped_rows_without_eos_continue_as_in_plain(batch_size, eos_token_id):
    options = {
        "max_new_tokens": NUM_NEW,
        "eos_token_id": eos_token_id,
        "return_dict_in_generate": True,
    }
    # Of four rows, some are ahead of the common end and some are behind it.
    inputs = ragged_prompts(batch_size, seed=41)
    plain, ours = plain_and_ours(*pair("llama"), inputs, **options, stopping_criteria=[PureStop()])
    assert_equal_ids(plain.sequences, ours.sequences)
    # Otherwise, no row could be ahead of the end.
    assert plain.sequences.shape[1] < inputs["input_ids"].shape[1] + NUM_NEW
    assert not ours.speculation.lock_step
    for layer, our_layer in zip(plain[CACHE_NAME].layers, ours[CACHE_NAME].layers, strict=True):
        torch.testing.assert_close(our_layer.keys, layer.keys)


@pytest.mark.fallback("lock step")
def test_processor_writing_into_its_scores_leaves_the_logits():
    """Decode in float32, because logits in other dtypes are copied anyway."""
    target, draft = pair("llama", dtype=torch.float32)
    options = {
        "max_new_tokens": 6,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
    }
    options |= {
        "logits_processor": [lambda ids, scores: scores.clamp_(max=1.0)],
        "num_assistant_tokens": K,
    }
    ours = target.generate(**ragged_prompts(2, seed=17), **options, assistant_model=draft)
    assert torch.stack(ours.scores).max() == 1.0 < torch.stack(ours.logits).max()


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma3n", "qwen3_5", "falcon_h1"])
def test_hidden_states_and_attentions_equal_plain(family):
    target = hf_speculate.enable(make_model(family, attn_implementation="eager"))
    draft, inputs = noisy_copy(target, 0.02, seed=1), ragged_prompts(1, seed=20, min_len=10)
    options = {
        "output_hidden_states": True,
        "output_attentions": True,
        "return_dict_in_generate": True,
    }
    plain, ours = plain_and_ours(
        target, draft, inputs, **options, max_new_tokens=11, num_assistant_tokens=K
    )
    assert_equal_ids(plain.sequences, ours.sequences)
    tolerance = {"atol": SCORE_TOLERANCE, "rtol": SCORE_TOLERANCE}
    torch.testing.assert_close(ours.hidden_states, plain.hidden_states, **tolerance)
    torch.testing.assert_close(ours.attentions, plain.attentions, **tolerance)


def test_streamer_gets_tokens_one_by_one_as_in_plain():
    target, draft = pair("llama")
    inputs = ragged_prompts(1, seed=21)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": new_ids(inputs)[9]}
    streams = [Streamed(), Streamed()]
    target.generate(**inputs, **options, streamer=streams[0])
    target.generate(
        **inputs, **options, streamer=streams[1], assistant_model=draft, num_assistant_tokens=5
    )
    assert streams[0].values == streams[1].values
    assert streams[1].has_ended


def test_output_object_holds_the_statistics():
    target, draft = pair("llama")
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "speculation_stats": stats}
    output = target.generate(
        **ragged_prompts(2, seed=25), **options, assistant_model=draft, num_assistant_tokens=3
    )
    assert output.speculation is stats
    assert stats.num_host_syncs == stats.num_batch_rounds + 1
    assert "verifier: greedy" in str(stats)
    target.generate(**ragged_prompts(1), max_new_tokens=3, speculation_stats=stats)
    assert stats.num_rounds == 0


@pytest.mark.fallback("lock step")
def test_large_length_bound_reserves_no_memory():
    target, draft = pair("llama")
    options = {
        "max_new_tokens": 10**12,
        "assistant_model": draft,
        "stopping_criteria": [StopAtSum()],
    }
    assert (
        target.generate(**ragged_prompts(1, seed=1), **options, num_assistant_tokens=5).shape[1]
        < 200
    )


@pytest.fixture(scope="module")
def healed():
    """Return a tokenizer with words that are prefixes of other words, and models of its size."""
    words = ["http", "https", "https:", "hell", "hello", "help", " se", " see", " the", " their"]
    tokenizer = byte_level_tokenizer(words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    target = make_small_model(len(tokenizer), seed=6)
    target.generation_config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, hf_speculate.enable(target), noisy_copy(target, 0.1)


@pytest.mark.parametrize(
    ("prompts", "is_healed"), [(["go to http", "say hell", "I see the"], True), (["x y z"], False)]
)
def test_healed_prompt_equals_plain(healed, prompts, is_healed):
    tokenizer, target, draft = healed
    inputs = dict(tokenizer(prompts, return_tensors="pt", padding=True))
    options = {
        "token_healing": True,
        "tokenizer": tokenizer,
        "max_new_tokens": 12,
        "num_assistant_tokens": 3,
    }
    assert_decodes_as_plain(target, draft, inputs, **options)
    prompt = target.generate(**inputs, **options)[:, : inputs["input_ids"].shape[1]]
    assert torch.equal(prompt, inputs["input_ids"]) != is_healed


def healing_call(tokenizer, draft):
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 8}
    options |= {"assistant_model": draft, "num_assistant_tokens": 3}
    return dict(tokenizer(["go to http"], return_tensors="pt")) | options


def test_healed_tokens_are_streamed(healed):
    tokenizer, target, draft = healed
    streamed = Streamed()
    ids = target.generate(**healing_call(tokenizer, draft), streamer=streamed)
    assert streamed.ids == ids[0].tolist()


def test_token_healing_needs_an_enabled_model(healed):
    tokenizer, _, draft = healed
    model, call = make_small_model(len(tokenizer), seed=6), healing_call(tokenizer, draft)
    with pytest.raises(
        UnsupportedGenerationError, match="token_healing must be left out for a model that is not"
    ):
        hf_speculate.generate(model, **call)


def test_num_assistant_tokens_zero_drafts_nothing():
    target, draft = pair("llama")
    for source, draft_options in (
        (draft, {}),
        (draft, {"prompt_lookup_num_tokens": 4}),
        (None, {"prompt_lookup_num_tokens": 4}),
        (draft, {"num_assistant_tokens_schedule": "heuristic"}),
    ):
        options = {"num_assistant_tokens": 0, "max_new_tokens": NUM_NEW, **draft_options}
        assert (
            assert_decodes_as_plain(
                target, source, ragged_prompts(2, seed=5), **options
            ).num_drafted
            == 0
        )
