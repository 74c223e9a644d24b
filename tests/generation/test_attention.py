"""Calls fold attention and give the ids of plain decoding, and calls that run meanwhile notice nothing."""

import pytest
import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models import folded_attention as attention
from hf_speculate.models.folded_attention import STANDS_FOR
from tests.cases import assert_decodes_as_plain, each_value, pair
from tests.tiny import make_model, ragged_prompts


@pytest.fixture
def folds(monkeypatch):
    """Numbers of query rows in all folded calls."""
    rows = []
    original = attention.scaled_dot_product_attention

    def spy(query, *args, **kwargs):
        rows.append(query.shape[2])
        return original(query, *args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    return rows


OPTIONS = {"num_assistant_tokens": 4, "max_new_tokens": 12}


@each_value(batch_size=[1, 3], kind=["llama", "cohere2"])  # the second has full layers and a window
def test_a_speculative_call_folds_and_gives_the_ids_of_plain(folds, kind, batch_size):
    target, draft = pair(kind)
    inputs = ragged_prompts(batch_size, seed=2)
    target.generate(**inputs, max_new_tokens=12)
    assert not folds
    assert_decodes_as_plain(target, draft, inputs, **OPTIONS)
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    assert {groups, 5 * groups} <= set(folds)  # draft steps, and verifications of four drafts
    assert target.config._attn_implementation == draft.config._attn_implementation == STANDS_FOR


def test_a_plain_call_meanwhile_gives_exactly_its_usual_result(folds):
    target, draft = pair("llama")
    others, logits, num_folds = ragged_prompts(3, seed=5), [], []

    def plain():
        num_folds.append(len(folds))
        output = target.generate(**others, max_new_tokens=6, output_logits=True, return_dict_in_generate=True)
        logits.append(torch.stack(output.logits))
        num_folds.append(len(folds))

    plain()
    target.generate(
        **ragged_prompts(2, seed=2), **OPTIONS, assistant_model=draft, speculation_callback=lambda report: plain()
    )
    assert all(torch.equal(logits[0], others) for others in logits)
    assert num_folds[2] == num_folds[3] < len(folds)


def own_attention(module, query, key, value, attention_mask, **kwargs):
    """A user's attention: as sdpa, which takes rows without a mask to be the first ones of the text."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def test_an_attention_that_is_handed_no_mask_is_refused_with_the_line_to_add():
    AttentionInterface.register("own_to_be_masked", own_attention)
    target = hf_speculate.enable(make_model("llama", attn_implementation="own_to_be_masked"))
    options = {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3}
    with pytest.raises(UnsupportedModelError) as error:
        target.generate(**ragged_prompts(1, seed=3), **options)
    line = "transformers.AttentionMaskInterface.register('own_to_be_masked', transformers.masking_utils.sdpa_mask)"
    assert line in str(error.value)
    exec(line, {"transformers": transformers})
    assert assert_decodes_as_plain(target, None, ragged_prompts(3, seed=3), **options).num_drafted > 0
