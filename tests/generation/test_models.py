"""Compare many decoder-only models and wrapped models with plain `generate`."""

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
)

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.engine.step_weights import step_weights
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.tools.checks.near_ties import DifferenceCheck, logits_after_text
from tests.cases import assert_decodes_as_plain, assert_equal_ids, new_pair, pair
from tests.support.tiny import (
    INITIALIZER_RANGE,
    MORE_FAMILIES,
    SLIDING_WINDOW,
    make_model,
    noisy_copy,
    ragged_prompts,
)

NUM_NEW = 3 * SLIDING_WINDOW  # longer than the window or chunk of every model
FEW_NEW = 16
DYNAMIC_ONLY = ("falcon_alibi", "gpt_neo", "llama4", "mpt")
_LORA = LoraConfig(
    target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM"
)


@pytest.mark.parametrize("family", MORE_FAMILIES)
@pytest.mark.parametrize("cache_kind", ["auto", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_greedy_equals_plain(family, cache_kind):
    # MPT fills masked scores with the lowest float64 and computes softmax in float32, so padding
    # becomes NaN.
    models = pair(family, dtype=torch.float32 if family == "mpt" else torch.float64)
    options = {
        "max_new_tokens": NUM_NEW,
        "num_assistant_tokens": 3,
        "speculation_cache": cache_kind,
    }
    stats = assert_decodes_as_plain(*models, ragged_prompts(3, seed=3), **options)
    assert 0 < stats.num_accepted < stats.num_verified
    assert stats.cache == (
        "dynamic" if cache_kind == "dynamic" or family in DYNAMIC_ONLY else "preallocated"
    )
    assert not stats.lock_step


def test_maskless_window_layers_get_buffers_with_masks():
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = MoshiConfig(
        vocab_size=64,
        sliding_window=SLIDING_WINDOW,
        pad_token_id=0,
        initializer_range=INITIALIZER_RANGE,
        **sizes,
    )
    model = MoshiForCausalLM(config).to(torch.float64).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(pad_token_id=0)
    inputs, draft = ragged_prompts(3, seed=3), noisy_copy(model)
    assert_decodes_as_plain(hf_speculate.enable(model), draft, inputs, max_new_tokens=NUM_NEW)
    for draft_options in (
        {"speculation_cache": "dynamic"},
        {CACHE_NAME: DynamicCache(config=config)},
    ):
        with pytest.raises(
            UnsupportedModelError, match="must be preallocated, for its window layers read all"
        ):
            model.generate(**inputs, **draft_options, assistant_model=draft, max_new_tokens=NUM_NEW)


def adapted(model):
    """Return the model in a PEFT wrapper, with a LoRA adapter that changes its text."""
    torch.manual_seed(0)
    return get_peft_model(model, _LORA).eval().to(torch.float64)


def test_lora_draft_drafts_with_its_adapter():
    draft, options = (
        adapted(make_model("llama")),
        {"max_new_tokens": FEW_NEW, "num_assistant_tokens": 3},
    )
    stats = assert_decodes_as_plain(pair("llama")[0], draft, ragged_prompts(3, seed=1), **options)
    with draft.disable_adapter():  # without the adapter, the draft is identical to the target
        same = assert_decodes_as_plain(
            pair("llama")[0], draft, ragged_prompts(3, seed=1), **options
        )
    assert stats.verified_acceptance_rate < same.verified_acceptance_rate == 1.0


def test_learned_prompt_is_refused():
    target, draft = pair("llama")
    learned = get_peft_model(
        make_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    options = {**ragged_prompts(1, seed=1), "max_new_tokens": 4}
    with pytest.raises(
        UnsupportedModelError, match="must read the text alone, got PeftModelForCausalLM"
    ):
        target.generate(**options, assistant_model=learned)
    with pytest.raises(UnsupportedModelError, match="a prepare_inputs_for_generation of its own"):
        hf_speculate.enable(learned).generate(**options, assistant_model=draft)


def test_rows_may_have_different_adapters():
    target, draft = adapted(make_model("llama")), pair("llama")[1]
    target.add_adapter("other", _LORA)
    target.to(torch.float64)
    hf_speculate.enable(target)
    inputs = {**ragged_prompts(3, seed=2), "adapter_names": ["default", "other", "__base__"]}
    new_ids = target.generate(**inputs, max_new_tokens=FEW_NEW)[:, -FEW_NEW:]
    assert len({tuple(row) for row in new_ids.tolist()}) == 3
    ends = [int(new_ids[0, 3]), int(new_ids[1, 8])]  # rows end at different times
    options = {"max_new_tokens": FEW_NEW, "eos_token_id": ends, "num_assistant_tokens": 3}
    assert not assert_decodes_as_plain(target, draft, inputs, **options).lock_step


@pytest.mark.parametrize("part", ["target", "draft"])
def test_model_with_layers_on_disk_decodes_as_plain(part, tmp_path):
    target = make_model("llama")
    models = {"target": target, "draft": noisy_copy(target)}
    models[part].save_pretrained(tmp_path / "model")
    num_bytes = sum(weight.numel() * weight.element_size() for weight in target.parameters())
    placement = {
        "device_map": "auto",
        "max_memory": {"cpu": num_bytes // 2},
        "offload_folder": tmp_path / "rest",
    }
    models[part] = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64, **placement
    )
    assert set(models[part].hf_device_map.values()) == {"cpu", "disk"}
    options = {**ragged_prompts(3, seed=3), "max_new_tokens": FEW_NEW}
    ours = hf_speculate.generate(
        models["target"], **options, assistant_model=models["draft"], num_assistant_tokens=3
    )
    assert_equal_ids(target.generate(**options), ours)
    assert not hf_speculate.is_enabled(models["target"])
    small, stats = make_model("llama", num_hidden_layers=1), hf_speculate.SpeculationStats()
    for num_rows in (1, 2):  # loading weights takes longer than a forward with one row
        options = {
            **ragged_prompts(num_rows, seed=3),
            "max_new_tokens": 4,
            "speculation_stats": stats,
        }
        hf_speculate.generate(models["target"], **options, assistant_model=small)
        max_num = 32 if part == "target" and num_rows == 1 else 10
        assert f"adaptive, at most {max_num};" in stats.plan


class Nameless(LlamaForCausalLM):
    """Class without named token embeddings."""

    def get_input_embeddings(self):
        raise NotImplementedError


@pytest.mark.parametrize("part", ["target", "draft"])
def test_model_without_named_embeddings_decodes(part):
    models = dict(
        zip(("target", "draft"), (copy.deepcopy(model) for model in pair("llama")), strict=True)
    )
    models[part].__class__ = Nameless
    target, draft = hf_speculate.enable(models["target"]), models["draft"]
    stats = assert_decodes_as_plain(
        target, draft, ragged_prompts(2, seed=1), max_new_tokens=FEW_NEW
    )
    assert stats.num_accepted > 0
    ahead = torch.zeros(1, 3, target.config.hidden_size, dtype=torch.float64)
    if part == "draft":  # its ids are looked up in its embedding table
        options = {
            "input_ids": torch.ones(1, 3, dtype=torch.int64),
            "inputs_embeds": ahead,
            "max_new_tokens": 4,
        }
        assert_decodes_as_plain(target, draft, options)


def compile_forward(model, **options):
    model.forward = torch.compile(model.forward, **options)


def compile_layers(model, **options):
    for layer in model.model.layers:
        layer.compile(**options)


FORMS = {
    "forward": compile_forward,
    "in place": lambda model, **options: model.compile(**options),
    "layers": compile_layers,
}


@pytest.mark.fallback("eager forwards of the")
@pytest.mark.parametrize(
    ("form", "part"), [("forward", "target"), ("in place", "draft"), ("layers", "target")]
)
def test_compiled_forward_of_the_caller_runs_eagerly(form, part):
    target, draft = new_pair("llama")
    model, traced = target if part == "target" else draft, []
    options = {**ragged_prompts(3, seed=1), "max_new_tokens": FEW_NEW}
    plain = target.generate(**options)
    FORMS[form](
        model, fullgraph=True, backend=lambda graph, _: traced.append(graph) or graph.forward
    )
    stats = hf_speculate.SpeculationStats()
    drafts = {"assistant_model": draft, "num_assistant_tokens": 3, "speculation_stats": stats}
    with pytest.warns(
        UserWarning,
        match=f"eager forwards of the {part} LlamaForCausalLM, because a forward that the",
    ):
        assert_equal_ids(plain, hf_speculate.generate(target, **options, **drafts))
    assert stats.num_accepted > 0
    assert not traced
    assert f"eager forwards of the {part}" in " ".join(stats.fallbacks)
    model(torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
    assert traced, "the caller's own forwards are compiled"


def int8(model, folder):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def int4(model, folder):
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    # The only int4 weights that run on a CPU.
    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=32))
    return model


def nf4(model, folder):
    return load_quantised(model, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4")


def int8_activations(model, folder):
    """Round the input of each layer too, so the last bit decides between two texts."""
    return load_quantised(model, folder, load_in_8bit=True)


def load_quantised(model, folder, **fields):
    """Load the model with bitsandbytes weights, quantised during loading."""
    model.save_pretrained(folder)
    config = BitsAndBytesConfig(**fields, bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    ).eval()


@pytest.mark.torchao
@pytest.mark.bitsandbytes
@pytest.mark.parametrize(
    ("quantise", "parts", "batch_size", "cache"),
    [
        (int8, "target", 3, "preallocated"),
        (int8, "both", 1, "dynamic"),
        (int4, "target", 1, "preallocated"),
        (int4, "draft", 3, "dynamic"),
        (nf4, "target", 3, "dynamic"),
        (nf4, "both", 1, "preallocated"),
        (int8_activations, "draft", 3, "preallocated"),
    ],
)
def test_quantised_model_decodes_as_plain(quantise, parts, batch_size, cache, tmp_path):
    widths = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    models = {"target": make_model("llama", dtype=torch.float32, **widths)}
    models["draft"] = noisy_copy(models["target"])
    for name, model in models.items():
        if parts in (name, "both"):
            num_bytes = step_weights(model).num_bytes
            models[name] = quantise(model, tmp_path / name)
            weights = step_weights(models[name])
            assert weights.is_quantised
            # bytes as stored, not as float32
            assert weights.num_bytes < num_bytes / 2
            logits_of = partial(
                logits_after_text, token_ids=torch.tensor([3, 4, 5]), block_len=2, num_rows=2
            )
            # The quantised model does not run in float64.
            assert DifferenceCheck(models[name])((6, 7), 0.0, 0, logits_of).verdict == "tie"
    hf_speculate.enable(models["target"])
    inputs = ragged_prompts(batch_size, seed=4)
    stats = assert_decodes_as_plain(
        *models.values(), inputs, max_new_tokens=FEW_NEW, speculation_cache=cache
    )
    assert stats.num_accepted > 0
