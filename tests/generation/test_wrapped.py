"""Models that other libraries have quantised, adapted or spread over devices decode as plain `generate` does."""

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hf_speculate
from hf_speculate.errors import UnsupportedModelError
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.tiny import make_model, noisy_copy, ragged_prompts

NUM_NEW = 16
_LORA = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")


def adapted(model):
    """The model in a PEFT wrapper, with a LoRA that changes its text."""
    torch.manual_seed(0)
    return get_peft_model(model, _LORA).eval().to(torch.float64)


def test_a_lora_draft_drafts_with_its_adapter():
    target, _ = pair("llama")
    draft = adapted(make_model("llama"))
    stats = [hf_speculate.SpeculationStats() for _ in range(2)]
    inputs = ragged_prompts(3, seed=1)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    options = {"assistant_model": draft, "num_assistant_tokens": 3, "max_new_tokens": NUM_NEW}
    assert_equal_ids(plain, target.generate(**inputs, **options, speculation_stats=stats[0]))
    with draft.disable_adapter():
        assert_equal_ids(plain, target.generate(**inputs, **options, speculation_stats=stats[1]))
    assert (
        stats[0].verified_acceptance_rate < stats[1].verified_acceptance_rate == 1.0
    )  # without it the draft is the target


def test_a_draft_with_a_learned_prompt_is_refused():
    target, _ = pair("llama")
    draft = get_peft_model(make_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match="must read the text alone, got PeftModelForCausalLM"):
        target.generate(**ragged_prompts(1, seed=1), assistant_model=draft, max_new_tokens=4)


def test_every_row_may_have_its_own_adapter():
    target, draft = adapted(make_model("llama")), pair("llama")[1]
    target.add_adapter("other", _LORA)
    target.to(torch.float64)
    hf_speculate.enable(target)
    inputs = {**ragged_prompts(3, seed=2), "adapter_names": ["default", "other", "__base__"]}
    new_ids = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    assert len({tuple(row) for row in new_ids.tolist()}) == 3
    ends = [int(new_ids[0, 3]), int(new_ids[1, 8])]  # rows end at different times
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": ends, "num_assistant_tokens": 3}
    assert not assert_decodes_as_plain(target, draft, inputs, **options).lock_step


@each_value(on_disk=["model.layers.1", "model.embed_tokens"], part=["target", "draft"])
def test_weights_may_lie_on_disk(part, on_disk, tmp_path):
    target = make_model("llama")
    draft = noisy_copy(target)
    inputs = ragged_prompts(3, seed=3)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    places = {name: "disk" if name == on_disk else "cpu" for name in names}
    moved = target if part == "target" else draft
    dispatch_model(moved, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert any(weight.device.type == "meta" for weight in moved.parameters())
    ours = hf_speculate.generate(
        target, **inputs, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=NUM_NEW
    )
    assert_equal_ids(plain, ours)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_device_map_auto_may_leave_layers_on_disk(part, tmp_path):
    target = make_model("llama")
    models = {"target": target, "draft": noisy_copy(target)}
    inputs = ragged_prompts(3, seed=3)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    models[part].save_pretrained(tmp_path / "model")
    num_bytes = sum(weight.numel() * weight.element_size() for weight in target.parameters())
    models[part] = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.float64,
        device_map="auto",
        max_memory={"cpu": num_bytes // 2},
        offload_folder=tmp_path / "rest",
    )
    assert set(models[part].hf_device_map.values()) == {"cpu", "disk"}
    ours = hf_speculate.generate(
        models["target"], **inputs, assistant_model=models["draft"], num_assistant_tokens=3, max_new_tokens=NUM_NEW
    )
    assert_equal_ids(plain, ours)


@pytest.mark.torchao
@each_value(parts=["target", "draft", "both"], batch_size=[1, 3])
def test_weights_may_be_integers(parts, batch_size):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    target = make_model("llama", dtype=torch.float32)
    draft = noisy_copy(target)
    for name, model in (("target", target), ("draft", draft)):
        if parts in (name, "both"):
            quantize_(model, Int8WeightOnlyConfig())
    hf_speculate.enable(target)
    stats = assert_decodes_as_plain(target, draft, ragged_prompts(batch_size, seed=4), max_new_tokens=NUM_NEW)
    assert stats.num_accepted > 0
