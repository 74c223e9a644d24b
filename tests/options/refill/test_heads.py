"""Test rows with draft heads in a running batch, where a joining row has a context for its head."""

import pytest

from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.refill.row_prompts import RowPrompt
from tests.options.heads.designs import EAGLE3, make_weights, write_speculators
from tests.options.heads.kinds import KINDS
from tests.options.heads.rounds import random_texts, target_of
from tests.options.refill.test_continuous import alone, decoded


@pytest.mark.parametrize("kind", KINDS)
def test_texts_depending_on_drafts_equal_rows_alone(kind, tmp_path):
    head, target = KINDS[kind](tmp_path)
    options = {
        "assistant_model": head,
        "num_assistant_tokens": 3,
        "do_sample": True,
        "verifier": "rejection",
    }
    arguments = [{"max_new_tokens": 4 + 9 * (number % 3)} for number in range(7)]
    arguments.append({"max_new_tokens": 12, "prefill_chunk_size": 5})
    texts = [*random_texts([3, 25, 8, 14, 2, 19, 30], seed=5), list(range(1, 24))]
    texts.append([7])  # the head has nothing to read before the row joins
    arguments.append(arguments[1])
    prompts = [
        RowPrompt(text, seed=key, arguments=of_row, key=key)
        for key, (text, of_row) in enumerate(zip(texts, arguments, strict=True))
    ]
    results, decoder = decoded(target, prompts, **options)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    assert decoder.stats.num_rounds > 1.2 * decoder.stats.num_batch_rounds, (
        "rows are decoded one by one"
    )
    assert decoder.stats.num_drafted > decoder.stats.num_rounds


@pytest.mark.fallback("past the context of")
def test_rows_joining_past_the_head_context_read_their_states(tmp_path):
    target = target_of()
    head = load_drafter(
        write_speculators(tmp_path, EAGLE3, make_weights(EAGLE3)), target, context_len=16
    )
    options = {
        "assistant_model": head,
        "num_assistant_tokens": 3,
        "do_sample": True,
        "verifier": "rejection",
    }
    prompts = [
        RowPrompt(text, seed=key, arguments={"max_new_tokens": 4 + 9 * (key % 3)}, key=key)
        for key, text in enumerate(random_texts([3, 25, 8, 14, 2, 19, 1, 5], seed=5))
    ]
    results, _ = decoded(target, prompts, **options)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
