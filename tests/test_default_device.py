"""Test that calls run on the device of their inputs, whatever the default device is."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.draft.base import Drafter
from hf_speculate.types import DraftOut
from tests.cases import Unchanged, assert_equal_ids, pair
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.support.grammars import Brackets, RollbackGrammar
from tests.support.tiny import cheaper_copy, make_model, ragged_prompts

NUM_NEW = 14
# Together they run every drafter, verifier, cache and output.
CALLS: dict[str, dict[str, Any]] = {
    "model": {"return_dict_in_generate": True, "output_scores": True, "prefill_chunk_size": 3},
    "adaptive": {"num_assistant_tokens": None, "speculation_cache": "dynamic", "max_time": 60.0},
    "copying": {"prompt_lookup_num_tokens": 4, "assistant_model": None},
    "hybrid": {"prompt_lookup_num_tokens": 4, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "block": {"do_sample": True, "verifier": "block", "seed": 4, "top_k": 5, "temperature": 0.7},
    "coupled": {"do_sample": True, "verifier": "coupled", "seed": 4},
    "lock step": {"logits_processor": [Unchanged()]},
    "grammar": {"logits_processor": RollbackGrammar},
    "spans": {"verifier": "typical", "relax_only_inside": (3, 5)},
}
ALONG = (
    "passed cache",
    "draft state",
    "hidden states",
    "embeddings",
    "other vocabulary",
    "encoder",
)


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize("name", CALLS)
def test_batch_is_decoded_on_its_device(name):
    target, draft = pair("llama")
    draft = cheaper_copy(target) if name == "adaptive" else draft
    inputs = ragged_prompts(3, seed=4)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)
    options = {
        "max_new_tokens": NUM_NEW,
        "eos_token_id": int(text[0, -NUM_NEW + 4]),
        "pad_token_id": 0,
    }
    draft_options = {"assistant_model": draft, "num_assistant_tokens": 3, **CALLS[name]}

    def decode():
        # a separate state for each call
        more = {"logits_processor": [RollbackGrammar(Brackets())]} if name == "grammar" else {}
        return target.generate(**inputs, **options, **{**draft_options, **more})

    expected = decode()
    with torch.device("meta"):
        ours = decode()
    assert_equal_ids(*(getattr(output, "sequences", output) for output in (expected, ours)))


class ReadsStates(Drafter):
    """Drafter that reads hidden states.

    It proposes the first tokens of its query.
    """

    hidden_layers = (-1,)

    def draft(self, request):
        query_token_ids, kept = request.query_token_ids, request.kept
        assert kept.hidden_states.device == query_token_ids.device == kept.num_emitted.device
        ids = query_token_ids[:, : request.num_draft_tokens]
        return DraftOut(
            ids, torch.full((len(ids),), ids.shape[1], dtype=torch.int32, device="cpu"), None, None
        )

    def rows(self, indices):
        pass


@pytest.mark.parametrize("name", ALONG)
def test_arguments_of_a_call_stay_on_their_device(name):
    target, draft = pair("llama") if name != "encoder" else encoder_pair("t5")
    inputs: dict[str, Any] = ragged_prompts(2, seed=4) if name != "encoder" else inputs_of("t5", 2)
    expected = target.generate(**inputs, max_new_tokens=NUM_NEW)
    options: dict[str, Any] = {"assistant_model": draft}
    match name:
        case "draft state":
            options["draft_state"] = hf_speculate.DraftState()
        case "hidden states":
            options = {"drafter": lambda request: ReadsStates()}
        case "embeddings":
            inputs["inputs_embeds"] = target.get_input_embeddings()(inputs["input_ids"])
        case "other vocabulary":
            options["assistant_model"] = make_model("llama", vocab_size=72)
    for _ in range(2 if name == "draft state" else 1):
        if name == "passed cache":
            options[CACHE_NAME] = DynamicCache(config=target.config)
        with torch.device("meta"):
            ours = target.generate(
                **inputs, **options, max_new_tokens=NUM_NEW, num_assistant_tokens=3
            )
        assert_equal_ids(expected, ours)
