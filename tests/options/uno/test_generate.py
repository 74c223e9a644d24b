"""Test Uno adapters in `generate()`: texts equal the target's, and the target is unchanged."""

import copy
import re
import shutil
import threading
import warnings
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_speculate
from hf_speculate import UnoAdapter
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.models.module_walk import forward_hook_ids, has_hooks_of_others
from hf_speculate.options.heads.layer_capture import LayerCapture
from hf_speculate.options.refill.row_prompts import RowPrompt
from hf_speculate.options.uno.source import UnoSource
from tests.cases import CACHES, assert_decodes_as_plain, assert_equal_ids, each_value
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.options.compiled.conftest import backend as backend
from tests.options.compiled.test_graphs import ENDS, decode
from tests.options.heads.rounds import BySum, random_texts
from tests.options.refill.test_continuous import alone, decoded
from tests.options.uno.adapters import ALPHA, RANK, make_tensors, write_adapter
from tests.random_calls import target_of
from tests.support.compiled_calls import compile_config
from tests.support.tiny import make_model, make_small_model, ragged_prompts

NUM_NEW = 24
# over 625 texts; the prompt's forward gives the first token, and a round gives up to three
NUM_DRAWS, NUM_DRAWN, SMALL_VOCAB = 8_000, 4, 5
CONSTANT = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}


def make_pair(folder, family="llama", size=0.05, **options):
    """Return an enabled target and its adapter."""
    target = hf_speculate.enable(make_model(family, **options))
    return target, UnoAdapter(write_adapter(folder, make_tensors(target, size)))


@pytest.mark.fallback("rejection in place of block")
@each_value(
    family=["llama", "qwen3", "gemma3", "mistral_window"],
    verifier=["greedy", "rejection", "block", "coupled"],
    batch_size=[3, 1, 8],
    cache=CACHES,
)
def test_greedy_text_is_plain_with_every_lossless_verifier(
    family, verifier, batch_size, cache, tmp_path
):
    target, adapter = make_pair(tmp_path, family)
    inputs = ragged_prompts(batch_size, seed=1, max_len=20)
    options = {
        "verifier": verifier,
        "speculation_cache": cache,
        "eos_token_id": [5],
        "max_new_tokens": NUM_NEW,
    }
    stats = assert_decodes_as_plain(target, adapter, inputs, **options, **CONSTANT)
    assert f"drafter: Uno adapter {tmp_path.name};" in stats.plan
    assert max(stats.rounds_by_draft_len) == 4
    # the first draft token comes from the target itself
    assert stats.accepted_per_position[0] == stats.verified_per_position[0]


@pytest.mark.parametrize(("verifier", "top_p"), [("rejection", 1.0), ("block", 0.9)])
def test_the_joint_distribution_is_the_targets(verifier, top_p, tmp_path):
    target = hf_speculate.enable(make_small_model(SMALL_VOCAB, dtype=torch.float32))
    adapter = UnoAdapter(write_adapter(tmp_path, make_tensors(target, size=0.2)))
    stats = hf_speculate.SpeculationStats()
    options = {"num_assistant_tokens": 2, "max_new_tokens": NUM_DRAWN, "verifier": verifier}
    counts = draw(target, adapter, NUM_DRAWS, **options, top_p=top_p, speculation_stats=stats)
    joint = joint_distribution(target, NUM_DRAWN, top_p=top_p)
    assert p_value(counts, joint) > SIGNIFICANCE
    assert 0 < stats.accepted_per_position[1] < stats.verified_per_position[1]


@pytest.mark.parametrize("do_sample", [False, True])
def test_one_draft_token_is_the_targets_next_one(do_sample, tmp_path):
    """Sample with coupled verification, where draft and target draw from the same numbers."""
    target, adapter = make_pair(tmp_path)
    stats, options = hf_speculate.SpeculationStats(), {"verifier": "coupled", "seed": 3}
    target.generate(
        **ragged_prompts(3, seed=1),
        **CONSTANT | {"num_assistant_tokens": 1},
        **(options if do_sample else {}),
        assistant_model=adapter,
        do_sample=do_sample,
        max_new_tokens=NUM_NEW,
        speculation_stats=stats,
    )
    assert stats.num_accepted == stats.num_verified > 30


