"""Test Gemma 4 assistants in `generate()`: texts equal the target's, and mismatches are refused."""

import re
import warnings

import pytest
import torch
from torch import nn

import hf_speculate
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.options.gemma4.assistant import Gemma4Assistant
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.tools.checks.positions import check_positions
from tests.cases import CACHES, assert_decodes_as_plain, each_value
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.options.gemma4.models import make_assistant, make_target
from tests.options.heads.rounds import random_texts
from tests.options.refill.test_continuous import alone, decoded
from tests.support.tiny import make_model, ragged_prompts

NUM_NEW = 24
# Over 512 texts. The prompt's forward gives the first token, and a round gives the others.
NUM_DRAWS, NUM_DRAWN = 8_000, 3
SMALL = {
    "vocab_size": 8,
    "vocab_size_per_layer_input": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
}
CONSTANT = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}


@pytest.mark.fallback("rejection in place of block")
@each_value(
    verifier=["greedy", "rejection", "block", "coupled"],
    num_shared=[2, 0],
    is_ordered=[False, True, True],
    batch_size=[3, 1, 8],
    cache=CACHES,
    form=["folder", "model", "model"],
)
def test_greedy_text_equals_plain_with_lossless_verifiers(
    verifier, num_shared, is_ordered, batch_size, cache, form, tmp_path
):
    target = hf_speculate.enable(
        make_target(num_shared, vocab_size=16, vocab_size_per_layer_input=16)
    )
    assistant = make_assistant(target, is_ordered=is_ordered)
    if form == "folder":
        assistant.save_pretrained(tmp_path)
        assistant = str(tmp_path)
    inputs = ragged_prompts(batch_size, seed=1, max_len=20, vocab_size=16)
    options = {
        "verifier": verifier,
        "speculation_cache": cache,
        "eos_token_id": [5],
        "max_new_tokens": NUM_NEW,
    }
    stats = assert_decodes_as_plain(target, assistant, inputs, **options, **CONSTANT)
    assert "drafter: assistant Gemma4AssistantForCausalLM" in stats.plan
    assert max(stats.rounds_by_draft_len) == 3
    assert stats.num_accepted > 0


class Sealed(nn.Module):
    """Linear layer whose weight only the module can read, as in packing libraries."""

    def __init__(self, linear):
        super().__init__()
        self.packed = linear.weight

    def forward(self, states):
        return nn.functional.linear(states, self.packed)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_packed_head_drafts_the_same_tokens(is_ordered):
    target, inputs, drafted = hf_speculate.enable(make_target()), ragged_prompts(2, seed=1), []
    for is_packed in (False, True):
        assistant = make_assistant(target, is_ordered=is_ordered)
        if is_packed:
            assistant.lm_head = Sealed(assistant.lm_head)
        stats = assert_decodes_as_plain(
            target, assistant, inputs, max_new_tokens=NUM_NEW, **CONSTANT
        )
        drafted.append((stats.num_drafted, stats.accepted_per_position))
    assert drafted[0] == drafted[1]
    assert sum(drafted[0][1]) > 0


@pytest.mark.parametrize(("is_ordered", "verifier"), [(False, "rejection"), (True, "block")])
def test_joint_distribution_is_that_of_the_target(is_ordered, verifier):
    target = hf_speculate.enable(make_target(dtype=torch.float32, **SMALL))
    target.get_output_embeddings().weight.mul_(0.3)  # flat enough that every token occurs
    assistant, stats = (
        make_assistant(target, is_ordered=is_ordered, scale=0.5),
        hf_speculate.SpeculationStats(),
    )
    options = {"num_assistant_tokens": 2, "max_new_tokens": NUM_DRAWN, "verifier": verifier}
    counts = draw(target, assistant, NUM_DRAWS, **options, speculation_stats=stats)
    assert p_value(counts, joint_distribution(target, NUM_DRAWN)) > SIGNIFICANCE
    assert min(stats.accepted_per_position) > 0


@pytest.mark.fallback("past the context of")
def test_joining_rows_get_the_texts_of_rows_alone():
    """Add rows while others stay, although the latter are too long for further drafts.

    The assistant then serves only some of the rows.
    """
    target = make_target()
    assistant = make_assistant(target, scale=0.3, max_position_embeddings=20)
    options = {
        "assistant_model": assistant,
        "num_assistant_tokens": 3,
        "do_sample": True,
        "verifier": "rejection",
    }
    lens = [3, 25, 8, 14, 2, 19, 1, 5]
    prompts = [
        RowPrompt(text, seed=key, arguments={"max_new_tokens": 4 + 9 * (key % 3)}, key=key)
        for key, text in enumerate(random_texts(lens, seed=5, vocab_size=64))
    ]
    results, decoder = decoded(target, prompts, **options)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    assert decoder.stats.num_rounds > 1.2 * decoder.stats.num_batch_rounds, (
        "rows are decoded one by one"
    )
    assert decoder.stats.num_accepted > 0


