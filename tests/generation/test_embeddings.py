"""A prompt of embeddings is decoded as plain `generate` decodes it, whatever the draft can read of it."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.generation.test_compiled import compile_config, compiled_and_eager, small_pair
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.generation.test_ownership import STATE_TOLERANCE, assert_same_contents, cache_contents
from tests.generation.test_stop_strings import tokenizer  # noqa: F401  # a fixture
from tests.tiny import SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

NUM_NEW = 16
K = 4


def embedded(target, inputs, *, with_ids, noise=0.3):
    """The inputs as embeddings [B, P, hidden] near those of their ids, which stand beside them if wanted."""
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    generator = torch.Generator().manual_seed(3)
    embeds = embeds + noise * embeds.std() * torch.randn(embeds.shape, generator=generator, dtype=embeds.dtype)
    kept = inputs if with_ids else {"attention_mask": inputs["attention_mask"]}
    return {**kept, "inputs_embeds": embeds}


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize(
    ("kind", "cache_kind", "batch_size"),
    [
        ("llama", "auto", 1),
        ("llama", "dynamic", 3),
        ("mistral_window", "auto", 3),
        ("gpt2", "auto", 3),
        ("bloom", "auto", 3),
    ],
)
def test_greedy_equals_plain(kind, batch_size, with_ids, cache_kind):
    target, draft = pair(kind)
    prompts = ragged_prompts(batch_size, seed=1, max_len=2 * SLIDING_WINDOW)
    inputs, options = embedded(target, prompts, with_ids=with_ids), {"max_new_tokens": NUM_NEW}
    stats = assert_decodes_as_plain(target, draft, inputs, **options, speculation_cache=cache_kind)
    assert stats.num_accepted < stats.num_verified
    assert stats.num_accepted or not with_ids  # without them the draft lacks the prompt
    texts = [target.generate(**some, **options) for some in (inputs, prompts)]
    assert texts[0].shape[1] == NUM_NEW + (prompts["input_ids"].shape[1] if with_ids else 0)
    assert not torch.equal(*(ids[:, -NUM_NEW:] for ids in texts))  # the embeddings were read, not the ids


WAYS = {
    "model": {"num_assistant_tokens": K},
    "adaptive model": {"num_assistant_tokens": None},
    "copying": {"prompt_lookup_num_tokens": 4},
    "hybrid": {"prompt_lookup_num_tokens": 4, "num_assistant_tokens": 2},
    "early exit": {"assistant_early_exit": 1, "num_assistant_tokens": K},
}


@each_value(with_ids=[True, False], way=WAYS)
def test_every_source_of_drafts_gives_plain_text(way, with_ids):
    target, draft = pair("llama")
    inputs = embedded(target, ragged_prompts(3, seed=4), with_ids=with_ids)
    free = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": [int(free[0, 4]), int(free[1, 9])]}  # rows end apart
    assistant = None if way in ("copying", "early exit") else draft
    assert_decodes_as_plain(target, assistant, inputs, **options, **WAYS[way])


@pytest.mark.parametrize("own", [{}, {"num_assistant_tokens": K}, {"prompt_lookup_num_tokens": 4}])
def test_embeddings_of_ids_are_drawn_as_the_ids_are(own):
    """Positions of the noise count the real tokens that were read, whether or not they stand in the output."""
    target, draft = pair("llama")
    prompts = ragged_prompts(3, seed=5)
    options = {"do_sample": True, "verifier": "coupled", "seed": 7, "max_new_tokens": NUM_NEW}
    alone = target.generate(**prompts, **options)[:, -NUM_NEW:]
    if "num_assistant_tokens" in own:
        own = {**own, "assistant_model": draft}
    for with_ids in (True, False):
        inputs = embedded(target, prompts, with_ids=with_ids, noise=0.0)
        assert torch.equal(target.generate(**inputs, **options, **own)[:, -NUM_NEW:], alone)


@pytest.mark.parametrize(("num_ids", "batch_size"), [(3, 2), (15, 2), (3, 1)])
def test_ids_may_be_fewer_or_more_than_the_embeddings_where_a_mask_says_what_is_padding(num_ids, batch_size):
    target, draft = pair("llama")
    inputs = embedded(target, ragged_prompts(batch_size, seed=8, min_len=6, max_len=10), with_ids=False)
    inputs["input_ids"] = torch.randint(1, 64, (batch_size, num_ids), generator=torch.Generator().manual_seed(1))
    assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW)
    assert_decodes_as_plain(target, None, inputs, max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=4)
    assert torch.equal(target.generate(**inputs, max_new_tokens=NUM_NEW)[:, :num_ids], inputs["input_ids"])


@each_value(cache_kind=["dynamic", "preallocated"], num_held=[4, SLIDING_WINDOW + 2], with_ids=[True, False])
def test_a_passed_cache_holds_the_beginning_of_the_embeddings(with_ids, num_held, cache_kind):
    target, draft = pair("mistral_window")
    ids = torch.randint(1, 64, (1, 2 * SLIDING_WINDOW), generator=torch.Generator().manual_seed(1))
    inputs = embedded(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, with_ids=with_ids)
    caches, texts = [], []
    for own in ({}, {"assistant_model": draft, "num_assistant_tokens": K, "speculation_cache": cache_kind}):
        caches.append(DynamicCache(config=target.config))
        with torch.no_grad():
            target(inputs_embeds=inputs["inputs_embeds"][:, :num_held], past_key_values=caches[-1], use_cache=True)
        texts.append(target.generate(**inputs, past_key_values=caches[-1], max_new_tokens=NUM_NEW, **own))
    assert_equal_ids(*texts)
    assert_same_contents(*(cache_contents(cache) for cache in caches), STATE_TOLERANCE)


@pytest.mark.parametrize("with_ids", [True, False])
def test_compiled_rounds_follow_a_prompt_of_embeddings(with_ids):
    target, draft = small_pair("llama")
    inputs = embedded(target, ragged_prompts(2, seed=12), with_ids=with_ids)
    ids, _, stats = compiled_and_eager(target, draft, inputs, compile_config())
    assert stats.compiled == ["target", "draft"]
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)


def test_an_encoder_reads_embeddings_for_drafts_that_share_it_or_read_text():
    target, draft = encoder_pair("t5")
    inputs = inputs_of("t5", 2)
    embeds = target.get_input_embeddings()(inputs["input_ids"]) * 1.5
    inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    assert_decodes_as_plain(target, pair("llama")[1], inputs, max_new_tokens=NUM_NEW)
    assert_decodes_as_plain(target, None, inputs, max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=3)
    with pytest.raises(UnsupportedGenerationError, match="inputs_embeds must be left out for a draft with an encoder"):
        target.generate(**inputs, assistant_model=draft, max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidate_generator": PromptLookupCandidateGenerator()}, "inputs_embeds must be left out with candidate_ge"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size must be left out with inputs_embeds"),
        ({"attention_mask": torch.ones(1, 4, dtype=torch.int64)}, r"must be \[B, 6\] for 6 inputs_embeds and 0 input"),
        (
            {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.int64)},
            r"must be \[B, P\] over inputs_embeds .* got \[1, 1,",
        ),
        ({"input_ids": torch.ones(1, 3, dtype=torch.int64)}, "3 input_ids, got none; pass a mask over"),
        ({"input_ids": torch.full((1, 6), -200)}, "ids of the prompt must be below 64 .* got -200"),
        ({"inputs_embeds": torch.zeros(1, 0, 32, dtype=torch.float64)}, "past_key_values must hold fewer tokens than"),
    ],
)
def test_what_cannot_be_read_is_refused(options, message):
    target, draft = pair("llama")
    options = {"inputs_embeds": torch.zeros(1, 6, 32, dtype=torch.float64), **options}
    if "candidate_generator" not in options:
        options |= {"assistant_model": draft, "num_assistant_tokens": K}
    with pytest.raises(UnsupportedGenerationError, match=message):
        target.generate(**options, max_new_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "cache_kind"), [("embeddings", "preallocated"), ("embeddings", "dynamic"), ("masked row", "auto")]
)
def test_a_row_may_end_with_its_first_token_while_other_rows_accept_whole_drafts(prompt, cache_kind):
    """Rows that stay in the batch are fed as many tokens as the others, although this one has fewer."""
    target = make_model("llama", dtype=torch.float64)
    for layer in target.model.layers:  # each token follows from the one before it, so a draft needs no prompt
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    hf_speculate.enable(target)
    ids = torch.tensor([[5, 6], [7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0], [1, 1]])}
    if prompt == "embeddings":
        inputs = {"inputs_embeds": target.get_input_embeddings()(ids)}
    first = int(target.generate(**inputs, max_new_tokens=1)[0, -1])
    options = {"eos_token_id": first, "pad_token_id": 0, "max_new_tokens": NUM_NEW, "num_assistant_tokens": K}
    options |= {"draft_state": hf_speculate.DraftState(), "speculation_cache": cache_kind}
    stats = assert_decodes_as_plain(target, noisy_copy(target, 0.0), inputs, **options)
    assert stats.num_accepted > K
