"""With `relax_only_inside`, text outside of spans is what the target alone goes on with from the same text."""

from collections import Counter, defaultdict

import pytest
import torch
from scipy.stats import chi2
from transformers import LogitsProcessorList

import hf_speculate
from tests.cases import DRAFTERS, KeepsAll, Unchanged, assert_decodes_as_plain, assert_equal_ids, each_value
from tests.generation.test_law import MIN_EXPECTED, PROMPT, SIGNIFICANCE, draw
from tests.tiny import make_law_model, noisy_copy, ragged_prompts

VOCAB_SIZE = 8
OPEN, CLOSE = 1, 2
NUM_NEW = 24
EPSILON, DELTA = 0.02, 0.1  # lax, so that typical acceptance keeps what greedy would not
LAX = {"verifier": "typical", "posterior_threshold": EPSILON, "posterior_alpha": DELTA}
INSIDE = {**LAX, "relax_only_inside": (OPEN, CLOSE)}
NUM_DRAWS = 40_000


def law_pair(dtype: torch.dtype):
    target = hf_speculate.enable(make_law_model(VOCAB_SIZE, seed=3, dtype=dtype))
    return target, make_law_model(VOCAB_SIZE, seed=1, sharpness=1.5, dtype=dtype)


@pytest.fixture(scope="module")
def models():
    return law_pair(torch.float64)


@pytest.fixture
def prompts():
    """Rows of several lengths; some stand in a span at their end."""
    return ragged_prompts(12, seed=2, vocab_size=VOCAB_SIZE)


class Kept:
    """Tokens that were emitted, by what they are."""

    def __init__(self):
        self.wrong = self.outside = self.inside = self.relaxed = self.untypical = 0


@torch.no_grad()
def judge(target, inputs, sequences) -> Kept:
    """Hold every new token against the target's own forward over the text before it, row by row."""
    kept, prompt_len = Kept(), inputs["input_ids"].shape[1]
    for row, mask in zip(sequences, inputs["attention_mask"], strict=True):
        ids = row[prompt_len - int(mask.sum()) :]
        logprobs = target(ids[None]).logits[0].log_softmax(-1)
        is_open = False
        for at, token_id in enumerate(ids.tolist()):
            if at >= int(mask.sum()):
                law = logprobs[at - 1]
                is_best = token_id == int(law.argmax())
                if is_open:
                    bound = min(EPSILON, DELTA * float(torch.exp((law.exp() * law).sum())))
                    kept.inside += 1
                    kept.relaxed += not is_best
                    kept.untypical += not is_best and float(law[token_id].exp()) <= bound
                else:
                    kept.outside += 1
                    kept.wrong += not is_best
            is_open = {OPEN: True, CLOSE: False}.get(token_id, is_open)
    return kept


@each_value(is_lock_step=[False, True], num_drafted=[1, 5])
def test_outside_of_spans_greedy_tokens_are_the_argmax(models, prompts, num_drafted, is_lock_step):
    target, draft = models
    options = {"assistant_model": draft, "num_assistant_tokens": num_drafted, "max_new_tokens": NUM_NEW}
    if is_lock_step:
        options["logits_processor"] = LogitsProcessorList([Unchanged()])
    kept = judge(target, prompts, target.generate(**prompts, **options, **INSIDE))
    assert kept.wrong == kept.untypical == 0
    assert kept.outside > 20
    assert kept.inside > 20
    assert kept.relaxed > 0


def test_without_the_restriction_the_same_check_fails(models, prompts):
    target, draft = models
    options = {"assistant_model": draft, "num_assistant_tokens": 5, "max_new_tokens": NUM_NEW}
    kept = judge(target, prompts, target.generate(**prompts, **options, **LAX))
    assert kept.wrong > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_keeps_it_and_rows_are_what_they_are_alone(models, prompts, drafter):
    target, draft = models
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "max_new_tokens": NUM_NEW, "eos_token_id": 6}
    options |= {**DRAFTERS[drafter], **INSIDE}
    ours = target.generate(**prompts, **options)
    for row, mask in enumerate(prompts["attention_mask"].bool()):
        alone = target.generate(prompts["input_ids"][row : row + 1, mask], **options)[:, int(mask.sum()) :]
        assert torch.equal(ours[row, prompts["input_ids"].shape[1] :][: alone.shape[1]], alone[0])
        inputs = {"input_ids": prompts["input_ids"][row : row + 1], "attention_mask": mask[None].long()}
        end = prompts["input_ids"].shape[1] + alone.shape[1]  # what is past EOS is padding
        assert judge(target, inputs, ours[row : row + 1, :end]).wrong == 0


