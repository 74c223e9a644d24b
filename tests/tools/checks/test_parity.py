"""Test that `check_parity` distinguishes ties from bugs."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from tests.cases import KeepsAll, pair
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_encoders import (
    START_TOKEN_ID,
    make_llava,
    make_t5,
    picture_prompts,
    text_draft,
)
from tests.support.tiny_tokenizers import letters_tokenizer

NUM_NEW = 24
ROUNDING = 1e-5  # for a difference between float32 logits
TWIN, TWIN_OF = 41, 17  # two tied tokens


class _TakesTwin:
    """Greedy verifier that replaces a token by one that is tied with it."""

    def verify(self, target_logits, draft, keys):
        best = target_logits.argmax(-1)  # [B, K+1]
        best = best.where(best != TWIN_OF, TWIN)
        return hf_speculate.keep_prefix(target_logits, draft, draft.token_ids == best[:, :-1], best)


@pytest.fixture(autouse=True)
def _verifiers(registry):
    hf_speculate.register_verifier("keeps all", lambda config: KeepsAll(), lossless=True)
    hf_speculate.register_verifier("takes the twin", lambda config: _TakesTwin(), lossless=True)


def _read_wrong_states(module, args, kwargs):
    """Reorder the cached values before a forward over several tokens."""
    cache = kwargs.get(CACHE_NAME)
    if cache is not None and cache.get_seq_length() and kwargs["input_ids"].shape[1] > 1:
        cache.layers[0].values = cache.layers[0].values.flip(2)


def test_wrong_states_are_reported_as_a_bug():
    model, options = (
        make_model("llama", dtype=torch.bfloat16),
        {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 4},
    )
    draft = noisy_copy(model)
    model.register_forward_pre_hook(_read_wrong_states, with_kwargs=True)
    report = hf_speculate.check_parity(
        model, draft, ragged_prompts(3), speculation_cache="dynamic", **options
    )
    assert any("in float64 too" in row.reason for row in report.rows)
    assert not report.ok and all(row.verdict != "tie" for row in report.rows)


@pytest.mark.parametrize("enabled", [True, False])
def test_peft_target_is_compared_with_its_adapter(enabled):
    model, inputs, lora = (
        make_model("llama"),
        ragged_prompts(3),
        LoraConfig(target_modules=["q_proj"]),
    )
    draft = noisy_copy(model)
    wrapped = (
        get_peft_model(hf_speculate.enable(model) if enabled else model, lora)
        .eval()
        .to(torch.float64)
    )
    report = hf_speculate.check_parity(wrapped, draft, inputs, max_new_tokens=NUM_NEW)
    assert report.ok


@pytest.mark.parametrize(
    ("dtype", "distance", "verdict", "is_banned"),
    [
        (torch.bfloat16, 2**-9, "tie", False),  # a quarter of bfloat16's resolution
        (torch.bfloat16, 0.5, "bug", False),
        (torch.bfloat16, 0.0, "bug", True),
        (torch.float32, 2**-9, "bug", False),
        (torch.float64, 2**-30, "tie", False),  # scores are float32
    ],
)
def test_difference_below_rounding_is_a_tie(dtype, distance, verdict, is_banned):
    model = make_model("llama", dtype=torch.float64, vocab_size=48)
    weight = model.get_output_embeddings().weight
    weight[TWIN] = weight[TWIN_OF] * (1 - distance)
    model.to(dtype)
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 4, "verifier": "takes the twin"}
    prompts = ragged_prompts(24, vocab_size=48)
    banned = {"bad_words_ids": [[TWIN]]} if is_banned else {}
    report = hf_speculate.check_parity(model, noisy_copy(model, 0.0), prompts, **options, **banned)
    twins = [row for row in report.rows if row.speculative_id == TWIN and row.plain_id == TWIN_OF]
    assert len(twins) > 2
    assert {row.verdict for row in twins} == {verdict}
    assert report.ok == (verdict == "tie")
    for row in twins:
        assert (row.gap <= row.bound) == (verdict == "tie")
        assert not is_banned or row.gap == float("inf")


@pytest.mark.fallback("because a draft model as large as its target gains nothing")
def test_comparison_without_drafts_fails():
    target, draft = pair("llama")  # as large as its target, so the adaptive schedule never calls it
    adaptive = {"max_new_tokens": 4, "num_assistant_tokens_schedule": "adaptive"}
    report = hf_speculate.check_parity(target, draft, torch.arange(1, 5), **adaptive)
    assert (report.num_drafted, report.ok) == (0, False)
    assert "nothing was drafted" in str(report)
    repeats = torch.tensor([3, 4, 5, 3, 4, 5, 3, 4])
    assert hf_speculate.check_parity(
        target, None, repeats, max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=4
    ).ok


def test_strings_are_padded_on_the_left_for_both_texts():
    target, draft = pair("llama")
    tokenizer = letters_tokenizer([chr(ord("0") + token) for token in range(64)], pad_token="0")
    tokenizer.padding_side = "right"
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": [5, 9, 12, 33], "repetition_penalty": 1.3}
    report = hf_speculate.check_parity(
        target, draft, ["34", "5678", "9:", "5"], tokenizer=tokenizer, **options
    )
    assert [row.verdict for row in report.rows] == ["equal"] * 4
    assert report.num_drafted > 0
    assert tokenizer.padding_side == "right"


FEW_NEW = 8


def models_of(case):
    """Return a target, a draft that guesses some tokens, and prompts, some of them padded."""
    if case == "llava":
        target = make_llava()
        return target, text_draft(target, 0.1), picture_prompts(target, 2)
    target = make_model("llama") if case == "llama" else make_t5()
    inputs = ragged_prompts(2, max_len=4 if case == "t5, prompts shorter than the text" else 16)
    if case == "t5, longer":
        inputs["decoder_input_ids"] = torch.tensor([[START_TOKEN_ID, 9]]).repeat(2, 1)
    return target, noisy_copy(target, 0.2), inputs


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["llama", "t5, prompts shorter than the text", "t5, longer", "llava"]
)
def test_wrong_verifier_is_reported_as_a_bug(case, dtype):
    target, draft, inputs = models_of(case)
    target.to(dtype)
    num = len(inputs["input_ids"])
    report = hf_speculate.check_parity(target, draft, inputs, max_new_tokens=FEW_NEW)
    assert report.ok
    assert dtype != torch.float64 or [row.verdict for row in report.rows] == ["equal"] * num
    assert (target.dtype, hf_speculate.is_enabled(target)) == (dtype, False)
    report = hf_speculate.check_parity(
        target, draft, inputs, max_new_tokens=FEW_NEW, verifier="keeps all"
    )
    plain = target.generate(
        **inputs, max_new_tokens=FEW_NEW, return_dict_in_generate=True, output_logits=True
    )
    bugs = [row for row in report.rows if row.verdict == "bug"]
    assert bugs and not report.ok
    for row in bugs:
        logits = plain.logits[row.position][row.index].double()
        assert row.plain_id == plain.sequences[row.index, row.position - FEW_NEW] == logits.argmax()
        top = logits.topk(2).values
        assert row.top_gap == pytest.approx(float(top[0] - top[1]), abs=ROUNDING)
        assert row.gap == pytest.approx(
            float(logits.max() - logits[row.speculative_id]), abs=ROUNDING
        )
        assert row.gap > row.bound


def test_options_unsupported_in_a_comparison_are_refused():
    target = make_model("llama")
    for options, words in (
        ({"prompts": {"inputs_embeds": torch.zeros(1, 3, 32)}}, "must hold input_ids"),
        ({"do_sample": True}, "got do_sample"),
        ({"verifier": "typical"}, "lossless"),
        ({"assistant": None}, "assistant must be a model if"),
        ({"prompts": "words"}, "tokenizer must be the target's"),
    ):
        with pytest.raises(hf_speculate.ConfigError, match=words):
            hf_speculate.check_parity(
                target, **{"assistant": target, "prompts": torch.arange(1, 5), **options}
            )
    target.generation_config.prompt_lookup_num_tokens = 3  # plain decoding would copy as well
    with pytest.raises(hf_speculate.ConfigError, match="must be a keyword"):
        hf_speculate.check_parity(target, target, torch.arange(1, 5))
