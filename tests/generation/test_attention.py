"""Calls fold attention and give the ids of plain decoding, and calls that run meanwhile notice nothing."""

import pytest
import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.folded_attention import STANDS_FOR
from tests.cases import AttentionCalls, assert_decodes_as_plain, each_value, pair
from tests.tiny import make_model, ragged_prompts


def folds_in(calls, target):
    """Numbers of query rows in the calls that fold several query tokens; transformers itself packs a single one."""
    num_heads, num_kv_heads = target.config.num_attention_heads, target.config.num_key_value_heads
    folded = [query.shape[2] for query in calls.queries if query.shape[1] == num_kv_heads]
    return [num_rows for num_rows in folded if num_rows > num_heads // num_kv_heads]


OPTIONS = {"num_assistant_tokens": 4, "max_new_tokens": 12}


@each_value(batch_size=[1, 3], kind=["llama", "cohere2"])  # the second has full layers and a window
def test_a_speculative_call_folds_and_gives_the_ids_of_plain(kind, batch_size):
    target, draft = pair(kind)
    inputs = ragged_prompts(batch_size, seed=2)
    with AttentionCalls() as plain:
        target.generate(**inputs, max_new_tokens=12)
    assert plain.queries and not folds_in(plain, target)
    with AttentionCalls() as calls:
        assert_decodes_as_plain(target, draft, inputs, **OPTIONS)
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    assert 5 * groups in folds_in(calls, target)  # verifications of four drafts
    assert target.config._attn_implementation == draft.config._attn_implementation == STANDS_FOR


def test_a_plain_call_meanwhile_gives_exactly_its_usual_result():
    target, draft = pair("llama")
    others, logits, nested = ragged_prompts(3, seed=5), [], []

    def plain():
        with AttentionCalls() as calls:
            output = target.generate(**others, max_new_tokens=6, output_logits=True, return_dict_in_generate=True)
        logits.append(torch.stack(output.logits))
        nested.extend(folds_in(calls, target))

    plain()
    options = {**ragged_prompts(2, seed=2), **OPTIONS, "speculation_callback": lambda report: plain()}
    with AttentionCalls() as calls:
        target.generate(**options, assistant_model=draft)
    assert len(logits) > 2 and all(torch.equal(logits[0], others) for others in logits)
    assert folds_in(calls, target) and not nested


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
