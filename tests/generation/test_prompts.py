"""Compare prompts of embeddings and with any mask against plain `generate`."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import UnsupportedGenerationError
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.generation.test_caches import STATE_TOLERANCE, assert_same_contents, cache_contents
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.support.tiny import SLIDING_WINDOW, cheaper_copy, make_model, noisy_copy, ragged_prompts

NUM_NEW = 16
K = 4


def embedded(target, inputs, *, with_ids, noise=0.3):
    """Return embeddings [B, P, hidden] close to those of the input ids, optionally with the ids."""
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    generator = torch.Generator().manual_seed(3)
    embeds = embeds + noise * embeds.std() * torch.randn(
        embeds.shape, generator=generator, dtype=embeds.dtype
    )
    other_inputs = inputs if with_ids else {"attention_mask": inputs["attention_mask"]}
    return {**other_inputs, "inputs_embeds": embeds}


SOURCES = {
    "model": {"num_assistant_tokens": K},
    "adaptive model": {"num_assistant_tokens": None},
    "copying": {"prompt_lookup_num_tokens": 4, "assistant_model": None},
    "hybrid": {"prompt_lookup_num_tokens": 4, "num_assistant_tokens": 2},
    "early exit": {"assistant_early_exit": 1, "num_assistant_tokens": K, "assistant_model": None},
}


@each_value(
    source=[*SOURCES, "model", "model"],
    family=["mistral_window", "llama", "llama", "llama", "llama", "gpt2", "bloom"],
    batch_size=[3, 1],
    with_ids=[True, False, False],
    cache_kind=["auto", "dynamic", "auto"],
)
def test_greedy_text_of_embeddings_equals_plain(family, batch_size, with_ids, cache_kind, source):
    target, draft = pair(family)
    draft = cheaper_copy(target) if source == "adaptive model" else draft
    prompts = ragged_prompts(batch_size, seed=1, max_len=2 * SLIDING_WINDOW)
    inputs = embedded(target, prompts, with_ids=with_ids)
    texts = [
        target.generate(**some, max_new_tokens=NUM_NEW)[:, -NUM_NEW:] for some in (inputs, prompts)
    ]
    assert not torch.equal(*texts)  # the model has read the embeddings, not the ids
    ends = [int(texts[0][0, 6]), int(texts[0][-1, 11])]  # rows end at different times
    draft_options = {"assistant_model": draft, "speculation_cache": cache_kind, **SOURCES[source]}
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": ends, **draft_options}
    stats = assert_decodes_as_plain(target, options.pop("assistant_model"), inputs, **options)
    # Without ids, the draft does not know the prompt.
    assert stats.num_accepted or source != "model" or not with_ids
    if not with_ids:  # fewer ids than embeddings
        inputs["input_ids"] = prompts["input_ids"][:, -3:]
        assert_decodes_as_plain(
            target, draft_options["assistant_model"], inputs, **{**options, "eos_token_id": None}
        )


@pytest.mark.parametrize("num_drafted", [None, K])
def test_embeddings_of_ids_give_the_draws_of_the_ids(num_drafted):
    """Omit the ids, because noise positions must still count all real tokens of the prompt."""
    target, draft = pair("llama")
    prompts = ragged_prompts(3, seed=5)
    options = {"do_sample": True, "verifier": "coupled", "seed": 7, "max_new_tokens": NUM_NEW}
    alone = target.generate(**prompts, **options)[:, -NUM_NEW:]
    draft_options = (
        {"num_assistant_tokens": num_drafted, "assistant_model": draft} if num_drafted else {}
    )
    for with_ids in (True, False):
        inputs = embedded(target, prompts, with_ids=with_ids, noise=0.0)
        assert torch.equal(
            target.generate(**inputs, **options, **draft_options)[:, -NUM_NEW:], alone
        )


@each_value(
    cache_kind=["dynamic", "preallocated"], num_held=[4, SLIDING_WINDOW + 2], with_ids=[True, False]
)
def test_passed_cache_holds_the_prefix_of_the_embeddings(with_ids, num_held, cache_kind):
    target, draft = pair("mistral_window")
    ids = torch.randint(1, 64, (1, 2 * SLIDING_WINDOW), generator=torch.Generator().manual_seed(1))
    inputs = embedded(
        target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, with_ids=with_ids
    )
    caches, texts = [], []
    for draft_options in (
        {},
        {"assistant_model": draft, "num_assistant_tokens": K, "speculation_cache": cache_kind},
    ):
        caches.append(DynamicCache(config=target.config))
        with torch.no_grad():
            target(
                inputs_embeds=inputs["inputs_embeds"][:, :num_held],
                **{CACHE_NAME: caches[-1]},
                use_cache=True,
            )
        texts.append(
            target.generate(
                **inputs, **{CACHE_NAME: caches[-1]}, max_new_tokens=NUM_NEW, **draft_options
            )
        )
    assert_equal_ids(*texts)
    assert_same_contents(*(cache_contents(cache) for cache in caches), STATE_TOLERANCE)


def test_encoder_embeddings_serve_drafts_without_an_encoder():
    target, draft = encoder_pair("t5")
    inputs = inputs_of("t5", 2)
    embeds = target.get_input_embeddings()(inputs["input_ids"]) * 1.5
    inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    assert_decodes_as_plain(target, pair("llama")[1], inputs, max_new_tokens=NUM_NEW)
    assert_decodes_as_plain(
        target, None, inputs, max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=3
    )
    with pytest.raises(
        UnsupportedGenerationError,
        match="inputs_embeds must be left out for a draft with an encoder",
    ):
        target.generate(**inputs, assistant_model=draft, max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"candidate_generator": PromptLookupCandidateGenerator(), "assistant_model": None},
            "inputs_embeds must be",
        ),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, r"must be \[B, P\]"),
        ({"input_ids": torch.full((1, 6), -200)}, "ids of the prompt must be below 64 .* got -200"),
    ],
)
def test_unreadable_embeddings_are_refused(options, message):
    target, draft = pair("llama")
    options = {"inputs_embeds": torch.zeros(1, 6, 32).double(), "assistant_model": draft, **options}
    with pytest.raises(UnsupportedGenerationError, match=message):
        target.generate(**options, max_new_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "cache_kind"),
    [("embeddings", "preallocated"), ("embeddings", "dynamic"), ("masked row", "auto")],
)
def test_row_ending_at_its_first_token_leaves_other_rows(prompt, cache_kind):
    """Keep a row with fewer tokens in the batch, where every row is fed the same number."""
    target = make_model("llama", dtype=torch.float64)
    # Each token depends only on the previous one, so a draft needs no prompt.
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    hf_speculate.enable(target)
    ids = torch.tensor([[5, 6], [7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0], [1, 1]])}
    if prompt == "embeddings":
        inputs = {"inputs_embeds": target.get_input_embeddings()(ids)}
    first = int(target.generate(**inputs, max_new_tokens=1)[0, -1])
    options = {
        "eos_token_id": first,
        "pad_token_id": 0,
        "max_new_tokens": NUM_NEW,
        "num_assistant_tokens": K,
    }
    options |= {"draft_state": hf_speculate.DraftState(), "speculation_cache": cache_kind}
    stats = assert_decodes_as_plain(target, noisy_copy(target, 0.0), inputs, **options)
    assert stats.num_accepted > K


@each_value(family=["llama", "gpt2", "mistral_window", "bloom"], chunk_size=[None, 3])
def test_fully_masked_row_equals_plain(family, chunk_size):
    """Mask a whole row; `tests/pairs.json` masks tokens at both sides and inside."""
    inputs = ragged_prompts(3, seed=4, min_len=6, max_len=10)
    inputs["attention_mask"][1] = 0
    stats = assert_decodes_as_plain(
        *pair(family), inputs, max_new_tokens=NUM_NEW, prefill_chunk_size=chunk_size
    )
    assert stats.num_accepted > 0


def test_mask_of_one_row_applies_to_every_row():
    ids = ragged_prompts(3, seed=1, min_len=6, max_len=6)["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones(1, ids.shape[1], dtype=torch.int64)}
    for more in (
        {},
        {"num_return_sequences": 2, "do_sample": True, "verifier": "coupled", "seed": 1},
    ):
        assert_decodes_as_plain(*pair("llama"), inputs, max_new_tokens=6, **more)
