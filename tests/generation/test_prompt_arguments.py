"""Model arguments that are read with the prompt only, by decoders or by an encoder."""

import pytest
import torch

import hf_speculate
from tests.cases import assert_equal_ids
from tests.tiny import noisy_copy
from tests.tiny_readers import ENCODERS, READERS

NUM_NEW = 14
DRAFT_NOISE = 0.01  # the draft has not read what the target has


def decode(model, inputs, **options):
    torch.manual_seed(0)  # some readers draw noise
    return model.generate(**inputs, max_new_tokens=NUM_NEW, return_dict_in_generate=True, output_logits=True, **options)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_decodes_as_in_plain(name):
    target, inputs, other = READERS[name]()
    draft = noisy_copy(target, DRAFT_NOISE)
    plain = decode(target, inputs)
    hf_speculate.enable(target)
    stats = hf_speculate.SpeculationStats()
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "speculation_stats": stats}
    ours = decode(target, inputs, **options)
    assert_equal_ids(plain.sequences, ours.sequences)
    for layer, expected in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert torch.allclose(layer.keys, expected.keys)
        assert torch.allclose(layer.values, expected.values)
    assert stats.num_accepted > 0
    assert not torch.equal(decode(target, {**inputs, name: other}, **options).sequences, ours.sequences)


@pytest.mark.parametrize("name", ENCODERS)
def test_what_an_encoder_reads_beside_its_text(name):
    target, inputs, other = ENCODERS[name]()
    draft, stats = noisy_copy(target, DRAFT_NOISE), hf_speculate.SpeculationStats()
    seen = []
    draft.get_encoder().register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    plain = decode(target, inputs)
    hf_speculate.enable(target)
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "speculation_stats": stats}
    assert_equal_ids(plain.sequences, decode(target, inputs, **options).sequences)
    assert stats.num_accepted > 0
    assert torch.equal(seen[0][name], inputs[name])
    assert not torch.equal(decode(target, {**inputs, name: other}).logits[0], plain.logits[0])
