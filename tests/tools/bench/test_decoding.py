"""Every method decodes as its own `generate()` does, whatever the models' configs say."""

import copy
import functools
import time

import pytest

from hf_speculate.errors import ConfigError
from hf_speculate.generation.enable import enable, is_enabled
from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.decoding import Decoder
from hf_speculate.tools.bench.methods import DraftLen, Method, assisted_methods, our_methods, plain_method
from tests.tiny import make_model, noisy_copy, ragged_prompts

NUM_NEW = 12
EOS = 11


@pytest.fixture(scope="module")
def target():
    return make_model("llama")


@pytest.fixture(scope="module")
def batch():
    inputs = ragged_prompts(3, seed=4)
    return Batch(0, inputs["input_ids"], inputs["attention_mask"])


@pytest.fixture(scope="module")
def plain_ids(target, batch):
    output = target.generate(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=NUM_NEW, do_sample=False
    )
    return output[:, batch.input_ids.shape[1] :].tolist()


def greedy_methods():
    return [
        plain_method(False),
        *assisted_methods([DraftLen(3, False)], False),
        *our_methods(["greedy"], [DraftLen(3, False), DraftLen(None, True)], False, {}),
    ]


def draft_of(target):
    draft = noisy_copy(target)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


@pytest.mark.parametrize("method", greedy_methods(), ids=lambda method: method.name)
def test_the_first_token_is_there_after_the_first_forward(method, target, batch):
    forward, seconds = type(target).forward, []

    def slow(model, *args, **kwargs):
        time.sleep(0 if seconds else 0.1)  # the first forward alone
        output = forward(model, *args, **kwargs)
        seconds.append(1)
        return output

    draft = draft_of(target)
    target.forward = functools.partial(slow, target)
    try:
        decoded = Decoder(target, {"assistant_model": draft}, max_new_tokens=NUM_NEW)(method, batch, 0)
    finally:
        del target.forward
    assert 0.1 < decoded.first_token_s < 2
    assert not target._forward_hooks


def test_a_call_that_fails_leaves_no_hook(target, batch):
    decoder = Decoder(target, {"assistant_model": draft_of(target)}, max_new_tokens=NUM_NEW)
    with pytest.raises(ConfigError, match="verifier must be one of"):
        decoder(Method("wrong", "ours", {"verifier": "wrong"}), batch, 0)
    assert not target._forward_hooks


@pytest.mark.parametrize("method", greedy_methods(), ids=lambda method: method.name)
@pytest.mark.parametrize(("enabled", "options"), [(False, {}), (True, {"repetition_penalty": 1.8})])
def test_greedy_methods_write_the_same_text(method, enabled, options, target, batch):
    plain = target.generate(**batch.inputs, max_new_tokens=NUM_NEW, do_sample=False, **options)
    model = enable(copy.deepcopy(target)) if enabled else target
    decoder = Decoder(model, {"assistant_model": draft_of(target)}, max_new_tokens=NUM_NEW, options=options)
    decoded = decoder(method, batch, 0)
    assert [ids.tolist() for ids in decoded.new_ids] == plain[:, batch.input_ids.shape[1] :].tolist()
    assert is_enabled(model) is enabled
    assert (decoded.stats is not None) is (method.engine == "ours")
    if method.num_assistant_tokens and decoded.stats is not None:
        assert max(decoded.stats.rounds_by_draft_len) == 3


def test_fields_that_the_models_carry_count_for_no_method(target, batch, plain_ids):
    model, draft = copy.deepcopy(target), draft_of(target)
    for config in (model.generation_config, draft.generation_config):
        config.verifier = "typical"
        config.posterior_threshold = 0.5
        config.num_assistant_tokens = 7
        config.num_assistant_tokens_schedule = "constant"
        config.prompt_lookup_num_tokens = 4
    before = [copy.deepcopy(config.to_dict()) for config in (model.generation_config, draft.generation_config)]
    decoder = Decoder(enable(model), {"assistant_model": draft}, max_new_tokens=NUM_NEW)
    for method in greedy_methods():
        decoded = decoder(method, batch, 0)
        assert [ids.tolist() for ids in decoded.new_ids] == plain_ids
        if decoded.stats is not None:
            assert decoded.stats.verifier == "greedy"
            assert 7 not in decoded.stats.rounds_by_draft_len
    assert [config.to_dict() for config in (model.generation_config, draft.generation_config)] == before


def test_transformers_drafts_what_it_is_told(target, batch):
    seen = []
    handle = target.register_forward_hook(lambda module, args, output: seen.append(output.logits.shape[1]))
    try:
        decoder = Decoder(target, {"assistant_model": draft_of(target)}, max_new_tokens=NUM_NEW)
        decoder(Method("k", "transformers", DraftLen(3, False).fields), batch, 0)
    finally:
        handle.remove()
    assert max(seen) == 4  # the drafted tokens and the one before them


@pytest.mark.parametrize("verifier", [None, "coupled"])
def test_seeds_and_the_temperature_reach_methods_that_draw(verifier, target, batch, plain_ids):
    draft, method = draft_of(target), plain_method(True)
    if verifier is not None:
        (method,) = our_methods([verifier], [DraftLen(3, False)], True, {})

    def texts(temperature, seed):
        sampling = {"temperature": temperature}
        decoder = Decoder(target, {"assistant_model": draft}, max_new_tokens=NUM_NEW, sampling=sampling)
        return [ids.tolist() for ids in decoder(method, batch, seed).new_ids]

    assert texts(1e-4, 0) == plain_ids
    assert texts(0.8, 1) == texts(0.8, 1) != texts(0.8, 2)


def test_the_ids_that_end_a_row_are_the_targets(target):
    model = copy.deepcopy(target)
    for value, expected in ((None, set()), (EOS, {EOS}), ([EOS, 12], {EOS, 12})):
        model.generation_config.eos_token_id = value
        assert Decoder(model, {"assistant_model": model}, max_new_tokens=1).eos_token_ids == expected
