"""Encoder-decoders decode as plain `generate` does: one encoder run, ragged rows, every kind of draft."""

import copy
from collections import Counter
from functools import cache, partial

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from tests.cases import DRAFT_NOISE, assert_decodes_as_plain, assert_equal_ids, pair, plain_and_ours
from tests.generation.test_law import joint_law, p_value
from tests.tiny import make_model, noisy_copy, ragged_prompts
from tests.tiny_encoders import NUM_FRAMES, START_TOKEN_ID, decoder_of, make_bart, make_t5, make_whisper, speech

NUM_NEW = 24
MAKERS = {"t5": make_t5, "bart": make_bart, "whisper": make_whisper}


@cache
def encoder_pair(kind):
    """An enabled target and a draft with an encoder of its own. Shared between tests: change neither."""
    target = hf_speculate.enable(MAKERS[kind]())
    return target, noisy_copy(target, DRAFT_NOISE)


def inputs_of(kind, batch_size):
    """What the encoder reads; text is padded on the right, as it is for encoders."""
    if kind == "whisper":
        return {"input_features": speech(batch_size, seed=batch_size)}
    inputs = ragged_prompts(batch_size, seed=batch_size)
    return {name: tensor.flip(1) for name, tensor in inputs.items()}


@pytest.mark.parametrize("kind", MAKERS)
def test_greedy_equals_plain(kind):
    target, draft = encoder_pair(kind)
    stats = assert_decodes_as_plain(target, draft, inputs_of(kind, 3), max_new_tokens=NUM_NEW, num_assistant_tokens=3)
    assert 0 < stats.num_accepted < stats.num_verified
    assert stats.cache == "dynamic"
    assert stats.lock_step == (kind == "bart")  # its positions are columns


