"""With `relax_only_inside`, text outside of spans is what the target alone goes on with from the same text."""

import pytest
import torch

import hf_speculate
from tests.cases import DRAFTERS, KeepsAll, Unchanged, each_value
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value, with_eos
from tests.tiny import make_small_model, ragged_prompts

VOCAB_SIZE = 8
OPEN, CLOSE = 1, 2
EOS = 6
NUM_NEW = 24
EPSILON, DELTA = 0.02, 0.1  # lax, so that typical acceptance keeps what greedy would not
LAX = {"verifier": "typical", "posterior_threshold": EPSILON, "posterior_alpha": DELTA}
INSIDE = {**LAX, "relax_only_inside": (OPEN, CLOSE)}
NUM_DRAWS = 40_000


def small_pair(dtype: torch.dtype):
    target = hf_speculate.enable(make_small_model(VOCAB_SIZE, seed=3, dtype=dtype))
    return target, make_small_model(VOCAB_SIZE, seed=1, sharpness=1.5, dtype=dtype)


@pytest.fixture(scope="module")
def models():
    return small_pair(torch.float64)


@pytest.fixture
def prompts():
    """Rows of several lengths; some stand in a span at their end."""
    return ragged_prompts(12, seed=2, vocab_size=VOCAB_SIZE)


class Kept:
    """Tokens that were emitted, by what they are."""

    def __init__(self):
        self.wrong = self.outside = self.inside = self.relaxed = self.untypical = 0


@torch.no_grad()
def compare(target, inputs, sequences) -> Kept:
    """Hold every new token against the target's own forward over the text before it, row by row."""
    kept, prompt_len = Kept(), inputs["input_ids"].shape[1]
    for row, mask in zip(sequences, inputs["attention_mask"], strict=True):
        num_prompt = int(mask.sum())
        ids = row[prompt_len - num_prompt :]
        logprobs = target(ids[None]).logits[0].log_softmax(-1)
        is_open = False
        for at, token_id in enumerate(ids.tolist()):
            if at > num_prompt and ids[at - 1] == EOS:
                break
            if at >= num_prompt:
                here = logprobs[at - 1]
                is_best = token_id == int(here.argmax())
                bound = min(EPSILON, DELTA * float(torch.exp((here.exp() * here).sum())))
                kept.inside += is_open
                kept.outside += not is_open
                kept.wrong += not is_open and not is_best
                kept.relaxed += is_open and not is_best
                kept.untypical += is_open and not is_best and float(here[token_id].exp()) <= bound
            is_open = {OPEN: True, CLOSE: False}.get(token_id, is_open)
    return kept


@each_value(drafter=DRAFTERS, is_lock_step=[False, True], num_drafted=[1, 5, 3])
def test_outside_of_spans_greedy_tokens_are_the_argmax(models, prompts, num_drafted, is_lock_step, drafter):
    """Also in rows that go on when others have left."""
    target, draft = models
    options = {"assistant_model": draft, "num_assistant_tokens": num_drafted, "max_new_tokens": NUM_NEW}
    options |= {**DRAFTERS[drafter], "eos_token_id": EOS, "logits_processor": [Unchanged()] * is_lock_step}
    kept = compare(target, prompts, target.generate(**prompts, **options, **INSIDE))
    assert kept.wrong == kept.untypical == 0
    assert min(kept.outside, kept.inside) > 10
    assert kept.relaxed > 0
    assert compare(target, prompts, target.generate(**prompts, **options, **LAX)).wrong > 0  # without the restriction


@pytest.mark.slow
@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
def test_outside_of_spans_every_draw_has_the_targets_distribution(draft_sampling):
    """Texts end where a span opens, so that all of them lie outside."""
    target, draft = small_pair(torch.float32)
    options = {"num_assistant_tokens": 3, "draft_sampling": draft_sampling, "eos_token_id": OPEN, "pad_token_id": OPEN}
    expected = with_eos(joint_distribution(target), OPEN)
    assert p_value(draw(target, draft, NUM_DRAWS, **options, **INSIDE), expected) > SIGNIFICANCE
    assert p_value(draw(target, draft, NUM_DRAWS, **options, **LAX), expected) < SIGNIFICANCE


def test_a_registered_rule_is_restricted_too(models, prompts, registry):
    hf_speculate.register_verifier("all", lambda config: KeepsAll(), lossless=False, reads_draft_logits=False)
    target, draft = models
    own = {"assistant_model": draft, "num_assistant_tokens": 4, "verifier": "all", "relax_only_inside": [OPEN, CLOSE]}
    kept = compare(target, prompts, target.generate(**prompts, **own, max_new_tokens=NUM_NEW))
    assert kept.wrong == 0
    assert min(kept.relaxed, kept.untypical) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "must come with a lossy verifier"),
        ({"verifier": "rejection", "do_sample": True, "assistant_model": None}, "must come with a lossy verifier"),
        ({"verifier": "typical", "relax_only_inside": (2, VOCAB_SIZE)}, r"must be ids below 8, .* got \(2, 8\)"),
    ],
)
def test_exact_verifiers_and_ids_outside_the_vocabulary_raise(models, prompts, options, message):
    target, draft = models
    own = {"assistant_model": draft, "relax_only_inside": (OPEN, CLOSE), **options}
    with pytest.raises(hf_speculate.ConfigError, match=f"^relax_only_inside {message}"):
        target.generate(**prompts, **own, max_new_tokens=3)
