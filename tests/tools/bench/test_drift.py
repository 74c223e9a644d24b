"""Drift is what the target itself says of a text, computed here prefix by prefix in float64."""

import pytest
import torch

from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.drift import Drift, drift_of_runs, drift_of_text
from hf_speculate.tools.bench.measuring import Run
from tests.tiny import make_model, ragged_prompts

# The logits come from one forward here and from one per prefix there; in float32 their rounding is about 1e-6 of them.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}
BLOOM_TOLERANCE = {**TOLERANCE, torch.float64: 1e-6}  # its softmax is in float32 whatever the dtype
TEXTS = [[3, 9, 41], [7, 7, 20, 33, 1], [5]]


@torch.no_grad()
def direct(model, prompt_ids, new_ids):
    """Log-likelihood and the number of argmaxes, one forward per token."""
    total, num_best = 0.0, 0
    for place, chosen in enumerate(new_ids):
        prefix = torch.cat([prompt_ids, torch.tensor(new_ids[:place], dtype=torch.int64)])
        logits = model(input_ids=prefix[None]).logits[0, -1].double()
        probs = logits.exp() / logits.exp().sum()
        total += float(probs[chosen].log())
        num_best += int(logits.argmax()) == chosen
    return total, num_best


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_drift_is_the_log_likelihood_of_every_token_given_its_prefix(kind, dtype):
    model, exact = make_model(kind, dtype=dtype), make_model(kind)
    inputs = ragged_prompts(3, seed=2)
    batch = Batch(0, inputs["input_ids"], inputs["attention_mask"])
    run = Run(0, 0, 1.0, TEXTS, None)
    found = drift_of_runs(model, [run], {0: batch})
    expected = [direct(exact, row, text) for row, text in zip(batch.rows, TEXTS, strict=True)]
    tolerance = (BLOOM_TOLERANCE if kind == "bloom" else TOLERANCE)[dtype]
    assert found.num_tokens == 9
    assert found.log_likelihood == pytest.approx(sum(one for one, _ in expected), abs=9 * tolerance)
    assert found.num_best == sum(num for _, num in expected)
    assert found.log_likelihood_per_token == pytest.approx(found.log_likelihood / 9)


def test_greedy_text_agrees_with_itself_and_another_does_not():
    model = make_model("llama")
    prompt = ragged_prompts(1, seed=1)["input_ids"]
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=80, do_sample=False)
    text = output[0, prompt.shape[1] :].tolist()  # longer than what is held at once
    greedy = drift_of_text(model, prompt[0], text)
    assert greedy.agreement == 1.0
    other = [*text[:70], (text[70] + 1) % 64, *text[71:]]
    changed = drift_of_text(model, prompt[0], other)
    assert changed.num_best < changed.num_tokens == 80
    assert changed.log_likelihood < greedy.log_likelihood
    assert changed == pytest.approx(Drift(*direct(model, prompt[0], other), 80))
