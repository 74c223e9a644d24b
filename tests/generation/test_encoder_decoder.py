"""Compare encoder-decoders with plain `generate`: one encoder run, ragged rows, every draft."""

import copy
from functools import cache

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import SpeculateError
from tests.cases import (
    DRAFT_NOISE,
    assert_decodes_as_plain,
    assert_equal_ids,
    each_value,
    pair,
    plain_and_ours,
)
from tests.reliability.faults import Fault, FaultyCriterion
from tests.support.tiny import noisy_copy, ragged_prompts
from tests.support.tiny_encoders import (
    NUM_FRAMES,
    decoder_of,
    make_bart,
    make_t5,
    make_whisper,
    speech,
)

NUM_NEW = 24
MAKERS = {"t5": make_t5, "bart": make_bart, "whisper": make_whisper}


@cache
def encoder_pair(family):
    """Return an enabled target and a draft with an encoder. Tests share them: change neither."""
    target = hf_speculate.enable(MAKERS[family]())
    return target, noisy_copy(target, DRAFT_NOISE)


def inputs_of(family, batch_size):
    """Return the encoder's inputs; text is right-padded, as is usual for encoders."""
    if family == "whisper":
        return {"input_features": speech(batch_size, seed=batch_size)}
    inputs = ragged_prompts(batch_size, seed=batch_size)
    return {name: tensor.flip(1) for name, tensor in inputs.items()}


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("family", MAKERS)
def test_greedy_equals_plain(family):
    target, draft = encoder_pair(family)
    stats = assert_decodes_as_plain(
        target, draft, inputs_of(family, 3), max_new_tokens=NUM_NEW, num_assistant_tokens=3
    )
    assert 0 < stats.num_accepted < stats.num_verified
    assert stats.cache == "dynamic"
    assert stats.lock_step == (family == "bart")  # BART uses columns as positions


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_padded_decoder_prompts_equal_plain(family):
    ids = torch.tensor([[0, 0, 1, 9], [0, 1, 8, 4], [1, 7, 5, 3]])
    prompts = {"decoder_input_ids": ids, "decoder_attention_mask": (ids > 0).long()}
    assert_decodes_as_plain(
        *encoder_pair(family), inputs_of(family, 3) | prompts, max_new_tokens=NUM_NEW
    )


@pytest.mark.parametrize("family", MAKERS)
def test_hidden_states_equal_plain(family):
    target, draft = encoder_pair(family)
    options = {
        "output_hidden_states": True,
        "return_dict_in_generate": True,
        "max_new_tokens": NUM_NEW,
    }
    plain, ours = plain_and_ours(
        target, draft, inputs_of(family, 1), **options, num_assistant_tokens=3
    )
    assert_equal_ids(plain.sequences, ours.sequences)
    torch.testing.assert_close(ours.decoder_hidden_states, plain.decoder_hidden_states)
    torch.testing.assert_close(ours.encoder_hidden_states, plain.encoder_hidden_states)
    assert ours.speculation.num_accepted > 0


@each_value(shares=["nothing", "the encoder", "the output"], dtype=[torch.float32, torch.float64])
def test_encoder_runs_once_and_drafts_read_its_states(shares, dtype):
    target, whole = encoder_pair("whisper")
    draft = (decoder_of(whole) if shares == "the output" else copy.deepcopy(whole)).to(dtype)
    if shares == "the encoder":
        draft.model.encoder = target.get_encoder()
    inputs, outputs, own = inputs_of("whisper", 3), [], []
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    encoder, stats = target.get_encoder(), hf_speculate.SpeculationStats()
    handle = encoder.register_forward_hook(
        lambda *args: outputs.append((args[2][0], args[2][0].clone()))
    )
    if shares == "nothing":
        draft.get_encoder().register_forward_hook(lambda *_: own.append(1))
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 4, "speculation_stats": stats}
    assert_equal_ids(plain, target.generate(**inputs, **options, assistant_model=draft))
    handle.remove()
    # Without the target's encoder output, the draft would guess one token in 64.
    assert stats.verified_acceptance_rate > 0.2
    assert len(own) == (shares == "nothing")
    ((output, state),) = outputs  # the target's output is unchanged
    assert output.dtype == torch.float64
    assert torch.equal(output, state)


@pytest.mark.fallback("lock step")
def test_passed_cache_is_restored_after_an_error():
    target, draft = encoder_pair("t5")
    cache, inputs = EncoderDecoderCache(DynamicCache(), DynamicCache()), inputs_of("t5", 1)
    options = {
        "max_new_tokens": 12,
        "assistant_model": draft,
        "num_assistant_tokens": 4,
        CACHE_NAME: cache,
    }
    with pytest.raises(RuntimeError, match="on purpose"):
        target.generate(
            **inputs,
            **options,
            stopping_criteria=[FaultyCriterion(Fault(5, RuntimeError("on purpose")))],
        )
    assert cache.get_seq_length() == cache.cross_attention_cache.get_seq_length() == 0
    assert not any(cache.is_updated.values())
    assert_equal_ids(
        target.generate(**inputs, max_new_tokens=12), target.generate(**inputs, **options)
    )


def test_passed_encoder_outputs_equal_plain():
    target, draft = encoder_pair("t5")
    inputs = inputs_of("t5", 2)
    arguments = {
        "encoder_outputs": target.get_encoder()(**inputs),
        "attention_mask": inputs["attention_mask"],
    }
    assert_decodes_as_plain(target, pair("llama")[1], arguments, max_new_tokens=12)
    with pytest.raises(
        SpeculateError, match="must be left out for a draft with an encoder of its own"
    ):
        target.generate(**arguments, assistant_model=draft, max_new_tokens=4)


