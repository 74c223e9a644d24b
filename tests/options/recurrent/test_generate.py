"""Compare greedy text from hybrid and recurrent models with plain `generate`, for every drafter."""

import gc
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_speculate
from hf_speculate.draft.base import DrafterSetup, DraftRequest
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.models.language_model import cache_name, has_attention
from hf_speculate.options.recurrent.states import RecurrentStates
from hf_speculate.types import DraftOut
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value
from tests.reliability.faults import Fault, Mistake, hook
from tests.reliability.test_threads import together
from tests.support.recurrent_cases import assert_equal_caches, hooks_of, recurrent_states
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_configs import RECURRENT_FAMILIES, fill

NUM_NEW = 24  # with 5 drafted tokens, rows accept every possible number of tokens
FEW_FAMILIES = ("qwen3_5", "lfm2", "falcon_h1", "mamba2")


class Oracle:
    """Drafter that proposes each row's new tokens [B, N], some of them wrong.

    In round r, the first (r + b) mod (K + 1) tokens of row b are correct.
    """

    def __init__(self, texts: Tensor):
        self.texts = texts.tolist()
        self.places = [1] * len(self.texts)  # the token after the prompt comes from the target
        self.row_ids = list(range(len(self.texts)))
        self.num_rounds = 0
        # Numbers of accepted tokens, over all rows and rounds.
        self.accepted: set[int] = set()

    def __call__(self, setup: DrafterSetup) -> "Oracle":
        return self

    def draft(self, request: DraftRequest) -> DraftOut:
        kept, num_draft_tokens = request.kept, request.num_draft_tokens
        if kept is not None:
            for row, num in enumerate(kept.num_emitted.tolist()):
                self.places[row] += num
                self.accepted |= {num - 1} if num else set()
        drafts = []
        for row, position in enumerate(self.places):
            num_right = (self.num_rounds + self.row_ids[row]) % (num_draft_tokens + 1)
            text = (self.texts[self.row_ids[row]] + [0] * num_draft_tokens)[position:][
                :num_draft_tokens
            ]
            drafts.append(
                [token if at < num_right else (token + 1) % 64 for at, token in enumerate(text)]
            )
        self.num_rounds += 1
        ids = torch.tensor(drafts)
        return DraftOut(
            ids, torch.full((len(ids),), num_draft_tokens, dtype=torch.int32), None, None
        )

    def rows(self, indices: Sequence[int]) -> None:
        self.places = [self.places[row] for row in indices]
        self.row_ids = [self.row_ids[row] for row in indices]


@cache
def target_of(family: str) -> PreTrainedModel:
    return hf_speculate.enable(make_model(family))


@cache
def draft_of(family: str) -> PreTrainedModel:
    return noisy_copy(target_of(family))


def assert_plain_whatever_is_accepted(target, batch_size, num_drafted):
    inputs = ragged_prompts(batch_size, seed=batch_size)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    oracle, stats = (
        Oracle(plain[:, inputs["input_ids"].shape[1] :]),
        hf_speculate.SpeculationStats(),
    )
    draft_options = {
        "drafter": oracle,
        "num_assistant_tokens": num_drafted,
        "speculation_stats": stats,
    }
    ours = target.generate(
        **inputs, max_new_tokens=NUM_NEW, num_assistant_tokens_schedule="constant", **draft_options
    )
    assert_equal_ids(plain, ours)
    assert oracle.accepted >= set(range(num_drafted + 1))
    assert stats.cache == "hybrid"
    assert "target cache: hybrid (keeps " in stats.plan
    assert not stats.lock_step
    assert not hooks_of(target)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
@pytest.mark.parametrize(
    ("batch_size", "num_drafted"),
    [
        (3, 5),
        *(
            pytest.param(*size, marks=pytest.mark.slow)
            for size in ((1, 1), (1, 3), (1, 5), (3, 1), (3, 3))
        ),
    ],
)
def test_greedy_text_equals_plain_for_all_accepted_counts(family, batch_size, num_drafted):
    assert_plain_whatever_is_accepted(target_of(family), batch_size, num_drafted)


@pytest.mark.skipif(
    not hasattr(transformers, "Inkling2TextConfig"), reason="transformers has no Inkling 2"
)
def test_greedy_text_of_inkling2_equals_plain():
    """Decode in float32, because the model's router stays in float32."""
    config = fill(
        transformers.Inkling2TextConfig,
        num_hidden_layers=3,
        d_rel=4,
        rel_extent=32,
        n_layers_per_attn_res_block=2,
        unpadded_vocab_size=64,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        log_scaling_n_floor=4,  # the attention temperature grows with the position
        log_scaling_alpha=2.0,
    )
    torch.manual_seed(0)
    target = hf_speculate.enable(
        transformers.Inkling2ForCausalLM(config).eval().requires_grad_(False)
    )
    assert_plain_whatever_is_accepted(target, 3, 5)


