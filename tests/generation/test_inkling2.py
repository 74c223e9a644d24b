"""Inkling 2, whose router stays in float32, so that it cannot be compared in float64 as other families are."""

import pytest
import torch
import transformers

import hf_speculate
from tests.cases import assert_equal_ids
from tests.oracle import Oracle
from tests.tiny import INITIALIZER_RANGE, ragged_prompts

NUM_NEW = 24


@pytest.mark.skipif(not hasattr(transformers, "Inkling2TextConfig"), reason="transformers has no Inkling 2")
@pytest.mark.parametrize(("batch_size", "num_drafted"), [(1, 3), (3, 5)])
def test_greedy_text_is_plain_whatever_number_of_tokens_is_accepted(batch_size, num_drafted):
    config = transformers.Inkling2TextConfig(
        vocab_size=64,
        unpadded_vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_layers_per_attn_res_block=2,
        log_scaling_n_floor=4,  # the temperature of attention grows with the position
        log_scaling_alpha=2.0,
        initializer_range=INITIALIZER_RANGE,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    target = hf_speculate.enable(transformers.Inkling2ForCausalLM(config).eval().requires_grad_(False))
    inputs, stats = ragged_prompts(batch_size, seed=batch_size), hf_speculate.SpeculationStats()
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    oracle = Oracle(plain[:, inputs["input_ids"].shape[1] :])
    options = {"num_assistant_tokens": num_drafted, "num_assistant_tokens_schedule": "constant"}
    ours = target.generate(**inputs, max_new_tokens=NUM_NEW, drafter=oracle, speculation_stats=stats, **options)
    assert_equal_ids(plain, ours)
    assert oracle.accepted >= set(range(num_drafted + 1))
    assert stats.cache == "hybrid"
