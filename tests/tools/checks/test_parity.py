"""`check_parity` tells ties from bugs."""

from functools import partial

import pytest
import torch
from transformers import LogitsProcessor

import hf_speculate
from tests.cases import KeepsAll, pair
from tests.tiny import PAD_TOKEN_ID, make_model, noisy_copy, ragged_prompts
from tests.tiny_encoders import (
    IMAGE_TOKEN_ID,
    START_TOKEN_ID,
    make_bart,
    make_llava,
    make_qwen2_vl,
    make_t5,
    make_whisper,
    picture_prompts,
    speech,
    text_draft,
)
from tests.tools.checks.tokenizers import word_tokenizer

NUM_NEW = 24
ROUNDING = 1e-5  # of a difference of logits in float32
TWIN, TWIN_OF = 41, 17  # two tokens that are made to tie


class _TakesTwin:
    """Greedy, but where the best token has a twin it takes that one."""

    def verify(self, target_logits, draft, keys):
        best = target_logits.argmax(-1)  # [B, K+1]
        best = best.where(best != TWIN_OF, TWIN)
        return hf_speculate.keep_prefix(target_logits, draft, draft.token_ids == best[:, :-1], best)


@pytest.fixture(autouse=True)
def _verifiers(registry):
    hf_speculate.register_verifier("keeps all", lambda config: KeepsAll(), lossless=True)
    hf_speculate.register_verifier("takes the twin", lambda config: _TakesTwin(), lossless=True)