def test_logits_processors_choose_among_the_drafts(tmp_path):
    """Let a processor choose every token by the whole text; other drafts would be rejected."""
    target, adapter = make_pair(tmp_path)
    options = {"logits_processor": [BySum()], "max_new_tokens": NUM_NEW, **CONSTANT}
    stats = assert_decodes_as_plain(target, adapter, ragged_prompts(3, seed=1), **options)
    assert stats.num_accepted == stats.num_verified > 40


def test_rows_that_join_get_the_texts_that_they_get_alone(tmp_path):
    target, adapter = make_pair(tmp_path)
    options = {
        "assistant_model": adapter,
        "num_assistant_tokens": 3,
        "do_sample": True,
        "verifier": "rejection",
    }
    texts = random_texts([3, 25, 8, 14, 2, 19, 1, 5], seed=5, vocab_size=64)
    prompts = [
        RowPrompt(text, seed=key, arguments={"max_new_tokens": 4 + 9 * (key % 3)}, key=key)
        for key, text in enumerate(texts)
    ]
    results, decoder = decoded(target, prompts, **options)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt, **options), prompt.key
    assert decoder.stats.num_rounds > 1.2 * decoder.stats.num_batch_rounds
    assert decoder.stats.num_accepted > decoder.stats.num_rounds / 2


@pytest.mark.fallback("RuntimeError: too little memory")
def test_rows_that_join_others_without_drafts_draft(tmp_path):
    """Let an error end the drafts of the earlier rows."""
    target, adapter = make_pair(tmp_path)
    last, forwards = target.model.layers[1].mlp.up_proj, []

    def fail(module, args, output):  # raises in the third draft forward
        if len(last._forward_hooks) > 1:
            forwards.append(None)
            if len(forwards) == 3:
                raise RuntimeError("too little memory")

    last.register_forward_hook(fail)
    lens = [3, 25, 8, 14, 2, 19, 1, 5]
    prompts = [
        RowPrompt(text, arguments={"max_new_tokens": 4 + 9 * (key % 3)}, key=key)
        for key, text in enumerate(random_texts(lens, seed=5, vocab_size=64))
    ]
    results, decoder = decoded(target, prompts, assistant_model=adapter, num_assistant_tokens=3)
    for prompt in prompts:
        assert results[prompt.key].token_ids == alone(target, prompt), prompt.key
    assert decoder.stats.num_accepted > 20


@pytest.mark.fallback("computes NaN or infinity", "raised")
@pytest.mark.parametrize("do_sample", [False, True])
@each_value(cache=["preallocated", "dynamic", "static"], bad=[torch.nan, 1e300, torch.inf])
def test_bad_weights_change_no_text(bad, cache, do_sample, tmp_path):
    target = hf_speculate.enable(make_model("llama"))
    tensors = {name: tensor * bad for name, tensor in make_tensors(target).items()}
    adapter = UnoAdapter(write_adapter(tmp_path, tensors))
    name = "cache_implementation" if cache == "static" else "speculation_cache"
    options = {name: cache, "max_new_tokens": NUM_NEW, "do_sample": do_sample}
    if do_sample:
        options |= {"verifier": "coupled", "seed": 3}
    stats = assert_decodes_as_plain(
        target, adapter, ragged_prompts(3, seed=1), **options, **CONSTANT
    )
    assert stats.num_drafted > 0


@pytest.fixture
def snapshot_of():
    def snapshot(target):
        hooks = [len(module._forward_hooks) for module in target.modules()]
        return copy.deepcopy(target.state_dict()), hooks

    return snapshot


@pytest.mark.fallback("RuntimeError: too little memory")
@pytest.mark.parametrize("error", ["", "in a callback", "in a forward"])
@pytest.mark.parametrize("cache", ["preallocated", "dynamic"])
def test_the_target_stays_as_it_is(error, cache, snapshot_of, tmp_path):
    target, adapter = make_pair(tmp_path)
    weights, hooks = snapshot_of(target)
    inputs, options = ragged_prompts(3, seed=1), {"max_new_tokens": NUM_NEW, **CONSTANT}
    if error == "in a callback":
        with pytest.raises(ZeroDivisionError):
            target.generate(
                **inputs,
                **options,
                assistant_model=adapter,
                speculation_callback=lambda report: 1 / 0,
            )
    else:
        last = target.model.layers[1].mlp.up_proj

        def fail(module, args, output):  # raises in the middle of the third draft forward
            if len(last._forward_hooks) > 1:
                forwards.append(None)
                if len(forwards) == 3 and error:
                    raise RuntimeError("too little memory")

        forwards, handle = [], last.register_forward_hook(fail)
        stats = assert_decodes_as_plain(target, adapter, inputs, speculation_cache=cache, **options)
        handle.remove()
        assert (len(forwards) == 3) == bool(error)
        assert bool(stats.fallbacks) == bool(error)
    after, hooks_after = snapshot_of(target)
    assert hooks == hooks_after
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())