@each_value(batch_size=[1, 3], family=FEW_FAMILIES)
def test_passed_cache_continues_over_calls(family, batch_size):
    """End rows early in the first call."""
    target, inputs = target_of(family), ragged_prompts(batch_size, seed=batch_size)
    new_ids = target.generate(**inputs, max_new_tokens=14)[:, inputs["input_ids"].shape[1] :]
    ends = [int(new_ids[0, 4]), int(new_ids[-1, 9])] if batch_size > 1 else None
    caches, texts = [], []
    for draft_options in ({}, {"assistant_model": draft_of(family), "num_assistant_tokens": 4}):
        caches.append(DynamicCache(config=target.config))
        options = {"max_new_tokens": 14, cache_name(target): caches[-1], **draft_options}
        first = target.generate(**inputs, **options, eos_token_id=ends)
        more = torch.cat([first, torch.full((batch_size, 3), 7)], dim=1)
        mask = torch.ones_like(more)
        mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
        if not has_attention(target):  # such a cache does not report its length
            more, mask = more[:, -4:], mask[:, -4:]
        texts += [first, target.generate(more, attention_mask=mask, **options)]
    assert_equal_ids(texts[0], texts[2])
    assert_equal_ids(texts[1], texts[3])
    assert_equal_caches(*caches)


def test_prompts_are_chunked_if_several_tokens_are_exact():
    inputs, options = ragged_prompts(3, seed=3), {"max_new_tokens": 8, "prefill_chunk_size": 4}
    # Jamba reads a chunk as if nothing came before it, even in plain decoding.
    for family in ("qwen3_5", "jamba"):
        assert_decodes_as_plain(
            target_of(family), draft_of(family), inputs, **options, num_assistant_tokens=3
        )
    ours = target_of("mamba2").generate(**inputs, **options, prompt_lookup_num_tokens=3)
    # Plain decoding does not split the prompt.
    assert_equal_ids(target_of("mamba2").generate(**inputs, max_new_tokens=8), ours)
    with pytest.raises(
        UnsupportedModelError, match="prefill_chunk_size must be left out for MambaForCausalLM"
    ):
        target_of("mamba").generate(**inputs, **options, prompt_lookup_num_tokens=3)


@pytest.mark.fallback("lock step")
@pytest.mark.skipif("inkling" not in RECURRENT_FAMILIES, reason="transformers has no Inkling")
def test_rows_move_in_lock_step_if_attention_counts_columns():
    """Use Inkling, whose attention temperature grows with the column.

    The rows of its draft have four convolutions per layer.
    """
    target = hf_speculate.enable(
        make_model("inkling", log_scaling_n_floor=4, log_scaling_alpha=2.0)
    )
    for model, is_lock_step in ((target, True), (target_of("inkling"), False)):
        options = {"max_new_tokens": 8, "num_assistant_tokens": 3}
        stats = assert_decodes_as_plain(
            model, draft_of("inkling"), ragged_prompts(3, seed=1), **options
        )
        assert stats.lock_step == is_lock_step


def test_early_exit_needs_an_attention_layer():
    inputs, options = ragged_prompts(3, seed=3), {"max_new_tokens": 12, "num_assistant_tokens": 3}
    for family, num_layers in (("qwen3_5", 2), ("mamba", 1), ("jamba", 2)):
        assert_decodes_as_plain(
            target_of(family), None, inputs, **options, assistant_early_exit=num_layers
        )
    with pytest.raises(
        ConfigError,
        match="assistant_early_exit must leave an attention layer in Qwen3_5ForCausalLM",
    ):
        target_of("qwen3_5").generate(**inputs, **options, assistant_early_exit=1)


@pytest.mark.fallback("of the memory")
@each_value(
    family=["mamba2", "lfm2", "falcon_h1", "bamba"], part=["target", "draft"], keeps=[True, False]
)
def test_model_with_layers_on_disk_decodes_as_plain(family, part, keeps, tmp_path, monkeypatch):
    if not keeps:  # states are recomputed from weights that are loaded again
        monkeypatch.setattr("hf_speculate.options.recurrent.kind.MAX_STATE_SHARE", -1.0)
    whole = make_model(family).float()
    models = {"target": whole, "draft": noisy_copy(whole, 0.05, seed=1)}
    models[part].save_pretrained(tmp_path / "model")
    num_bytes = sum(weight.numel() * weight.element_size() for weight in whole.parameters())
    placement = {
        "device_map": "auto",
        "max_memory": {"cpu": num_bytes // 2},
        "offload_folder": tmp_path / "rest",
    }
    models[part] = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, **placement
    )
    assert any(weight.is_meta for weight in models[part].parameters())
    target, stats = hf_speculate.enable(models["target"]), hf_speculate.SpeculationStats()
    options = {**ragged_prompts(3, seed=3), "max_new_tokens": 16}
    plain = target.generate(**options)
    drafts = {
        "assistant_model": models["draft"],
        "num_assistant_tokens": 3,
        "speculation_stats": stats,
    }
    assert_equal_ids(plain, target.generate(**options, **drafts))
    assert 0 < stats.num_accepted < stats.num_drafted
    assert any(weight.is_meta for weight in models[part].parameters())