@pytest.mark.fallback("past the context of")
def test_rows_past_the_assistant_context_decode_plainly():
    target = hf_speculate.enable(make_target())
    assistant = make_assistant(target, max_position_embeddings=16)
    stats = assert_decodes_as_plain(
        target, assistant, ragged_prompts(3, seed=1), max_new_tokens=NUM_NEW, **CONSTANT
    )
    assert stats.rounds_by_draft_len[0] > 0
    assert stats.num_drafted > 0


def test_generation_config_of_the_assistant_bounds_drafts():
    target = hf_speculate.enable(make_target())
    assistant, stats = make_assistant(target), hf_speculate.SpeculationStats()
    assistant.generation_config.num_assistant_tokens = 2
    options = {"max_new_tokens": 8, "speculation_stats": stats}
    target.generate(**ragged_prompts(2), assistant_model=Gemma4Assistant(assistant), **options)
    assert "draft length: adaptive, at most 2;" in stats.plan


def test_low_first_token_acceptance_warns_once():
    target = hf_speculate.enable(make_target())
    assistant = make_assistant(target, seed=7)
    call = {**ragged_prompts(8), "assistant_model": assistant, "num_assistant_tokens": 1}
    with pytest.warns(
        UserWarning, match=r"fewer than 20% of the first tokens .* which check_positions measures"
    ):
        target.generate(**call, max_new_tokens=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**call, max_new_tokens=4)


def changed(make, **fields):
    """Return a target, and an assistant made for a different one."""
    return make_target(**fields), make(make_target())


REFUSED = {
    "another family": (
        lambda: (make_model("gemma3"), make_assistant(make_target())),
        "is of type gemma3_text",
    ),
    "width": (
        lambda: changed(make_assistant, hidden_size=16),
        "states of width 32, and the target's are 16",
    ),
    "dtype": (
        lambda: changed(make_assistant, dtype=torch.float32),
        "it is in torch.float64, and the target in torch.float32",
    ),
    "vocabulary": (
        lambda: changed(lambda target: make_assistant(target, vocab_size=2048)),
        "its vocabulary has 2048 tokens, and the target's 64",
    ),
    "heads": (
        lambda: changed(make_assistant, num_key_value_heads=4),
        "reads keys of (2, 8) (heads, width) in sliding_attention, and the target's are (4, 8)",
    ),
    "width of heads": (
        lambda: changed(lambda target: make_assistant(target, global_head_dim=8)),
        "reads keys of (2, 8) (heads, width) in full_attention, and the target's are (2, 16)",
    ),
    "no such layer": (
        lambda: changed(make_assistant, num_shared=0, layer_types=["full_attention"] * 4),
        "a layer of type sliding_attention, and the target stores states of none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mismatched_assistants_are_refused(name):
    make, problem = REFUSED[name]
    target, assistant = make()
    message = (
        f"must be the assistant of its target {type(target).__name__}, got .*{re.escape(problem)}"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        hf_speculate.generate(
            target, **ragged_prompts(2), assistant_model=assistant, max_new_tokens=4
        )


def test_options_unsupported_with_an_assistant_are_refused(tmp_path):
    target = hf_speculate.enable(make_target())
    assistant = make_assistant(target)
    for draft_options in (
        {"prompt_lookup_num_tokens": 4},
        {"draft_state": hf_speculate.DraftState()},
    ):
        with pytest.raises(
            UnsupportedGenerationError,
            match=f"{next(iter(draft_options))} cannot be combined with a Gemma 4",
        ):
            target.generate(**ragged_prompts(2), assistant_model=assistant, **draft_options)
    with pytest.raises(ConfigError, match="position must be -1 or 0, got 1"):
        Gemma4Assistant(assistant, 1)
    with pytest.raises(ConfigError, match="prompts must hold a text of at least three tokens"):
        check_positions(Gemma4Assistant(assistant), target, torch.ones(1, 2, dtype=torch.int64))
    assistant.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"got model_type 'gemma4_assistant' .* pass it as assist"
    ):
        load_drafter(tmp_path, target)
    assistant.config.get_text_config()._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(
        UnsupportedModelError, match="must be sdpa or eager, got 'flash_attention_2'"
    ):
        target.generate(**ragged_prompts(2), assistant_model=assistant)