def test_forwards_of_other_threads_are_without_the_adapter(tmp_path):
    target, adapter = make_pair(tmp_path)
    ids, outputs = torch.tensor([[1, 5, 9]]), []
    plain = target(ids).logits
    with adapter.layers_for(target).added_after_first(target):
        thread = threading.Thread(target=lambda: outputs.append(target(ids).logits))
        thread.start()
        thread.join()
        adapted = target(ids).logits
    assert torch.equal(outputs[0], plain)
    assert torch.equal(adapted[:, 0], plain[:, 0])
    assert (adapted[:, 1:] - plain[:, 1:]).abs().amin() > 0


def test_drafts_of_other_threads_leave_graphs_alone(tmp_path):
    """Their hooks act in their own threads, so graphs are captured and stay valid."""
    target, adapter = make_pair(tmp_path)
    for module in target.modules():
        module._forward_pre_hooks.clear()  # those of the tests
    ids, capture = forward_hook_ids(target), LayerCapture(target, [0, 1])
    with adapter.layers_for(target).added_after_first(target), capture:
        assert not has_hooks_of_others(target)
        assert forward_hook_ids(target) == ids
        target(torch.tensor([[1, 5, 9]]))


def test_adapters_of_one_name_have_their_own_histories():
    adapters = [
        UnoAdapter("p/adapter"),
        UnoAdapter("q/adapter"),
        UnoAdapter("p/adapter", revision="b"),
    ]
    assert len({UnoSource(adapter).history_key() for adapter in adapters}) == 3
    assert UnoSource(UnoAdapter("p/adapter")).history_key() == UnoSource(adapters[0]).history_key()


def with_adapters(folder):
    """Return a PEFT target with an active LoRA, and an inactive Uno adapter from a folder."""
    target = make_model("llama")
    write_adapter(folder, make_tensors(target), prefix="base_model.model.")
    own = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    wrapped = get_peft_model(target, own).eval().to(torch.float64)
    wrapped.load_adapter(folder, "uno")
    return wrapped.to(torch.float64)


def test_an_adapter_of_a_peft_target_is_named(tmp_path):
    """Draft as from the adapter's files, with the target's own adapter in all forwards."""
    wrapped, counts = with_adapters(tmp_path), []
    hf_speculate.enable(wrapped.get_base_model())
    for source in ("uno", tmp_path):
        stats = assert_decodes_as_plain(
            wrapped,
            UnoAdapter(source),
            ragged_prompts(3, seed=1),
            max_new_tokens=NUM_NEW,
            **CONSTANT,
        )
        counts.append((stats.num_drafted, stats.accepted_per_position))
        assert wrapped.active_adapters == ["default"]
    assert counts[0] == counts[1]
    wrapped.set_adapter("uno")
    with pytest.raises(UnsupportedModelError, match="got 'uno', which is active in Llama"):
        wrapped.generate(**ragged_prompts(1), assistant_model=UnoAdapter("uno"))