def test_rejection_keeps_the_joint_law():
    """Of three tokens, over all texts; a law that the draft alone would give is told apart."""
    target = hf_speculate.enable(make_t5(vocab_size=6))
    draft = noisy_copy(target, 0.3)
    inputs = {"input_ids": torch.tensor([[2, 3, 4, 5]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}

    def law_of(model):
        def decode(ids):
            read = {name: tensor.expand(len(ids), -1) for name, tensor in inputs.items()}
            return model(**read, decoder_input_ids=ids)

        return joint_law(decode, 3, torch.tensor([[START_TOKEN_ID]]))

    counts: Counter = Counter()
    for seed in range(4):
        options = {"do_sample": True, "top_k": 0, "seed": seed, "num_return_sequences": 1000, "max_new_tokens": 3}
        texts = target.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=2)
        counts.update(map(tuple, texts[:, 1:].tolist()))
    assert p_value(counts, law_of(target)) > 1e-3
    assert p_value(counts, law_of(draft)) < 1e-9


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_prompts_of_the_decoder_may_be_padded(kind):
    prompts = {
        "decoder_input_ids": torch.tensor([[0, 0, 1, 9], [0, 1, 8, 4], [1, 7, 5, 3]]),
        "decoder_attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]),
    }
    assert_decodes_as_plain(
        *encoder_pair(kind), inputs_of(kind, 3) | prompts, max_new_tokens=NUM_NEW, num_assistant_tokens=3
    )


@pytest.mark.parametrize("kind", MAKERS)
def test_hidden_states_are_those_of_plain(kind):
    target, draft = encoder_pair(kind)
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": NUM_NEW}
    plain, ours = plain_and_ours(target, draft, inputs_of(kind, 1), **options, num_assistant_tokens=3)
    assert_equal_ids(plain.sequences, ours.sequences)
    torch.testing.assert_close(ours.decoder_hidden_states, plain.decoder_hidden_states)
    torch.testing.assert_close(ours.encoder_hidden_states, plain.encoder_hidden_states)
    assert ours.speculation.num_accepted > 0


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_several_sequences_of_one_input(kind):
    options = {"do_sample": True, "num_return_sequences": 2, "seed": 5, "verifier": "coupled", "max_new_tokens": 12}
    assert_decodes_as_plain(*encoder_pair(kind), inputs_of(kind, 2), **options, num_assistant_tokens=3)


@pytest.mark.parametrize("kind", MAKERS)
def test_each_encoder_runs_once(kind):
    target, draft = MAKERS[kind](), MAKERS[kind](seed=1)
    counts = {"target": 0, "draft": 0}
    for name, model in (("target", target), ("draft", draft)):

        def count(*_, name=name):
            counts[name] += 1

        model.get_encoder().register_forward_hook(count)
    hf_speculate.generate(
        target, **inputs_of(kind, 2), assistant_model=draft, num_assistant_tokens=3, max_new_tokens=10
    )
    assert counts == {"target": 1, "draft": 1}


def test_a_draft_with_the_targets_own_encoder_does_not_run_it_again():
    target, draft = make_t5(), make_t5(seed=1)
    draft.set_encoder(target.get_encoder())
    num_runs = []
    target.get_encoder().register_forward_hook(lambda *_: num_runs.append(1))
    inputs = inputs_of("t5", 2)
    ours = hf_speculate.generate(target, **inputs, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=10)
    assert len(num_runs) == 1
    assert_equal_ids(target.generate(**inputs, max_new_tokens=10), ours)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_decoder_that_shares_the_encoder_output_drafts(batch_size):
    target, whole = encoder_pair("whisper")
    inputs = inputs_of("whisper", batch_size)
    stats = assert_decodes_as_plain(target, decoder_of(whole), inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=4)
    assert stats.verified_acceptance_rate > 0.2  # it would guess one token in 64 without the target's encoder


@pytest.mark.parametrize("shares", ["nothing", "the encoder", "the output"])
def test_drafts_of_another_dtype_read_the_speech_in_theirs(shares):
    target, whole = encoder_pair("whisper")
    draft = (decoder_of(whole) if shares == "the output" else copy.deepcopy(whole)).to(torch.float32)
    if shares == "the encoder":
        draft.model.encoder = target.get_encoder()
    kept = []
    handle = target.get_encoder().register_forward_hook(lambda *args: kept.append((args[2], args[2][0].clone())))
    inputs = inputs_of("whisper", 3)
    stats = assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=4)
    handle.remove()
    assert stats.verified_acceptance_rate > 0.2
    assert len(kept) == 2
    for outputs, state in kept:  # the target's own output is what it was
        assert outputs[0].dtype == torch.float64
        assert torch.equal(outputs[0], state)


def test_a_passed_cache_is_brought_back_after_an_error():
    target, draft = encoder_pair("t5")
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def fail(input_ids, scores):
        if input_ids.shape[1] > 5:
            raise KeyError("no more")
        return scores

    options = {"max_new_tokens": 12, "assistant_model": draft, "num_assistant_tokens": 4, "past_key_values": cache}
    with pytest.raises(KeyError, match="no more"):
        target.generate(**inputs_of("t5", 1), **options, logits_processor=[fail])
    assert cache.get_seq_length() == cache.cross_attention_cache.get_seq_length() == 0
    assert not any(cache.is_updated.values())
    ours = target.generate(**inputs_of("t5", 1), **options)
    assert_equal_ids(target.generate(**inputs_of("t5", 1), max_new_tokens=12), ours)


def test_passed_encoder_outputs():
    target, draft = encoder_pair("t5")
    inputs = inputs_of("t5", 2)
    outputs = target.get_encoder()(**inputs)
    given = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}
    with pytest.raises(UnsupportedGenerationError, match="must be left out for a draft with an encoder of its own"):
        target.generate(**given, assistant_model=draft, max_new_tokens=4)
    plain, ours = plain_and_ours(target, pair("llama")[1], given, max_new_tokens=12)
    assert_equal_ids(plain, ours)


