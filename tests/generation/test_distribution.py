"""Compare the joint distribution of the first new tokens with the target's exact one.

The forward of the prompt gives the first token. A round with K drafted tokens and a bonus token
gives up to K + 1 more. After a rejection, the remaining tokens come from further rounds, whose
draft cache has been rolled back.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

import hf_speculate
from hf_speculate.types import DraftOut
from hf_speculate.verify import RejectionVerifier
from tests.cases import Unchanged, assert_equal_ids
from tests.kernels import distributions
from tests.support.tiny import make_small_model, ragged_prompts

VOCAB_SIZE = 8
NUM_TOKENS = 4
K = 2
# over 4096 texts; MANY_DRAWS detects a bias of a few per cent
NUM_DRAWS, MANY_DRAWS = 40_000, 200_000
DRAWS_OF_MATCHES = 8_000  # over 256 texts
ROWS_PER_CALL = 20_000
# A correct sampler fails in one run out of ten thousand. The controls are below 1e-12.
SIGNIFICANCE = 1e-4
PROMPT = torch.tensor([[1, 5, 2, 7]])

WARPERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "top_p": {"top_p": 0.8},
}


@pytest.fixture(scope="module")
def models():
    target = make_small_model(VOCAB_SIZE, seed=0, dtype=torch.float32)
    draft = make_small_model(VOCAB_SIZE, seed=1, sharpness=1.5, dtype=torch.float32)
    return hf_speculate.enable(target), draft


def step_distribution(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Compute the distribution [N, V] float64 of one token from the definitions of the warpers."""
    probs = (logits.double() / temperature).softmax(-1)
    if top_k:
        probs = torch.where(probs >= probs.topk(top_k).values[:, -1:], probs, 0)
    if top_p < 1:
        order = probs.sort(descending=True)
        before = order.values.cumsum(-1) - order.values
        probs = torch.zeros_like(probs).scatter(
            1, order.indices, torch.where(before < top_p, order.values, 0)
        )
    return probs / probs.sum(-1, keepdim=True)


@torch.no_grad()
def joint_distribution(
    target, num_tokens: int = NUM_TOKENS, prompt: Tensor | None = None, **warpers
) -> Tensor:
    """Return the distribution [V, V, ...] float64 of `num_tokens` tokens after the prompt.

    `target` may be any function of ids.
    """
    joint = torch.ones(1, dtype=torch.float64)
    prefixes = prompt_of(target) if prompt is None else prompt
    for _ in range(num_tokens):
        step = step_distribution(target(prefixes).logits[:, -1], **warpers)  # [N, V]
        joint, vocab_size = (joint[:, None] * step).flatten(), step.shape[1]
        tokens = torch.arange(vocab_size).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(vocab_size, 0), tokens], dim=1)
    return joint.view((vocab_size,) * num_tokens)


def prompt_of(target) -> Tensor:
    """Return the prompt with ids within the model's vocabulary."""
    return PROMPT % target.config.vocab_size


def texts_of(joint: Tensor) -> itertools.product:
    """Return all texts, in the order of the flattened distribution."""
    return itertools.product(range(len(joint)), repeat=joint.ndim)


def with_eos(joint: Tensor, eos_token_id: int) -> Tensor:
    """Return the distribution of texts that repeat `eos_token_id` after its first occurrence."""
    ended = torch.zeros_like(joint)
    for text in texts_of(joint):
        end = text.index(eos_token_id) + 1 if eos_token_id in text else len(text)
        ended[text[:end] + (eos_token_id,) * (len(text) - end)] += joint[text]
    return ended


def draw(target, draft, num_draws: int, num_rows: int = ROWS_PER_CALL, **options) -> Counter:
    """Count the texts that calls with many rows generate; every row has its own seed."""
    prompt = prompt_of(target)
    counts: Counter = Counter()
    for begin in range(0, num_draws, num_rows):
        sequences = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            num_return_sequences=min(num_rows, num_draws - begin),
            seed=begin,
            **{"assistant_model": draft, "top_k": 0, "max_new_tokens": NUM_TOKENS, **options},
        )
        counts.update(map(tuple, sequences[:, prompt.shape[1] :].tolist()))
    return counts


def p_value(counts: Counter, distribution: Tensor) -> float:
    """Return the chi-square p-value over all texts, pooling rare ones; 0 if any is impossible."""
    observed = torch.tensor([counts[text] for text in texts_of(distribution)])
    return distributions.p_value(observed, distribution.flatten())