def test_weights_are_cast_and_read_once(tmp_path):
    """Read float32 weights from two files in a subfolder, with scale and rank from the config."""
    target = hf_speculate.enable(make_model("llama", dtype=torch.bfloat16))
    tensors = {name: tensor.float() for name, tensor in make_tensors(target).items()}
    files = [f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    write_adapter(tmp_path / "adapter", tensors, prefix="base_model.model.", files=files)
    for _ in range(2):
        layers = UnoAdapter(tmp_path).layers_for(target)
        shutil.rmtree(tmp_path, ignore_errors=True)
    pair = layers._pairs["layers.1.mlp.down_proj"]
    expected = tensors["model.layers.1.mlp.down_proj.lora_B.weight"] * (ALPHA / RANK)
    assert torch.equal(pair.up, expected.bfloat16())
    assert layers.num_bytes == sum(2 * tensor.numel() for tensor in tensors.values())


def test_changed_weights_are_read_again(tmp_path):
    """Of files and of a PEFT target; unchanged ones are shared by adapters of one source."""
    target = with_adapters(tmp_path).get_base_model()
    weight = target.model.layers[0].mlp.up_proj.lora_A["uno"].weight
    changes = {
        "uno": lambda: weight.detach().mul_(2),
        tmp_path: lambda: write_adapter(tmp_path, make_tensors(make_model("llama"), size=0.1)),
    }
    for source, change in changes.items():
        layers = UnoAdapter(source).layers_for(target)
        assert UnoAdapter(source).layers_for(target) is layers
        down = layers._pairs["layers.0.mlp.up_proj"].down.clone()
        change()
        changed = UnoAdapter(source).layers_for(target)._pairs["layers.0.mlp.up_proj"].down
        torch.testing.assert_close(changed, 2 * down)


def test_unused_adapters_are_freed(tmp_path):
    target, tensors = make_model("llama"), make_tensors(make_model("llama"))
    folders = [write_adapter(tmp_path / name, tensors) for name in "abcde"]
    first, *others = (weakref.ref(UnoAdapter(folder).layers_for(target)) for folder in folders)
    assert first() is None
    assert all(layers() is not None for layers in others)


def test_settings_and_defaults_of_the_number_of_tokens(tmp_path):
    target, adapter = make_pair(tmp_path)
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 8, "speculation_stats": stats}
    target.generate(**ragged_prompts(2), assistant_model=adapter, **options)
    assert "draft length: adaptive, at most 8;" in stats.plan
    for own in ({"prompt_lookup_num_tokens": 4}, {"draft_state": hf_speculate.DraftState()}):
        name = next(iter(own))
        with pytest.raises(UnsupportedGenerationError, match=f"{name} cannot be combined with a U"):
            target.generate(**ragged_prompts(2), assistant_model=adapter, **own)
    with pytest.raises(ConfigError, match="mask_token_id must be an integer of at least 2, got 1"):
        UnoAdapter(tmp_path, mask_token_id=1)
    assert UnoAdapter(tmp_path, mask_token_id=9).noise_end(target) == 9
    assert adapter.noise_end(target) == UnoAdapter(tmp_path, mask_token_id=99).noise_end(target)
    assert adapter.noise_end(target) == 64
    target.config.mask_token_id = 60
    assert adapter.noise_end(target) == 60


@pytest.mark.fallback("draft: the forward with the adapter runs eagerly")
def test_drafts_run_eagerly_beside_compiled_verifications(tmp_path):
    target, adapter = make_pair(tmp_path, num_hidden_layers=1)
    options = {"max_new_tokens": 12, "compile_config": compile_config(), **CONSTANT}
    options["cache_implementation"] = "static"
    stats = assert_decodes_as_plain(target, adapter, ragged_prompts(1, seed=1), **options)
    assert stats.compiled == ["target"]
    assert stats.num_accepted > 0


def test_verifications_run_from_graphs(backend, tmp_path):
    target, adapter = make_pair(tmp_path)
    for seed in (0, 3):
        inputs = ragged_prompts(3, seed=seed, max_len=20 - seed)
        options = {"assistant_model": adapter, "num_assistant_tokens_schedule": "constant"}
        ids, stats = decode(target, inputs, **options, eos_token_id=ENDS)
        assert_equal_ids(target.generate(**inputs, max_new_tokens=24, eos_token_id=ENDS), ids)
        assert (stats.graphed, stats.fallbacks) == (["target"], [])
        assert backend.num_captures == 1
        assert stats.num_accepted > 0
    assert backend.num_replays >= stats.num_batch_rounds