SILENCE = {
    "return_timestamps": True,
    "no_speech_threshold": 0.01,
    "logprob_threshold": 0.0,
    "temperature": 0.0,
}


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("options", [{"prompt_ids": torch.tensor([44, 11, 12])}, SILENCE])
def test_whisper_options_equal_plain(options):
    stats = assert_decodes_as_plain(
        *encoder_pair("whisper"), inputs_of("whisper", 2), max_new_tokens=24, **options
    )
    assert stats.lock_step == (options is SILENCE)


@pytest.mark.parametrize(("batch_size", "conditioned"), [(1, True), (2, False)])
def test_whisper_long_form_equals_plain(batch_size, conditioned):
    mask, reports = torch.ones(batch_size, 3 * NUM_FRAMES, dtype=torch.int64), []
    mask[0, 2 * NUM_FRAMES :] = 0
    inputs = {
        "input_features": speech(batch_size, num_frames=3 * NUM_FRAMES, seed=4),
        "attention_mask": mask,
    }
    options = {
        "return_timestamps": True,
        "condition_on_prev_tokens": conditioned,
        "max_new_tokens": 20,
    }
    stats = assert_decodes_as_plain(
        *encoder_pair("whisper"), inputs, **options, speculation_callback=reports.append
    )
    assert stats.num_emitted > 20 * batch_size  # counts the rounds of all windows
    assert len(stats.draft_lens) == stats.num_batch_rounds == len(reports)
    # each run numbers its rounds from 1
    assert [report.num_round for report in reports].count(1) > 1


@pytest.mark.parametrize(
    ("family", "make_draft", "message"),
    [
        (
            "t5",
            make_whisper,
            "must read what the target T5ForConditionalGeneration reads, got .* Whisper",
        ),
        ("whisper", lambda: make_whisper(num_mel_bins=4), "must read what the target Whisper"),
        ("whisper", lambda: decoder_of(make_whisper(d_model=16)), "must attend to the 32 numbers"),
    ],
)
def test_unsupported_drafts_and_models_raise(family, make_draft, message):
    with pytest.raises(SpeculateError, match=message):
        encoder_pair(family)[0].generate(
            **inputs_of(family, 1), assistant_model=make_draft(), max_new_tokens=4
        )


def test_whisper_token_timestamps_are_not_supported():
    target, draft = encoder_pair("whisper")
    with pytest.raises(SpeculateError, match="return_token_timestamps must be left out"):
        target.generate(
            **inputs_of("whisper", 1), assistant_model=draft, return_token_timestamps=True
        )


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_matches_in_the_decoder_text_are_drafted(family):
    target, inputs = encoder_pair(family)[0], inputs_of(family, 3)
    store = hf_speculate.SuffixStore()
    store.add(target.generate(**inputs, max_new_tokens=NUM_NEW)[0].tolist())
    options = {"prompt_lookup_num_tokens": 5, "suffix_store": store, "max_new_tokens": NUM_NEW}
    assert assert_decodes_as_plain(target, None, inputs, **options).num_accepted > 0


def test_draft_encoder_may_have_another_position_table():
    target, draft = encoder_pair("t5")[0], make_t5(vocab_size=62)
    with pytest.warns(UserWarning, match="the target has 64 ids and the draft 62"):
        stats = assert_decodes_as_plain(target, draft, inputs_of("t5", 2), max_new_tokens=NUM_NEW)
    assert stats.num_drafted > 0


def test_trainer_predicts_the_same_with_drafts(tmp_path):
    """Pass the labels to `generate()` as well, as a training loop does."""
    target, stats = hf_speculate.enable(make_t5()), hf_speculate.SpeculationStats()
    rows = zip(*ragged_prompts(4, seed=2).values(), strict=True)
    data = [{"input_ids": ids, "attention_mask": mask, "labels": ids} for ids, mask in rows]
    trainer = Seq2SeqTrainer(
        target, Seq2SeqTrainingArguments(tmp_path, predict_with_generate=True, use_cpu=True)
    )
    own = {
        "assistant_model": noisy_copy(target),
        "num_assistant_tokens": 3,
        "speculation_stats": stats,
    }
    plain, ours = (trainer.predict(data, max_new_tokens=12, **more) for more in ({}, own))
    assert_equal_ids(*(torch.tensor(output.predictions) for output in (plain, ours)))
    assert plain.metrics["test_loss"] == ours.metrics["test_loss"]
    assert stats.num_accepted > 0


@pytest.mark.parametrize("field", ["seed", "num_assistant_tokens"])
def test_per_row_lists_are_refused_for_long_audio(field):
    target, draft = encoder_pair("whisper")
    short, long = (speech(2, num_frames=num * NUM_FRAMES, seed=4) for num in (1, 3))
    options = {
        "assistant_model": draft,
        "max_new_tokens": 4,
        "num_assistant_tokens": 3,
        field: [3, 4],
    }
    target.generate(short, **options)
    for inputs, draft_options in (
        (long, {}),
        (short, {"return_timestamps": True}),
        (short, {"temperature": (0.0, 0.2)}),
    ):
        stats = hf_speculate.SpeculationStats()
        with pytest.raises(SpeculateError, match=f"{field} must be one number for audio"):
            target.generate(inputs, **options, **draft_options, speculation_stats=stats)
        assert stats.num_rounds == 0
    one_number = {**options, field: 3}
    target.generate(
        long,
        attention_mask=torch.ones(2, 3 * NUM_FRAMES).long(),
        return_timestamps=True,
        **one_number,
    )