WHISPER_CALLS = {
    "processors": {"max_new_tokens": 40, "return_timestamps": False},
    "timestamps": {"max_new_tokens": 40, "return_timestamps": True},
    "prompt ids": {"max_new_tokens": NUM_NEW, "prompt_ids": torch.tensor([44, 11, 12])},
    "silence detection": {  # asked as in plain decoding
        "max_new_tokens": 16,
        "return_timestamps": True,
        "no_speech_threshold": 0.01,
        "logprob_threshold": 0.0,
        "temperature": 0.0,
    },
}


@pytest.mark.parametrize("name", WHISPER_CALLS)
def test_calls_of_whisper_alone_are_plains(name):
    target, draft = encoder_pair("whisper")
    inputs, options = inputs_of("whisper", 1 if name == "processors" else 2), WHISPER_CALLS[name]
    stats = assert_decodes_as_plain(target, draft, inputs, **options, num_assistant_tokens=3)
    assert stats.lock_step == (name == "silence detection")
    ids = target.generate(**inputs, **options)
    assert name == "prompt ids" or not torch.isin(ids, torch.tensor([5, 9])).any()


@pytest.mark.parametrize(("batch_size", "conditioned"), [(1, True), (2, False)])
def test_whispers_long_form(batch_size, conditioned):
    mask, reports = torch.ones(batch_size, 3 * NUM_FRAMES, dtype=torch.int64), []
    mask[0, 2 * NUM_FRAMES :] = 0
    stats = assert_decodes_as_plain(
        *encoder_pair("whisper"),
        {"input_features": speech(batch_size, num_frames=3 * NUM_FRAMES, seed=4), "attention_mask": mask},
        return_timestamps=True,
        condition_on_prev_tokens=conditioned,
        max_new_tokens=20,
        num_assistant_tokens=3,
        speculation_callback=reports.append,
    )
    assert stats.num_emitted > 20 * batch_size  # the rounds of all windows
    assert len(stats.draft_lens) == stats.num_batch_rounds == len(reports)
    assert [report.num_round for report in reports].count(1) > 1  # each run counts its own


def test_whispers_fallback_over_temperatures_draws_anew():
    target, draft = encoder_pair("whisper")
    options = {
        "temperature": (0.0, 0.7, 1.0),
        "logprob_threshold": 0.0,  # no text is as likely: every temperature is tried
        "max_new_tokens": 16,
        "assistant_model": draft,
        "num_assistant_tokens": 3,
    }
    texts = [target.generate(**inputs_of("whisper", 2), **options, seed=seed) for seed in (1, 1, 2)]
    assert_equal_ids(texts[0], texts[1])
    assert texts[0].shape != texts[2].shape or not torch.equal(texts[0], texts[2])


def test_whispers_output_object_has_statistics():
    target, draft = encoder_pair("whisper")
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 12}
    plain, ours = plain_and_ours(target, draft, inputs_of("whisper", 2), **options, num_assistant_tokens=3)
    assert_equal_ids(plain.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(plain.scores))
    assert ours.speculation.num_accepted > 0


def test_whisper_is_left_as_it_was():
    target, draft = hf_speculate.enable(make_whisper()), make_whisper(seed=1)
    settings = [model.generation_config.to_dict() for model in (target, draft)]
    configs = [model.config.to_dict() for model in (target, draft)]
    target.generate(**inputs_of("whisper", 1), assistant_model=draft, num_assistant_tokens=3, max_new_tokens=8)
    assert [model.generation_config.to_dict() for model in (target, draft)] == settings
    assert [model.config.to_dict() for model in (target, draft)] == configs