REFUSED = {
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern {'q_proj': 2}"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern {'q_proj': 2}"),
    "rslora": ({"use_rslora": True}, "use_rslora True"),
    "dora": ({"use_dora": True}, "use_dora True"),
    "bias": ({"bias": "lora_only"}, "bias 'lora_only'"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head']"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "target_modules lm_head in"),
    "all": ({"target_modules": "all-linear"}, "target_modules 'all-linear'"),
    "kind": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "rank": ({"r": 4}, "maps 48 numbers to 32 with rank 4, and A and B are [3, 48] and [32, 3]"),
    "fewer": ({"target_modules": ["q_proj"]}, "the target has no layers.0.mlp.down_proj, layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_by_name(name, tmp_path):
    fields, problem = REFUSED[name]
    target = hf_speculate.enable(make_model("llama"))
    adapter = UnoAdapter(write_adapter(tmp_path, make_tensors(target), **fields))
    with pytest.raises(UnsupportedModelError, match=re.escape(problem)):
        target.generate(**ragged_prompts(2), assistant_model=adapter)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    target = hf_speculate.enable(make_model("llama"))
    tensors = make_tensors(target)
    weight = "model.layers.0.self_attn.q_proj.lora_B.weight"
    wider = make_tensors(make_model("llama", intermediate_size=56))
    deeper = make_tensors(make_model("llama", num_hidden_layers=3))
    cases = {
        "one of them in layers.0.self_attn.q_proj": {**tensors, weight: None},
        "got lm_head.weight in": {**tensors, "lm_head.weight": torch.ones(2, 2)},
        "got encoder.layers.0.self_attn": {
            **tensors,
            f"encoder{weight[5:]}": tensors[weight].clone(),
        },
        "the adapter has no layers.0.self_attn.q_proj": {
            name: tensor for name, tensor in tensors.items() if ".0.self_attn.q_" not in name
        },
        "got 0, an adapter of some/base: the target has no layers.2.mlp": deeper,
        "layers.0.mlp.down_proj maps 48 numbers to 32 with rank 3, and A and B are [3, 56]": wider,
    }
    for message, changed in cases.items():
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        write_adapter(tmp_path / "0", kept, base_model_name_or_path="some/base")
        with pytest.raises((ConfigError, UnsupportedModelError), match=re.escape(message)):
            UnoAdapter(tmp_path / "0").layers_for(target)
    (tmp_path / "0" / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="must be a whole safetensors file"):
        UnoAdapter(tmp_path / "0").layers_for(target)
    (tmp_path / "0" / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"must hold adapter_model\*.safetensors, got adapter_con"
    ):
        UnoAdapter(tmp_path / "0").layers_for(target)
    for source in (tmp_path, "nobody/nothing-here"):
        with pytest.raises(ConfigError, match=f"with adapter_config.json, .* got '{source}'"):
            UnoAdapter(source).layers_for(target)


def test_an_adapter_of_another_base_is_warned_of(tmp_path):
    target = make_model("llama")
    tensors = make_tensors(target)
    cached = f"{tmp_path}/models--meta--Llama-2/snapshots/0123abcd"
    names = [
        *(("meta/llama-2", "local/Llama-2"), ("", "local/Llama-2"), ("meta/Llama-3", "")),
        *(("meta/llama-2", cached), (cached, "local/Llama-2/"), ("/home/me/base", "meta/Llama-2")),
        ("meta/Llama-3", str(tmp_path)),  # any name
    ]
    for base, target.name_or_path in names:
        adapter = UnoAdapter(write_adapter(tmp_path, tensors, base_model_name_or_path=base))
        with warnings.catch_warnings(action="error"):
            adapter.layers_for(target)
    for target.name_or_path in ("local/Llama-2", cached):
        adapter = UnoAdapter(
            write_adapter(tmp_path, tensors, base_model_name_or_path="meta/Llama-3")
        )
        with pytest.warns(
            UserWarning, match=f"of meta/Llama-3, and the target is {target.name_or_path}"
        ):
            adapter.layers_for(target)


@each_value(
    family=["falcon_h1", "bloom", "t5"],
    why=["noise would stay in its recurrent states", "has no layers.0.mlp", "it has an encoder"],
)
def test_targets_of_other_designs_are_refused(family, why, tmp_path):
    target, inputs = target_of(family)[0], ragged_prompts(2)
    adapter = UnoAdapter(write_adapter(tmp_path, make_tensors(make_model("llama"))))
    with pytest.raises(UnsupportedModelError, match=f"{type(target).__name__}.*{why}"):
        target.generate(**inputs, assistant_model=adapter)


def test_the_name_of_an_adapter_alone_is_refused(tmp_path):
    target = hf_speculate.enable(make_model("llama"))
    target.name_or_path = "some/base"
    for base in ("some/base", None):
        write_adapter(tmp_path, make_tensors(target), base_model_name_or_path=base)
        message = f"pass a Uno adapter as hf_speculate.UnoAdapter('{tmp_path}')"
        with pytest.raises(ConfigError, match=re.escape(message)):
            target.generate(**ragged_prompts(2), assistant_model=str(tmp_path))


def test_few_accepted_second_tokens_are_warned_of_once(tmp_path):
    target, adapter = make_pair(tmp_path, size=1.0)
    call = {**ragged_prompts(8), "assistant_model": adapter, **CONSTANT}
    with pytest.warns(UserWarning, match="fewer than 10% of the second tokens that .* drafted"):
        target.generate(**call, max_new_tokens=80)
    with warnings.catch_warnings(action="error"):
        target.generate(**call, max_new_tokens=8)