def test_where_no_span_opens_the_text_is_plain_greedy(models):
    target, _ = models
    prompts = ragged_prompts(6, seed=2, vocab_size=VOCAB_SIZE)
    prompts["input_ids"] = prompts["input_ids"].masked_fill(prompts["input_ids"] == OPEN, CLOSE)
    options = {"max_new_tokens": NUM_NEW, "suppress_tokens": [OPEN], **INSIDE}
    assert_decodes_as_plain(target, noisy_copy(target), prompts, **options)


def test_a_span_that_never_closes_is_typical_to_the_end(models):
    target, draft = models
    options = {"assistant_model": draft, "num_assistant_tokens": 5, "max_new_tokens": NUM_NEW}
    options |= {"suppress_tokens": [CLOSE]}
    prompt = torch.tensor([[3, OPEN, 5]])
    exact, lax, inside = (target.generate(prompt, **options, **own) for own in ({}, LAX, INSIDE))
    assert_equal_ids(lax, inside)
    assert not torch.equal(exact, inside)


def pooled(observed: list[float], expected: list[float]) -> tuple[float, int]:
    """Chi-square and degrees of freedom of one law, its rarest cells together."""
    cells, pool = [], [0.0, 0.0]
    for mean, num in sorted(zip(expected, observed, strict=True)):
        pool = [pool[0] + mean, pool[1] + num]
        if pool[0] >= MIN_EXPECTED:
            cells.append(pool)
            pool = [0.0, 0.0]
    return sum((num - mean) ** 2 / mean for mean, num in cells), max(len(cells) - 1, 0)


@torch.no_grad()
def p_values(target, counts: Counter, prompt: tuple[int, ...]) -> tuple[float, float]:
    """Of what was drawn after each text, against the target's law: outside of spans, and inside."""
    following: dict[tuple[int, ...], Counter] = defaultdict(Counter)
    for text, num in counts.items():
        for at, token_id in enumerate(text):
            following[text[:at]][token_id] += num
    sums = {True: [0.0, 0], False: [0.0, 0]}
    for text, observed in following.items():
        law = target(torch.tensor([prompt + text])).logits[0, -1].double().softmax(-1)
        expected = (law * observed.total()).tolist()
        square, degrees = pooled([observed[token_id] for token_id in range(VOCAB_SIZE)], expected)
        marks = [token_id for token_id in prompt + text if token_id in (OPEN, CLOSE)]
        is_open = bool(marks) and marks[-1] == OPEN
        sums[is_open][0] += square
        sums[is_open][1] += degrees
    return tuple(float(chi2.sf(*sums[is_open])) for is_open in (False, True))


@pytest.mark.slow
@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
def test_outside_of_spans_every_draw_has_the_targets_law(draft_sampling):
    target, draft = law_pair(torch.float32)
    prompt = tuple(PROMPT[0].tolist())  # its last mark closes
    options = {"num_assistant_tokens": 3, "draft_sampling": draft_sampling, "max_new_tokens": 4}
    outside, inside = p_values(target, draw(target, draft, NUM_DRAWS, **options, **INSIDE), prompt)
    assert outside > SIGNIFICANCE
    assert inside < SIGNIFICANCE  # the control: there the law is another one
    outside, _ = p_values(target, draw(target, draft, NUM_DRAWS, **options, **LAX), prompt)
    assert outside < SIGNIFICANCE


def test_a_registered_rule_is_restricted_too(models, prompts, registry):
    hf_speculate.register_verifier("all", lambda config: KeepsAll(), lossless=False, reads_draft_logits=False)
    target, draft = models
    ours = target.generate(
        **prompts,
        assistant_model=draft,
        num_assistant_tokens=4,
        max_new_tokens=NUM_NEW,
        verifier="all",
        relax_only_inside=[OPEN, CLOSE],
    )
    kept = judge(target, prompts, ours)
    assert kept.wrong == 0
    assert kept.relaxed > 0
    assert kept.untypical > 0


def test_an_exact_verifier_is_refused_set_or_not(models, prompts):
    target, draft = models
    for options in ({}, {"verifier": "rejection", "do_sample": True}):
        for assistant in (draft, None):
            with pytest.raises(hf_speculate.ConfigError, match=r"^relax_only_inside must come with a lossy verifier"):
                target.generate(
                    **prompts, assistant_model=assistant, max_new_tokens=3, relax_only_inside=(OPEN, CLOSE), **options
                )


def test_ids_outside_the_vocabulary_are_refused(models, prompts):
    target, draft = models
    with pytest.raises(
        hf_speculate.ConfigError,
        match=r"^relax_only_inside must be ids below 8, the size of the target's vocabulary, got \(2, 8\)",
    ):
        target.generate(
            **prompts, assistant_model=draft, max_new_tokens=3, verifier="typical", relax_only_inside=(2, VOCAB_SIZE)
        )