def _read_wrong_states(module, args, kwargs):
    """Put cached values in another order before a forward over several tokens."""
    cache, ids = kwargs.get("past_key_values"), kwargs["input_ids"]
    if cache is not None and cache.get_seq_length() and ids.shape[1] > 1:
        cache.layers[0].values = cache.layers[0].values.flip(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_target_that_reads_wrong_states_is_a_bug(dtype):
    model = make_model("llama", dtype=dtype)
    draft = noisy_copy(model)
    model.register_forward_pre_hook(_read_wrong_states, with_kwargs=True)
    report = hf_speculate.check_parity(
        model, draft, ragged_prompts(3), max_new_tokens=NUM_NEW, num_assistant_tokens=4, speculation_cache="dynamic"
    )
    assert not report.ok
    assert any("in float64 too" in row.reason for row in report.rows)
    assert all(row.verdict != "tie" for row in report.rows)


class _Bans(LogitsProcessor):
    """Forbids one token."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([TWIN]), -torch.inf)


@pytest.mark.parametrize(
    ("dtype", "distance", "verdict", "processors"),
    [
        (torch.bfloat16, 0.0, "tie", []),
        (torch.bfloat16, 2**-9, "tie", []),  # a quarter of what bfloat16 tells apart
        (torch.bfloat16, 0.5, "bug", []),
        (torch.bfloat16, 0.0, "bug", [_Bans()]),
        (torch.float32, 0.0, "tie", []),
        (torch.float32, 2**-9, "bug", []),
        (torch.float64, 0.0, "tie", []),
        (torch.float64, 2**-30, "tie", []),  # scores are float32
        (torch.float64, 2**-9, "bug", []),
    ],
)
def test_a_distance_is_a_tie_where_the_dtype_rounds_it_away(dtype, distance, verdict, processors):
    model = make_model("llama", dtype=torch.float64, vocab_size=48)
    weight = model.get_output_embeddings().weight
    weight[TWIN] = weight[TWIN_OF] * (1 - distance)
    model.to(dtype)
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 4, "verifier": "takes the twin"}
    prompts = ragged_prompts(24, vocab_size=48)
    report = hf_speculate.check_parity(model, noisy_copy(model, 0.0), prompts, **options, logits_processor=processors)
    twins = [row for row in report.rows if row.speculative_id == TWIN and row.plain_id == TWIN_OF]
    assert len(twins) > 2
    assert {row.verdict for row in twins} == {verdict}
    assert report.ok == (verdict == "tie")
    for row in twins:
        assert (row.gap <= row.bound) == (verdict == "tie")
        assert not processors or row.gap == float("inf")
        if distance == 0 and not processors:
            assert row.exact_top_gap == pytest.approx(0.0, abs=1e-6)


def test_rounding_in_bfloat16_is_never_called_a_bug():
    for seed in range(2):
        model = make_model("llama", dtype=torch.bfloat16, seed=seed)
        report = hf_speculate.check_parity(
            model, noisy_copy(model), ragged_prompts(6, seed=seed), max_new_tokens=2 * NUM_NEW, num_assistant_tokens=5
        )
        assert report.ok, str(report)
        assert str(report).count("the gap is within rounding") == sum(row.verdict == "tie" for row in report.rows)


@pytest.mark.parametrize(
    "options", [{"eos_token_id": 5}, {"repetition_penalty": 1.3}, {"eos_token_id": [5, 9, 12, 33]}]
)
def test_options_reach_both_texts(options):
    target, draft = pair("llama")
    inputs = ragged_prompts(5, seed=3)
    stats = hf_speculate.SpeculationStats()
    report = hf_speculate.check_parity(
        target, draft, inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=5, speculation_stats=stats, **options
    )
    assert [row.verdict for row in report.rows] == ["equal"] * 5
    assert stats.num_accepted > 0


def test_a_comparison_without_drafts_is_not_ok():
    target, draft = pair("llama")  # as large as its target: the adaptive schedule never calls it
    report = hf_speculate.check_parity(
        target, draft, torch.arange(1, 5), max_new_tokens=4, num_assistant_tokens_schedule="adaptive"
    )
    assert report.num_drafted == 0
    assert not report.ok
    assert "nothing was drafted" in str(report)


def test_copies_are_checked_without_an_assistant():
    target, _ = pair("llama")
    report = hf_speculate.check_parity(
        target, None, torch.tensor([3, 4, 5, 3, 4, 5, 3, 4]), max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=4
    )
    assert [row.verdict for row in report.rows] == ["equal"]


def test_strings_are_padded_on_the_left_and_decoded_together():
    target, draft = pair("llama")
    tokenizer = word_tokenizer(64)
    report = hf_speculate.check_parity(target, draft, ["w3 w4", "w5 w6 w7 w8"], tokenizer=tokenizer, max_new_tokens=8)
    assert len(report.rows) == 2
    assert report.ok
    assert tokenizer.padding_side == "right"
    tokenizer.pad_token = None
    assert len(hf_speculate.check_parity(target, draft, "w3 w4", tokenizer=tokenizer, max_new_tokens=8).rows) == 1


FEW_NEW = 8
SHORT, LONG = 4, 16  # tokens of an encoder's prompt: fewer and more than are decoded


def with_encoder(make, width):
    """A target, a draft that guesses a part, and prompts for its encoder, one of them padded."""
    generator = torch.Generator().manual_seed(width)
    input_ids = torch.randint(3, IMAGE_TOKEN_ID, (2, width), generator=generator)
    input_ids[1, -2:] = PAD_TOKEN_ID
    target = make()
    return target, noisy_copy(target, 0.2), {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}


def with_start(width):
    """As `with_encoder`, with two tokens that the decoder begins with."""
    target, draft, inputs = with_encoder(make_t5, width)
    return target, draft, {**inputs, "decoder_input_ids": torch.tensor([[START_TOKEN_ID, 9]]).repeat(2, 1)}


def with_pictures(make):
    """A target, a draft of text alone, and prompts with pictures, one of them padded."""
    target = make()
    return target, text_draft(target, 0.1), picture_prompts(target, 2)


def with_text(kind):
    """A target, a draft that guesses a part, and prompts, some of them padded."""
    target = make_model(kind)
    return target, noisy_copy(target, 0.3), ragged_prompts(3)


MODELS = {
    **{kind: partial(with_text, kind) for kind in ("llama", "gemma2", "gpt2")},
    "t5, short": lambda: with_encoder(make_t5, SHORT),
    "t5, long": lambda: with_encoder(make_t5, LONG),
    "t5, decoder's own beginning": lambda: with_start(LONG),
    "bart": lambda: with_encoder(make_bart, LONG),
    "llava": lambda: with_pictures(make_llava),
    "qwen2_vl": lambda: with_pictures(make_qwen2_vl),
}


@pytest.mark.parametrize("kind", MODELS)
def test_exact_decoding_is_equal_in_float64(kind):
    target, draft, inputs = MODELS[kind]()
    report = hf_speculate.check_parity(target, draft, inputs, max_new_tokens=FEW_NEW)
    assert report.ok
    num = len(inputs["input_ids"])
    assert [(row.index, row.verdict) for row in report.rows] == [(index, "equal") for index in range(num)]
    assert str(report) == (
        f"{num} of {num} rows equal plain greedy decoding in float64, 0 differ at a near-tie, 0 by a bug"
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float64) for kind in MODELS),
        ("llama", torch.float32),
        ("t5, short", torch.bfloat16),
        ("llava", torch.bfloat16),
        ("qwen2_vl", torch.float32),
    ],
)
def test_a_wrong_verifier_is_a_bug(kind, dtype):
    target, draft, inputs = MODELS[kind]()
    target.to(dtype)
    report = hf_speculate.check_parity(target, draft, inputs, max_new_tokens=FEW_NEW, verifier="keeps all")
    assert not report.ok
    plain = target.generate(**inputs, max_new_tokens=FEW_NEW, return_dict_in_generate=True, output_logits=True)
    bugs = [row for row in report.rows if row.verdict == "bug"]
    assert bugs
    assert f"{len(bugs)} by a bug" in str(report)
    for row in bugs:
        logits = plain.logits[row.position][row.index].double()
        assert row.plain_id == plain.sequences[row.index, row.position - FEW_NEW] == logits.argmax()
        top = logits.topk(2).values
        assert row.top_gap == pytest.approx(float(top[0] - top[1]), abs=ROUNDING)
        assert row.gap == pytest.approx(float(logits.max() - logits[row.speculative_id]), abs=ROUNDING)
        assert row.gap > row.bound
        assert "larger than rounding" in row.reason
    exact = target.double().generate(**inputs, **spelling(plain.sequences))
    for row in bugs:
        top = exact.logits[row.position][row.index].topk(2).values
        assert row.exact_top_gap == pytest.approx(float(top[0] - top[1]), abs=ROUNDING)


def spelling(sequences):
    """Options of `generate()` that give these tokens [B, T] again, with their logits."""

    def only(row, before):
        return [int(sequences[row, len(before)])]

    options = {"max_new_tokens": FEW_NEW, "return_dict_in_generate": True, "output_logits": True}
    return {**options, "prefix_allowed_tokens_fn": only}


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_a_twin_is_a_tie_with_pictures(kind):
    target, _, inputs = MODELS[kind]()
    plain = target.generate(**inputs, max_new_tokens=FEW_NEW)
    common = int(plain[:, -FEW_NEW:].mode().values[0])
    weight = target.get_output_embeddings().weight
    weight[[TWIN_OF, common]] = weight[[common, TWIN_OF]]
    weight[TWIN] = weight[TWIN_OF]
    draft = text_draft(target, 0.0)
    report = hf_speculate.check_parity(target, draft, inputs, max_new_tokens=FEW_NEW, verifier="takes the twin")
    twins = [row for row in report.rows if (row.plain_id, row.speculative_id) == (TWIN_OF, TWIN)]
    assert twins
    assert {row.verdict for row in twins} == {"tie"}


def test_a_model_that_reads_sound_is_refused_before_it_runs():
    target = make_whisper()
    target.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(
        hf_speculate.UnsupportedModelError, match=r"must have input_ids .* with input_features; compare"
    ):
        hf_speculate.check_parity(target, noisy_copy(target), {"input_features": speech(1)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": {"inputs_embeds": torch.zeros(1, 3, 32)}}, "must hold input_ids, got inputs_embeds"),
        ({"prompts": {"input_ids": torch.ones(1, 3), "mm_encoder_outputs": {}}}, "other values in mm_encoder_outputs"),
        ({"do_sample": True}, "do_sample must be False"),
        ({"verifier": "typical"}, "lossless"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"assistant": None}, "prompt_lookup_num_tokens"),
        ({"prompts": "words"}, "tokenizer must be the target's"),
        ({"prompts": [[1, 2, 3]]}, "torch.tensor"),
    ],
)
def test_what_does_not_go_with_a_comparison_is_refused(options, words):
    target, draft = pair("llama")
    arguments = {"assistant": draft, "prompts": torch.arange(1, 5), **options}
    with pytest.raises(hf_speculate.ConfigError, match=words):
        hf_speculate.check_parity(target, arguments.pop("assistant"), arguments.pop("prompts"), **arguments)


def test_copying_by_config_is_refused_for_plain_decoding_would_copy_too():
    target = make_model("llama")
    target.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(hf_speculate.ConfigError, match="must be a keyword"):
        hf_speculate.check_parity(target, noisy_copy(target), torch.arange(1, 5))


def test_the_models_stay_as_they_are():
    target = make_model("llama", dtype=torch.bfloat16)
    draft = noisy_copy(target, 0.3)
    before = [{name: one.clone() for name, one in model.state_dict().items()} for model in (target, draft)]
    configs = [model.config.to_dict() for model in (target, draft)]
    hf_speculate.check_parity(target, draft, ragged_prompts(3), max_new_tokens=NUM_NEW, verifier="keeps all")
    for model, state, config in zip((target, draft), before, configs, strict=True):
        assert model.dtype == torch.bfloat16
        assert model.config.to_dict() == config
        assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert not hf_speculate.is_enabled(target)