def test_what_is_refused():
    target, draft = encoder_pair("t5")
    inputs = inputs_of("t5", 1)
    whisper, _ = encoder_pair("whisper")
    for options, message in (
        ({"output_attentions": True}, "output_attentions must be left out for an encoder-decoder"),
        ({"num_beams": 2}, "the generation mode must be greedy or sampling"),
    ):
        with pytest.raises(UnsupportedGenerationError, match=message):
            target.generate(**inputs, assistant_model=draft, return_dict_in_generate=True, **options)
    with pytest.raises(UnsupportedGenerationError, match="return_token_timestamps must be left out"):
        whisper.generate(**inputs_of("whisper", 1), assistant_model=whisper, return_token_timestamps=True)
    for model, assistant, message in (
        (pair("llama")[0], draft, "must read what the target LlamaForCausalLM reads, got the encoder-decoder T5For"),
        (target, whisper, "must read what the target T5ForConditionalGeneration reads, got the encoder-decoder Whisp"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            model.generate(**inputs, assistant_model=assistant, max_new_tokens=4)
    with pytest.raises(UnsupportedModelError, match="must read what the target WhisperForConditionalGeneration reads"):
        whisper.generate(**inputs_of("whisper", 1), assistant_model=make_whisper(num_mel_bins=4), max_new_tokens=4)
    narrow = decoder_of(make_whisper(d_model=16))
    with pytest.raises(UnsupportedModelError, match="must attend to the 32 numbers that the encoder of WhisperFor"):
        whisper.generate(**inputs_of("whisper", 1), assistant_model=narrow, max_new_tokens=4)
    with pytest.raises(UnsupportedModelError, match="speculation_cache must be auto or dynamic for T5For"):
        target.generate(**inputs, assistant_model=draft, speculation_cache="preallocated", max_new_tokens=4)


@pytest.mark.parametrize(
    ("kind", "batch_size", "with_draft"), [("t5", 3, False), ("bart", 1, True), ("whisper", 3, True)]
)
def test_copies_from_the_decoders_text(kind, batch_size, with_draft):
    target, draft = encoder_pair(kind)
    inputs, store = inputs_of(kind, batch_size), hf_speculate.SuffixStore()
    store.add(target.generate(**inputs, max_new_tokens=NUM_NEW)[0].tolist())
    options = {"prompt_lookup_num_tokens": 5, "suffix_store": store, "num_assistant_tokens_schedule": "constant"}
    options |= {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 2 if with_draft else None}
    stats = assert_decodes_as_plain(target, draft if with_draft else None, inputs, **options)
    assert stats.num_accepted > 0


@pytest.mark.parametrize("makes", ["copies", "drafts"])
def test_candidate_generators(makes):
    target, draft = encoder_pair("t5")
    inputs = inputs_of("t5", 1)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    stats = hf_speculate.SpeculationStats()
    generator = PromptLookupCandidateGenerator(max_length=99)
    if makes == "drafts":
        if Version(transformers.__version__) < Version("5.18"):
            pytest.skip("transformers 5.17 crops a cache of the draft's cross-attention that is not there yet")
        generator = partial(AssistedCandidateGenerator, assistant_model=draft)
    ours = target.generate(
        **inputs, max_new_tokens=NUM_NEW, speculation_stats=stats, candidate_generator=generator, num_assistant_tokens=3
    )
    assert_equal_ids(plain, ours)
    assert makes == "copies" or stats.num_accepted > 0


@pytest.mark.parametrize("size", [62, 72])
def test_a_draft_with_an_encoder_whose_table_ends_elsewhere(size):
    target, draft = encoder_pair("t5")[0], make_t5(vocab_size=size)
    with pytest.warns(UserWarning, match=f"the target has 64 ids and the draft {size}"):
        stats = assert_decodes_as_plain(target, draft, inputs_of("t5", 2), max_new_tokens=NUM_NEW)
    assert stats.num_drafted > 0


def test_a_text_model_still_refuses_unknown_arguments():
    target, draft = make_model("llama"), pair("llama")[1]
    with pytest.raises(UnsupportedModelError, match="must read what the target"):
        hf_speculate.generate(target, **ragged_prompts(1), assistant_model=make_t5(vocab_size=65))
    with pytest.raises(ValueError, match="encoder_outputs"):
        hf_speculate.generate(target, **ragged_prompts(1), assistant_model=draft, encoder_outputs=torch.zeros(1))
