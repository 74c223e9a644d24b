"""Compare rows with recurrent states or a dynamic cache in a running batch with separate calls."""

from dataclasses import replace

import pytest

from hf_speculate import SpeculationStats
from hf_speculate.options.refill.continuous import PREFILL_CHUNK_TOKENS
from hf_speculate.options.refill.row_prompts import RowPrompt
from tests.cases import pair
from tests.options.refill.test_continuous import alone, decoded, make_prompts, sources
from tests.support.fallbacks import PAST_CONTEXT

FAMILIES = ("qwen3_5", "lfm2", "falcon_h1", "mamba", "mamba2", "jamba", "bloom")


@pytest.mark.fallback(PAST_CONTEXT)  # caused by the long prompt
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", ["model", "lookup"])
def test_recurrent_rows_equal_rows_alone(family, source):
    target, draft = pair(family)
    options, prompts = sources(draft)[source], make_prompts(8)
    long = [1 + num % 60 for num in range(PREFILL_CHUNK_TOKENS + 8)]
    prompts.append(RowPrompt(long, arguments={"max_new_tokens": 4}, key=len(prompts)))
    results, decoder = decoded(target, prompts, **options)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    assert decoder.stats.num_rounds > 1.2 * decoder.stats.num_batch_rounds, (
        "rows are decoded one by one"
    )
    assert decoder.num_live == 0


# In a forward over several tokens, these mixers lose earlier states or differ from single steps.
UNCUT_CALLS = [
    *(
        ("jamba", {}),
        ("jamba", {"prefill_chunk_size": 16}),
        ("zamba", {}),
        ("zamba2", {"prefill_chunk_size": 16}),
    ),
    *(("nemotron_h", {"do_sample": True}), ("zamba2", {"do_sample": True})),
]


@pytest.mark.parametrize(("family", "options"), UNCUT_CALLS)
def test_rows_with_states_lost_by_chunks_equal_rows_alone(family, options):
    target, draft = pair(family)
    options = {**sources(draft)["model"], **options}
    lens = (174, 180, 191, 33, 40) if "prefill_chunk_size" not in options else (33, 40, 31)
    prompts = [
        RowPrompt([(7 * at + at * at + length) % 63 + 1 for at in range(length)], seed=key, key=key)
        for key, length in enumerate(lens)
    ]
    results, _ = decoded(target, prompts, **options, max_new_tokens=10)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(
            target, prompt, **options, max_new_tokens=10
        ), prompt.key


@pytest.mark.parametrize("family", ["jamba", "zamba2"])
def test_drafts_with_states_lost_by_chunks_equal_rows_alone(family):
    """Let the target read prompts in chunks, and let the draft model read them whole."""
    target, draft = pair("llama")[0], pair(family)[1]
    options = {
        "assistant_model": draft,
        "num_assistant_tokens": 3,
        "do_sample": True,
        "prefill_chunk_size": 16,
    }
    prompts = [replace(prompt, arguments={"max_new_tokens": 16}) for prompt in make_prompts(5)]
    results, _ = decoded(target, prompts, **options)
    for prompt in prompts:
        stats = SpeculationStats()
        assert results[prompt.key].token_ids == alone(
            target, prompt, **options, speculation_stats=stats
        ), prompt.key
        assert results[prompt.key].num_accepted == stats.num_accepted
