"""Models under folded attention give transformers' logits and ids, and calls that run meanwhile notice nothing."""

import threading

import pytest
import torch
import transformers
from transformers import AttentionInterface, DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models import folded_attention as attention
from hf_speculate.models.attention_switch import folded_attention_for
from hf_speculate.models.folded_attention import FOLDED, STANDS_FOR, folding
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value
from tests.tiny import SLIDING_WINDOW, make_model, noisy_copy, ragged_prompts

LOGIT_TOLERANCE = 1e-9  # float64 round-off through the layers; a wrong mask moves logits by 1e-2 and more
MODELS = {
    "llama": ("llama", {}),
    "one head": ("qwen2", {"num_key_value_heads": 1}),
    "window": ("mistral_window", {}),
    "full and window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
WAIT_S = 60  # for another thread; far more than a tiny model needs


def make_pair(name: str = "llama"):
    kind, options = MODELS[name]
    target = make_model(kind, **options)
    return hf_speculate.enable(target), noisy_copy(target, 0.05, seed=1)


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


class Once(StoppingCriteria):
    """Runs `action` at its first call, and stops nothing."""

    def __init__(self, action):
        self.action = action

    def __call__(self, input_ids, scores, **kwargs):
        action, self.action = self.action, None
        if action is not None:
            action()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run(target, draft, inputs, action=None, **options):
    criteria = StoppingCriteriaList([] if action is None else [Once(action)])
    return target.generate(
        **inputs,
        assistant_model=draft,
        num_assistant_tokens=4,
        max_new_tokens=12,
        stopping_criteria=criteria,
        **options,
    )


@each_value(num_mask_dims=[2, 4], name=MODELS)
def test_logits_after_a_prefix_are_those_of_transformers(folds, name, num_mask_dims):
    kind, options = MODELS[name]
    model = make_model(kind, **options)
    prompts = ragged_prompts(3, seed=2, min_len=6, max_len=2 * SLIDING_WINDOW)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    prefix_len = ids.shape[1] - 3
    if num_mask_dims == 4:
        mask = mask[:, None, None, :].bool() & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    logits = []

    def forward():
        cache = DynamicCache()  # full layers, so that a 4D mask of the whole text fits every one
        for piece in (slice(prefix_len), slice(prefix_len, None)):
            given = mask[:, : piece.stop] if num_mask_dims == 2 else mask[:, :, piece, : piece.stop]
            output = model(input_ids=ids[:, piece], attention_mask=given, past_key_values=cache)
        logits.append(output.logits)

    forward()
    assert not folds
    with folded_attention_for([model]), folding():
        forward()
    assert 2 * 3 in folds or 4 * 3 in folds
    seen = prompts["attention_mask"][:, prefix_len:].bool()
    assert torch.allclose(logits[0][seen], logits[1][seen], atol=LOGIT_TOLERANCE, rtol=0)


@each_value(batch_size=[1, 3], name=MODELS)
def test_a_speculative_call_folds_and_gives_the_ids_of_plain(folds, name, batch_size):
    target, draft = make_pair(name)
    inputs = ragged_prompts(batch_size, seed=2)
    plain = target.generate(**inputs, max_new_tokens=12)
    assert not folds
    assert_equal_ids(plain, run(target, draft, inputs))
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    assert {groups, 5 * groups} <= set(folds)  # draft steps, and verifications of four drafts
    assert target.config._attn_implementation == draft.config._attn_implementation == STANDS_FOR


def test_a_draft_on_another_implementation_stays_on_it(folds):
    target, _ = make_pair()
    draft = noisy_copy(make_model("llama", attn_implementation="eager"), 0.05, seed=1)
    names = []
    inputs = ragged_prompts(2, seed=2)
    ours = run(target, draft, inputs, lambda: names.append(draft.config._attn_implementation))
    assert_equal_ids(target.generate(**inputs, max_new_tokens=12), ours)
    assert names == ["eager"]
    assert folds


def test_a_call_for_attentions_is_left_alone(folds):
    target, draft = (model for model in make_pair())
    for model in (target, draft):
        model.set_attn_implementation("eager")
    output = run(target, draft, ragged_prompts(1, seed=2), return_dict_in_generate=True, output_attentions=True)
    assert output.attentions[0][0].shape[1] == target.config.num_attention_heads
    assert not folds


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_plain_call_meanwhile_gives_exactly_its_usual_result(folds, in_thread):
    target, draft = make_pair()
    inputs, others = ragged_prompts(2, seed=2), ragged_prompts(3, seed=5)
    results, num_folds = [], []

    def plain():
        output = target.generate(
            **others, max_new_tokens=6, output_logits=True, return_dict_in_generate=True, num_beams=1
        )
        results.append(torch.stack(output.logits))

    def meanwhile():
        assert target.config._attn_implementation == FOLDED
        num_folds.append(len(folds))
        if in_thread:
            thread = threading.Thread(target=plain)
            thread.start()
            thread.join(WAIT_S)
        else:
            plain()
        num_folds.append(len(folds))

    plain()
    expected = target.generate(**inputs, max_new_tokens=12)
    assert_equal_ids(expected, run(target, draft, inputs, meanwhile))
    assert len(results) == 2
    assert torch.equal(*results)
    assert num_folds[0] == num_folds[1] < len(folds)


def own_attention(module, query, key, value, attention_mask, **kwargs):
    """A user's attention: as sdpa, which takes rows without a mask to be the first ones of the text."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("drafts", [{"num_assistant_tokens": 3}, {"prompt_lookup_num_tokens": 3}])
def test_an_attention_that_is_handed_no_mask_is_refused_with_the_line_to_add(drafts):
    name = f"own_unmasked_{'_'.join(drafts)}"
    AttentionInterface.register(name, own_attention)
    target = hf_speculate.enable(make_model("llama", attn_implementation=name))
    draft = None if "prompt_lookup_num_tokens" in drafts else noisy_copy(make_model("llama"))
    inputs, options = ragged_prompts(1, seed=3), {"max_new_tokens": 12, **drafts}
    plain = target.generate(**inputs, max_new_tokens=12)
    with pytest.raises(UnsupportedModelError) as refused:
        target.generate(**inputs, **options, assistant_model=draft)
    line = f"transformers.AttentionMaskInterface.register({name!r}, transformers.masking_utils.sdpa_mask)"
    assert f"{name!r}" in str(refused.value)
    assert line in str(refused.value)
    exec(line, {"transformers": transformers})
    for batch_size in (1, 3):
        prompts = ragged_prompts(batch_size, seed=3)
        assert assert_decodes_as_plain(target, draft, prompts, **options).num_drafted > 0
        texts = [model.generate(**prompts, max_new_tokens=12) for model in (make_model("llama"), target)]
        assert_equal_ids(*texts)
    assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=12))


def test_an_attention_without_masks_may_draft_and_decode_without_drafts():
    """A wrong draft changes no text; without drafts, each forward after the prompt reads one token."""
    AttentionInterface.register("own_unmasked", own_attention)
    other = make_model("llama", attn_implementation="own_unmasked")
    target, inputs = hf_speculate.enable(make_model("llama")), ragged_prompts(1, seed=3)
    plain = target.generate(**inputs, max_new_tokens=12)
    assert_equal_ids(plain, target.generate(**inputs, max_new_tokens=12, assistant_model=other, num_assistant_tokens=3))
    coupled = {"do_sample": True, "verifier": "coupled", "seed": 4, "max_new_tokens": 12}
    expected = target.generate(**inputs, **coupled)
    assert_equal_ids(expected, hf_speculate.enable(other).generate(**inputs, **coupled))