def test_round_loads_mixer_projections_once(tmp_path, monkeypatch):
    make_model("mamba2").float().save_pretrained(tmp_path / "model")
    placement = {
        "device_map": {"": "disk"},
        "offload_folder": tmp_path / "rest",
        "dtype": torch.float32,
    }
    target = hf_speculate.enable(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", **placement)
    )
    names = {module: name.rpartition(".")[2] for name, module in target.named_modules()}
    options = {**ragged_prompts(1, seed=1), "max_new_tokens": 12, "prompt_lookup_num_tokens": 4}
    stats = hf_speculate.SpeculationStats()
    drafts = {"num_assistant_tokens_schedule": "constant", "speculation_stats": stats}
    target.generate(**options, **drafts)  # probes the mixers
    loads, load = Counter(), AlignDevicesHook.pre_forward
    monkeypatch.setattr(
        AlignDevicesHook,
        "pre_forward",
        lambda hook, module, *args, **kwargs: (
            loads.update([names.get(module)]) or load(hook, module, *args, **kwargs)
        ),
    )
    target.generate(**options, **drafts)
    assert stats.num_drafted > 0
    num_layers, num_forwards = target.config.num_hidden_layers, 1 + stats.num_target_forwards
    assert (loads["in_proj"], loads["out_proj"]) == (num_layers * num_forwards,) * 2


def test_states_without_rollback_are_refused_by_name():
    inputs, drafts = ragged_prompts(1, seed=1), {"prompt_lookup_num_tokens": 3, "max_new_tokens": 3}
    with pytest.raises(UnsupportedModelError, match="got 'preallocated': it has recurrent layers"):
        target_of("lfm2").generate(**inputs, **drafts, speculation_cache="preallocated")
    model = hf_speculate.enable(make_model("qwen3_5"))
    mixer = next(module for module in model.modules() if hasattr(module, "conv1d"))
    mixer.forward = mixer.forward
    with pytest.raises(
        UnsupportedModelError, match="whose Qwen3_5GatedDeltaNet has a replaced forward"
    ):
        model.generate(**inputs, **drafts)
    del mixer.forward
    model._tp_size = 2
    with pytest.raises(
        UnsupportedModelError, match="has recurrent state and is split by tensor parallelism"
    ):
        model.generate(**inputs, **drafts)
    model._tp_size = 1
    model.compile(backend="eager")
    with pytest.raises(
        UnsupportedModelError,
        match="Qwen3_5ForCausalLM has recurrent state and is compiled in place",
    ):
        model.generate(**inputs, **drafts)


@each_value(
    error=[Mistake("on purpose"), KeyboardInterrupt("on purpose")], family=["qwen3_5", "mamba2"]
)
def test_error_in_a_mixer_restores_hooks_and_cache(family, error):
    target, prompt = target_of(family), ragged_prompts(3, seed=3)
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    for kv_cache in caches:
        text = target.generate(**prompt, max_new_tokens=8, **{cache_name(target): kv_cache})
    before = recurrent_states(caches[0])
    ids = text[:, -1:] if not has_attention(target) else text
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    mixer = next(module for module in reversed(list(target.modules())) if hasattr(module, "conv1d"))
    drafts = {"assistant_model": draft_of(family), "num_assistant_tokens": 4}
    fault = Fault(2 * 4 + 1, error)  # in the second round, after some of its tokens
    with hook(mixer.norm, fault), pytest.raises(type(error)):
        target.generate(**inputs, **drafts, **{cache_name(target): caches[0]})
    assert not hooks_of(target)
    for states, others in zip(before, recurrent_states(caches[0]), strict=True):
        assert all(torch.equal(states[slot], others[slot]) for slot in states)
    assert_equal_ids(
        *(target.generate(**inputs, **{cache_name(target): kv_cache}) for kv_cache in caches)
    )


def test_states_are_freed_with_the_call():
    def num_living() -> int:
        return sum(type(instance) is RecurrentStates for instance in gc.get_objects())

    model, prompts = hf_speculate.enable(make_model("lfm2")), ragged_prompts(2)
    gc.collect()
    gc.disable()
    try:
        before = num_living()  # other tests may still hold some
        model.generate(**prompts, prompt_lookup_num_tokens=3, max_new_tokens=4, do_sample=False)
        assert num_living() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["qwen3_5", "mamba"])
def test_threads_on_one_model_get_their_texts(family):
    with_draft = {"assistant_model": draft_of(family), "num_assistant_tokens": 3}
    target, ways = target_of(family), (with_draft, {"prompt_lookup_num_tokens": 4}, {})

    def decode(seed, own):
        return [
            target.generate(**ragged_prompts(3, seed=seed), max_new_tokens=12, **own)
            for _ in range(3)
        ]

    all_texts = together(
        *(lambda _, seed=seed, own=own: decode(seed, own) for seed, own in enumerate(ways))
    )
    for seed, texts in enumerate(all_texts):
        for plain, text in zip(decode(seed, {}), texts, strict=True):
            assert_equal_ids(plain, text)
    assert not hooks_of(target)