@pytest.mark.parametrize(
    ("warpers", "verifier", "draft_sampling", "num_draws"),
    [
        ("temperature", "rejection", "sample", NUM_DRAWS),
        ("top_p", "rejection", "argmax", NUM_DRAWS),
        ("top_k", "coupled", "without", NUM_DRAWS),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                *itertools.product(WARPERS, ["block", "coupled"], ["sample"], [NUM_DRAWS]),
                *itertools.product(WARPERS, ["rejection"], ["sample", "argmax"], [MANY_DRAWS]),
            )
        ),
    ],
)
def test_lossless_verifiers_keep_the_joint_distribution(
    models, warpers, verifier, draft_sampling, num_draws
):
    target, draft = models
    stats = hf_speculate.SpeculationStats()
    options = {"verifier": verifier, "speculation_stats": stats, **WARPERS[warpers]}
    if draft_sampling == "without":
        counts = draw(target, None, num_draws, **options)
    else:
        counts = draw(
            target,
            draft,
            num_draws,
            **options,
            num_assistant_tokens=K,
            draft_sampling=draft_sampling,
        )
    assert (stats.verifier, len(stats.verified_per_position)) == (
        verifier,
        K if draft_sampling != "without" else 0,
    )
    assert p_value(counts, joint_distribution(target, **WARPERS[warpers])) > SIGNIFICANCE
    if warpers != "plain":
        # the warpers change the distribution
        assert p_value(counts, joint_distribution(target)) < SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.fallback("lock step, because of Unchanged")
@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": LogitsProcessorList([Unchanged()])},
        {"assistant_confidence_threshold": 0.3},
        {"eos_token_id": 3, "pad_token_id": 3},
    ],
    ids=["lock step", "confidence threshold", "eos"],
)
def test_other_kinds_of_rounds_keep_the_joint_distribution(models, options):
    target, draft = models
    # If there are many rows in lock step, they advance by one token per round.
    num_rows = 200 if "logits_processor" in options else ROWS_PER_CALL
    counts = draw(target, draft, NUM_DRAWS, num_rows, num_assistant_tokens=K, **options)
    joint = joint_distribution(target)
    if "eos_token_id" in options:
        joint = with_eos(joint, options["eos_token_id"])
    assert p_value(counts, joint) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.fallback(
    "rejection in place of block, which is the same if the draft takes its argmax"
)
@pytest.mark.parametrize(
    ("verifier", "options"),
    [
        ("block", {"assistant_model": None}),
        ("rejection", {"num_assistant_tokens": 2}),
        ("coupled", {"num_assistant_tokens": 2, "draft_sampling": "argmax"}),
    ],
)
def test_matches_in_the_prompt_leave_the_joint_distribution(verifier, options):
    """Decode with a draft model too, so rows differ in their draft source."""
    target = hf_speculate.enable(make_small_model(4, seed=0, dtype=torch.float32))
    draft, stats = (
        make_small_model(4, seed=1, sharpness=1.5, dtype=torch.float32),
        hf_speculate.SpeculationStats(),
    )
    options = {
        "prompt_lookup_num_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        **options,
    }
    counts = draw(
        target, draft, DRAWS_OF_MATCHES, verifier=verifier, speculation_stats=stats, **options
    )
    assert stats.num_accepted > 0
    assert p_value(counts, joint_distribution(target)) > SIGNIFICANCE


class ArgmaxPassedOffAsSampled:
    """Negative control that treats a point-mass draft as a draw from its logits."""

    def verify(self, target_logits, draft, keys):
        biased = DraftOut(
            draft.token_ids, draft.lens, torch.zeros_like(target_logits[:, :-1]), None
        )
        return RejectionVerifier().verify(target_logits, biased, keys)


def test_wrong_verifier_fails_the_distribution_test(models, registry):
    target, draft = models
    hf_speculate.register_verifier(
        "control", lambda config: ArgmaxPassedOffAsSampled(), lossless=False
    )
    counts = draw(
        target,
        draft,
        NUM_DRAWS,
        verifier="control",
        num_assistant_tokens=K,
        draft_sampling="argmax",
    )
    assert p_value(counts, joint_distribution(target)) < SIGNIFICANCE


@pytest.mark.fallback("rejection in place of block")
def test_block_verifier_yields_to_rejection_without_a_gain(models):
    stats, ids, (target, draft) = [], [], models
    options = {"draft_sampling": "argmax", "assistant_model": draft, "do_sample": True, "seed": 3}
    options["num_assistant_tokens"] = K
    for verifier in ("block", "rejection"):
        stats.append(hf_speculate.SpeculationStats())
        draft_options = {"verifier": verifier, "speculation_stats": stats[-1], "max_new_tokens": 24}
        ids.append(
            target.generate(
                **ragged_prompts(3, seed=2, vocab_size=VOCAB_SIZE), **options, **draft_options
            )
        )
    assert_equal_ids(*ids)
    assert stats[0].verifier == "rejection"
    (added,) = set(stats[0].fallbacks) - set(stats[1].fallbacks)
    assert f"fallback: {added}" in str(stats[0])
