"""Rows of recurrent states and of the dynamic cache in a running batch get the texts that they get alone."""

import pytest

from hf_speculate.options.refill.continuous import PREFILL_CHUNK_TOKENS
from hf_speculate.options.refill.row_prompts import RowPrompt
from tests.cases import pair
from tests.fallbacks import PAST_CONTEXT
from tests.options.refill.test_continuous import alone, decoded, make_prompts, sources

FAMILIES = ("qwen3_5", "lfm2", "falcon_h1", "mamba", "mamba2", "jamba", "bloom")


@pytest.mark.fallback(PAST_CONTEXT)  # the long prompt
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", ["model", "lookup"])
def test_rows_of_states_are_as_alone(family, source):
    target, draft = pair(family)
    options, prompts = sources(draft)[source], make_prompts(8)
    long = [1 + num % 60 for num in range(PREFILL_CHUNK_TOKENS + 8)]
    prompts.append(RowPrompt(long, arguments={"max_new_tokens": 4}, key=len(prompts)))
    results, decoder = decoded(target, prompts, **options)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    assert decoder.stats.num_rounds > 1.2 * decoder.stats.num_batch_rounds, "rows are decoded one by one"
    assert decoder.num_live == 0
