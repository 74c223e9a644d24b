"""The joint law of the first new tokens is the target's, computed exactly from every prefix.

The first token comes with the prompt's forward. A round of K drafted tokens and a bonus can give K + 1 more; after a
refusal the rest comes from further rounds, on a draft cache that was rolled back.
"""

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LogitsProcessorList

import hf_speculate
from hf_speculate.triton_kernels import sample
from hf_speculate.types import DraftOut, Stream
from hf_speculate.verify import RejectionVerifier
from tests.cases import Unchanged
from tests.tiny import make_law_model

VOCAB_SIZE = 8
NUM_TOKENS = 4
K = 2
NUM_DRAWS = 200_000
FEWER_DRAWS = 40_000  # where the slow tests have the others, and for what differs from other cases in little
DRAWS_OVER_ROUNDS = 60_000  # 243 texts
ROWS_PER_CALL = 20_000
SIGNIFICANCE = 1e-4  # a right sampler fails one run in ten thousand; the controls come out below 1e-12
MIN_EXPECTED = 5.0  # the usual bound below which chi-square cells are pooled
PROMPT = torch.tensor([[1, 5, 2, 7]])

WARPERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "top_p": {"top_p": 0.8},
}


@pytest.fixture(scope="module")
def models():
    target = make_law_model(VOCAB_SIZE, seed=0, dtype=torch.float32)
    draft = make_law_model(VOCAB_SIZE, seed=1, sharpness=1.5, dtype=torch.float32)
    return hf_speculate.enable(target), draft


def step_law(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """[N, V] float64: the law of one token after the warpers, by their definitions."""
    probs = (logits.double() / temperature).softmax(-1)
    if top_k:
        probs = torch.where(probs >= probs.topk(top_k).values[:, -1:], probs, 0)
    if top_p < 1:
        order = probs.sort(descending=True)
        before = order.values.cumsum(-1) - order.values
        probs = torch.zeros_like(probs).scatter(1, order.indices, torch.where(before < top_p, order.values, 0))
    return probs / probs.sum(-1, keepdim=True)


@torch.no_grad()
def joint_law(target, num_tokens: int = NUM_TOKENS, prompt: Tensor | None = None, **warpers) -> Tensor:
    """[V, V, ...] float64: distribution of `num_tokens` tokens after the prompt; `target` is any function of ids."""
    law = torch.ones(1, dtype=torch.float64)
    prefixes = prompt_of(target) if prompt is None else prompt
    for _ in range(num_tokens):
        step = step_law(target(prefixes).logits[:, -1], **warpers)  # [N, V]
        law, vocab_size = (law[:, None] * step).flatten(), step.shape[1]
        tokens = torch.arange(vocab_size).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(vocab_size, 0), tokens], dim=1)
    return law.view((vocab_size,) * num_tokens)


def prompt_of(target) -> Tensor:
    """The prompt in the model's vocabulary."""
    return PROMPT % target.config.vocab_size


def texts_of(law: Tensor) -> itertools.product:
    """Every text that `law` speaks of, in the order of its flattened entries."""
    return itertools.product(range(len(law)), repeat=law.ndim)


def with_eos(law: Tensor, eos_token_id: int) -> Tensor:
    """The law of texts that are padded with `eos_token_id` after the first one."""
    ended = torch.zeros_like(law)
    for text in texts_of(law):
        end = text.index(eos_token_id) + 1 if eos_token_id in text else len(text)
        ended[text[:end] + (eos_token_id,) * (len(text) - end)] += law[text]
    return ended


def draw(target, draft, num_draws: int, num_rows: int = ROWS_PER_CALL, **options) -> Counter:
    """Counts of the drawn texts, from calls of many rows that each have a seed of their own."""
    prompt = prompt_of(target)
    counts: Counter = Counter()
    for begin in range(0, num_draws, num_rows):
        sequences = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            num_return_sequences=min(num_rows, num_draws - begin),
            assistant_model=draft,
            seed=begin,
            **{"top_k": 0, "max_new_tokens": NUM_TOKENS, **options},
        )
        counts.update(map(tuple, sequences[:, prompt.shape[1] :].tolist()))
    return counts


def p_value(counts: Counter, law: Tensor) -> float:
    """Chi-square over all texts, rare ones pooled; 0 when an impossible one was drawn."""
    total = sum(counts.values())
    observed, expected = [], []
    rare_observed, rare_expected = 0, 0.0
    for text, probability in zip(texts_of(law), law.flatten().tolist(), strict=True):
        mean = probability * total
        if mean == 0 and counts[text]:
            return 0.0
        if mean < MIN_EXPECTED:
            rare_observed, rare_expected = rare_observed + counts[text], rare_expected + mean
        else:
            observed.append(counts[text])
            expected.append(mean)
    if rare_expected >= MIN_EXPECTED:
        observed.append(rare_observed)
        expected.append(rare_expected)
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [mean * scale for mean in expected]).pvalue)


@pytest.mark.parametrize(
    ("warpers", "draft_sampling", "num_draws"),
    [
        ("temperature", "sample", FEWER_DRAWS),
        ("top_p", "argmax", FEWER_DRAWS),
        *(
            pytest.param(warpers, draft_sampling, NUM_DRAWS, marks=pytest.mark.slow)
            for warpers, draft_sampling in itertools.product(WARPERS, ["sample", "argmax"])
        ),
    ],
)
def test_rejection_keeps_the_joint_law(models, warpers, draft_sampling, num_draws):
    target, draft = models
    stats = hf_speculate.SpeculationStats()
    options = {"num_assistant_tokens": K, "draft_sampling": draft_sampling, **WARPERS[warpers]}
    counts = draw(target, draft, num_draws, **options, speculation_stats=stats)
    assert len(stats.verified_per_position) == K
    assert p_value(counts, joint_law(target, **WARPERS[warpers])) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("verifier", ["block", "coupled"])
