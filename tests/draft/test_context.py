"""Test drafts whose context is shorter than the text: only rows past it use plain decoding."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers

import hf_speculate
from hf_speculate.models.context import context_len, context_of, encoder_context_len
from hf_speculate.options.refill.continuous import ContinuousDecoder
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.schedule import MemoryStore
from hf_speculate.schedule.constant import ConstantSchedule
from tests.cases import Unchanged, assert_decodes_as_plain, each_value
from tests.options.heads.designs import VOCAB_SIZE
from tests.options.heads.kinds import KINDS as HEADS
from tests.support.compiled_calls import compile_config
from tests.support.fallbacks import PAST_CONTEXT, without_caches
from tests.support.tiny import make_model, ragged_prompts, with_context
from tests.support.tiny_encoders import make_bart
from tests.support.tiny_families import make_family

C, K = 16, 3
pytestmark = pytest.mark.filterwarnings("ignore:.* past the context of", "ignore:.* tokens at most")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
TARGETS: dict[str, Any] = {
    "bart": make_bart,
    "mpt": partial(make_model, "mpt", dtype=torch.float32),
    "yarn": partial(make_model, "llama", rope_parameters=YARN),
    "dynamic": partial(make_model, "llama", rope_parameters=DYNAMIC, max_position_embeddings=C),
    **{
        family: partial(make_model, family)
        for family in ("llama", "gpt2", "opt", "gpt_neo", "qwen3_5", "bloom")
    },
    **{family: partial(make_family, family) for family in ("imagegpt", "codegen", "led", "trocr")},
}
BY_COLUMNS = ("gpt_neo", "mpt", "imagegpt")  # the longest row limits all rows


@cache
def pair_of(family: str) -> Any:
    """Make a target, and a draft with the same weights and a context of C tokens.

    Within its context, the draft is correct.
    """
    if family == "dynamic":  # up to C tokens, the target has the same frequencies as the draft
        draft = TARGETS[family]()
        target = with_context(
            draft, 512, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        )
        return hf_speculate.enable(target), draft
    target = TARGETS[family]()
    return hf_speculate.enable(target), with_context(target, 4 if family == "yarn" else C)


def prompts(*lens: int) -> dict[str, torch.Tensor]:
    """Return left-padded prompts of the given lengths."""
    width = max(lens)
    rows = [
        ragged_prompts(1, seed=seed, min_len=num, max_len=num, vocab_size=48)
        for seed, num in enumerate(lens)
    ]
    padded = [
        torch.nn.functional.pad(row["input_ids"][0], (width - num, 0))
        for row, num in zip(rows, lens, strict=True)
    ]
    mask = torch.arange(width) >= width - torch.tensor(lens)[:, None]
    return {"input_ids": torch.stack(padded), "attention_mask": mask.long()}


def num_at_most(length: int, num_new: int) -> int:
    """Return the number of drafted tokens that fit into the context if all are accepted.

    Args:
        length: tokens in the row's prompt.
        num_new: new tokens in the call.
    """
    num_accepted, num_left = 0, num_new - 1
    length += 1
    while num_left > 1 and length <= C:
        num = min(K, num_left - 1, C - length + 1)
        num_accepted, length, num_left = num_accepted + num, length + num + 1, num_left - num - 1
    return num_accepted


@pytest.mark.fallback(PAST_CONTEXT, "lock step")
@pytest.mark.parametrize("family", [family for family in TARGETS if family != "bloom"])
def test_drafts_end_with_the_context_and_report_it(family):
    target, draft = pair_of(family)
    inputs = {"input_ids": prompts(5)["input_ids"]}
    num_before = 1 if target.config.is_encoder_decoder else 5
    with pytest.warns(UserWarning, match=f"{PAST_CONTEXT} .*, {C} tokens$") as caught:
        stats = assert_decodes_as_plain(
            target, draft, inputs, max_new_tokens=28, num_assistant_tokens=K
        )
    assert (
        len([warning for warning in caught if PAST_CONTEXT in str(warning.message)])
        == len(without_caches(stats.fallbacks))
        == 1
    )
    assert stats.num_accepted == stats.num_drafted == num_at_most(num_before, 28)


@pytest.mark.fallback(PAST_CONTEXT)
@each_value(
    family=[family for family in TARGETS if family not in ("bart", "led", "trocr", "bloom")],
    longest=[14, 20],
)
def test_long_row_keeps_the_drafts_of_other_rows(family, longest):
    """Give the first row more columns than the context has positions, but fewer tokens."""
    target, draft = pair_of(family)
    stats = assert_decodes_as_plain(
        target,
        draft,
        prompts(3, longest, 4),
        max_new_tokens=11,
        num_assistant_tokens=K,
        speculation_cache="auto",
    )
    assert stats.accepted_per_row == stats.drafted_per_row
    of_long = 0 if family in BY_COLUMNS else num_at_most(longest, 11)
    assert stats.accepted_per_row == [num_at_most(3, 11), of_long, num_at_most(4, 11)]
    assert len(without_caches(stats.fallbacks)) == 1


@pytest.mark.fallback(PAST_CONTEXT)
def test_row_past_the_context_is_no_row_of_the_model_for_the_schedule(monkeypatch):
    target, draft = pair_of("llama")
    update, models = ConstantSchedule.update, []

    def record(schedule, outcome):
        models.append({row.row_id: row.is_model for row in outcome.rows})
        update(schedule, outcome)

    monkeypatch.setattr(ConstantSchedule, "update", record)
    options = {"max_new_tokens": 11, "num_assistant_tokens": K}
    assert_decodes_as_plain(target, draft, prompts(3, C + 4, 4), **options)
    assert any(models[0].values())
    assert not any(rows.get(1, False) for rows in models)


@pytest.mark.parametrize("family", ["gpt_neo", "mpt", "opt"])
def test_padding_common_to_all_rows_takes_no_context(family):
    inputs = {name: tensor[:2] for name, tensor in prompts(5, 3, 20).items()}
    stats = assert_decodes_as_plain(
        *pair_of(family), inputs, max_new_tokens=9, num_assistant_tokens=K
    )
    assert stats.num_accepted == stats.num_drafted > 8


@pytest.mark.fallback(PAST_CONTEXT)
def test_padding_with_positions_takes_context():
    """Use TrOCR, because it counts padding columns as positions, even in plain decoding."""
    inputs = {name: tensor[:1] for name, tensor in prompts(5, 10).items()}
    stats = assert_decodes_as_plain(
        *pair_of("trocr"), inputs, max_new_tokens=20, num_assistant_tokens=K
    )
    assert stats.num_accepted == stats.num_drafted == num_at_most(10, 20)


def test_drafts_without_context_limit_continue():
    target, draft = pair_of("bloom")
    stats = assert_decodes_as_plain(
        target, draft, prompts(5, 20), max_new_tokens=28, num_assistant_tokens=K
    )
    assert stats.num_accepted == stats.num_drafted > 30


OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"speculation_cache": "dynamic"},
    "sampled": {"do_sample": True, "verifier": "coupled", "seed": 4},
    "adaptive": {"num_assistant_tokens": None, "num_assistant_tokens_schedule": "adaptive"},
    "lock step": {"logits_processor": [Unchanged()]},
    "no EOS": {"eos_token_id": None, "return_dict_in_generate": True},
    "state": {"draft_state": hf_speculate.DraftState()},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "early exit": {"assistant_early_exit": 1},
    "static": {"cache_implementation": "static", "speculation_cache": "auto"},
    "compiled": {"compile_config": compile_config()},
}


# transformers' GPT-Neo gives wrong text with a static cache
ONLY_TABLES = ("early exit", "static", "compiled")


@pytest.mark.fallback(PAST_CONTEXT, "lock step", "prompt lookup alone")
@pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family)
        for name in OPTIONS
        for family in ("gpt2", "gpt_neo")
        if family == "gpt2" or name not in ONLY_TABLES
    ],
)
def test_text_past_the_context_is_plain_with_other_options(name, family):
    target, draft = pair_of(family)
    options = {"num_assistant_tokens": K, **OPTIONS[name]}
    if name == "early exit":
        target, draft = hf_speculate.enable(make_model("llama", max_position_embeddings=C)), None
    if name == "adaptive":
        draft = with_context(target, C, num_hidden_layers=1) if family == "gpt2" else draft
    for _ in range(1 + (name == "state")):
        stats = assert_decodes_as_plain(
            target, draft, prompts(3, 14, 20), max_new_tokens=20, **options
        )
        assert any(PAST_CONTEXT in reason for reason in stats.fallbacks) or name == "adaptive"


@pytest.mark.fallback(PAST_CONTEXT)
@pytest.mark.parametrize("family", HEADS)
def test_heads_end_at_their_training_length(family, tmp_path):
    head, target = HEADS[family](tmp_path)
    hf_speculate.enable(target)
    if family == "MTP, two layers of a checkpoint":  # this head reads the target's hidden states
        assert head.spec.max_position_embeddings is None
        return
    head.spec = replace(head.spec, max_position_embeddings=C)
    inputs = ragged_prompts(2, seed=0, min_len=3, max_len=14, vocab_size=VOCAB_SIZE)
    stats = assert_decodes_as_plain(target, head, inputs, max_new_tokens=9, num_assistant_tokens=K)
    hf_speculate.disable(target)
    assert 0 < min(stats.drafted_per_row) <= sum(min(K, C - length + 1) for length in (15, 16))
    assert max(stats.drafted_per_row) > 6
    assert [PAST_CONTEXT in reason for reason in without_caches(stats.fallbacks)] == [True]


@pytest.mark.fallback(
    "the encoder of the drafter (model BartForConditionalGeneration) reads 16 tokens", "lock step"
)
@pytest.mark.parametrize("lookup", [{}, {"prompt_lookup_num_tokens": 3}])
def test_text_too_long_for_the_draft_encoder_decodes_plainly(lookup):
    target, draft = pair_of("bart")
    with pytest.warns(UserWarning, match="reads 16 tokens at most"):
        stats = assert_decodes_as_plain(target, draft, prompts(20, 4), max_new_tokens=8, **lookup)
    assert (stats.num_drafted > 0) == bool(lookup)


@pytest.mark.fallback(PAST_CONTEXT)
def test_joining_rows_have_their_own_context_room():
    target, draft = pair_of("llama")
    texts = [prompts(num)["input_ids"][0].tolist() for num in (13, 3, 4, 14, 5)]
    source = iter([RowPrompt(text) for text in texts])
    options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": 10}
    decoder = ContinuousDecoder(target, 2, options)
    results = [
        result for results in decoder.decode(lambda: next(source, None)) for result in results
    ]
    for prompt, token_ids, _, num_drafted, num_accepted, _ in results:
        plain = target.generate(torch.tensor([prompt.token_ids]), max_new_tokens=10)[0]
        assert plain.tolist() == [*prompt.token_ids, *token_ids]
        assert num_drafted == num_accepted == num_at_most(len(prompt.token_ids), 10)
    assert [PAST_CONTEXT in reason for reason in decoder.stats.fallbacks] == [True]


@pytest.mark.fallback(PAST_CONTEXT)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_past_the_context_update_no_acceptance(family):
    """Check the adaptive schedule's next call, which uses only acceptance within the context."""
    target = hf_speculate.enable(make_model(family, max_position_embeddings=64))
    draft = with_context(target, C)  # fewer positions make it cheaper than its target
    if family == "llama":
        draft = with_context(target, C, intermediate_size=47)
        draft.model.layers[0].mlp.gate_proj.weight[:] = target.model.layers[0].mlp.gate_proj.weight[
            :47
        ]
    options = {"num_assistant_tokens": None, "num_assistant_tokens_schedule": "adaptive"}
    for num in (3, 4, 5):
        stats = assert_decodes_as_plain(
            target, draft, prompts(num, 14), max_new_tokens=30, **options
        )
        assert stats.draft_lens[-1] == 0
    memories = MemoryStore.of(target)._by_draft[draft].values()
    assert all(memory.acceptance.probabilities()[0] > 0.7 for memory in memories)


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        (transformers.LlamaConfig(max_position_embeddings=64), 64),
        (
            transformers.LlamaConfig(
                max_position_embeddings=64, rope_parameters={**DYNAMIC, "factor": 4.0}
            ),
            64,
        ),
        (
            transformers.LlamaConfig(
                max_position_embeddings=64, rope_parameters={**YARN, "rope_type": "linear"}
            ),
            64,
        ),
        (
            transformers.Qwen2Config(
                max_position_embeddings=32, rope_parameters={**YARN, "factor": 16.0}
            ),
            64,
        ),
        (transformers.Qwen2Config(max_position_embeddings=32, rope_parameters=YARN), 32),
        (transformers.GPT2Config(n_positions=48), 48),
        (transformers.MptConfig(max_seq_len=48), 48),
        (transformers.WhisperConfig(max_target_positions=48), 48),
        (transformers.LEDConfig(max_decoder_position_embeddings=48), 48),
        (transformers.FalconConfig(alibi=True), None),
        (transformers.BloomConfig(), None),
        (transformers.T5Config(), None),
        (transformers.MambaConfig(), None),
    ],
)
def test_context_length_follows_the_config_and_rope_scaling(config, num_tokens):
    assert context_len(config) == num_tokens


def test_long_rope_draft_continues_for_prompts_already_longer():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    sizes = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    model = make_model(
        "phi3", rope_parameters=rope | {"original_max_position_embeddings": 16}, **sizes
    )
    assert [context_of(model, longest=num).num_tokens for num in (5, 17)] == [16, 64]
    assert encoder_context_len(transformers.LEDConfig(max_encoder_position_embeddings=48)) == 48