def test_the_other_lossless_verifiers_keep_it_too(models, verifier, warpers):
    target, draft = models
    stats = hf_speculate.SpeculationStats()
    options = {"num_assistant_tokens": K, "verifier": verifier, **WARPERS[warpers]}
    counts = draw(target, draft, FEWER_DRAWS, **options, speculation_stats=stats)
    assert stats.verifier == verifier
    assert p_value(counts, joint_law(target, **WARPERS[warpers])) > SIGNIFICANCE


def test_coupled_keeps_it_without_an_assistant(models):
    target, _ = models
    stats = hf_speculate.SpeculationStats()
    counts = draw(target, None, FEWER_DRAWS, verifier="coupled", speculation_stats=stats)
    assert (stats.verifier, stats.num_drafted) == ("coupled", 0)
    assert p_value(counts, joint_law(target)) > SIGNIFICANCE


@pytest.fixture(scope="module")
def models_of_three_words():
    """A pair with an acceptance of 0.8, so that blocks of every length end in a refusal."""
    target = make_law_model(3, seed=4, dtype=torch.float32)
    return hf_speculate.enable(target), make_law_model(3, seed=5, sharpness=1.5, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled"])
def test_the_joint_law_over_several_rounds_is_the_targets(models_of_three_words, verifier):
    """Of five tokens with three drafted a round: the last four come from one to four rounds."""
    target, draft = models_of_three_words
    stats = hf_speculate.SpeculationStats()
    options = {"verifier": verifier, "num_assistant_tokens": 3, "max_new_tokens": 5, "speculation_stats": stats}
    counts = draw(target, draft, DRAWS_OVER_ROUNDS, **options)
    assert (stats.verifier, len(stats.verified_per_position)) == (verifier, 3)
    assert stats.num_batch_rounds >= 3
    assert p_value(counts, joint_law(target, num_tokens=5)) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": LogitsProcessorList([Unchanged()])},
        {"assistant_confidence_threshold": 0.3},
        {"eos_token_id": 3, "pad_token_id": 3},
    ],
    ids=["lock step", "confidence threshold", "eos"],
)
def test_other_ways_of_a_round_keep_the_joint_law(models, options):
    target, draft = models
    num_rows = 200 if "logits_processor" in options else ROWS_PER_CALL  # many rows in lock step advance by one token
    counts = draw(target, draft, FEWER_DRAWS, num_rows, num_assistant_tokens=K, **options)
    law = joint_law(target)
    if "eos_token_id" in options:
        law = with_eos(law, options["eos_token_id"])
    assert p_value(counts, law) > SIGNIFICANCE


def test_one_row_calls_draw_what_the_same_seeds_draw_in_a_batch(models):
    """So the law of a batch is that of calls with one row."""
    target, draft = models
    seeds = list(range(40))
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 6, "assistant_model": draft, "num_assistant_tokens": K}
    batch = target.generate(PROMPT.repeat(len(seeds), 1), seed=seeds, **options)
    for row, seed in enumerate(seeds):
        assert torch.equal(batch[row : row + 1], target.generate(PROMPT, seed=seed, **options))


class ArgmaxPassedOffAsSampled:
    """A control: takes a point-mass draft for one that was drawn from its logits."""

    def verify(self, target_logits, draft, keys):
        biased = DraftOut(draft.token_ids, draft.lens, torch.zeros_like(target_logits[:, :-1]), None)
        return RejectionVerifier().verify(target_logits, biased, keys)


class NoiseOfTheDraftUsedAgain:
    """A control: draws the correction with the noise of the draft's own token."""

    def verify(self, target_logits, draft, keys):
        verdict = RejectionVerifier().verify(target_logits, draft, keys)
        rows = torch.arange(len(target_logits))
        end = verdict.num_accepted.long()
        again = sample(
            target_logits[rows, end], keys=keys._replace(positions=keys.positions + end), stream=Stream.DRAFT
        )
        return verdict._replace(token_ids=verdict.token_ids.scatter(1, end[:, None], again.token_ids[:, None]))


@pytest.mark.parametrize(
    ("control", "draft_sampling"),
    [(ArgmaxPassedOffAsSampled, "argmax"), pytest.param(NoiseOfTheDraftUsedAgain, "sample", marks=pytest.mark.slow)],
)
def test_a_wrong_verifier_fails_the_same_test(models, control, draft_sampling, registry):
    target, draft = models
    hf_speculate.register_verifier("control", lambda config: control(), lossless=False)
    options = {"verifier": "control", "num_assistant_tokens": K, "draft_sampling": draft_sampling}
    counts = draw(target, draft, FEWER_DRAWS, **options)
    assert p_value(counts, joint_law(target)) < SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize(("num_draws", "temperature"), [(FEWER_DRAWS, 0.9), (NUM_DRAWS, 0.95)])
def test_a_wrong_law_fails_the_same_test(models, num_draws, temperature):
    target, draft = models
    counts = draw(target, draft, num_draws, num_assistant_tokens=K, temperature=temperature)
    assert p_value(counts, joint_law(target)) < SIGNIFICANCE
