"""Test drafts named by folder: heads, and models loaded as on the command line."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import hf_speculate
from hf_speculate.draft.named import NamedDrafts
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.options.heads.head import DraftHead
from tests.cases import assert_decodes_as_plain, new_pair
from tests.options.heads.designs import (
    DFLASH,
    EAGLE3,
    make_weights,
    write_original,
    write_speculators,
    write_z_lab,
)
from tests.options.heads.rounds import target_of
from tests.options.heads.test_mtp import make_checkpoint
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_tokenizers import letters_tokenizer


def test_draft_model_is_loaded_once_in_the_target_dtype(tmp_path):
    target, draft = new_pair("llama", dtype=torch.float32)
    draft.to(torch.bfloat16).save_pretrained(tmp_path)
    for _ in range(2):
        stats = assert_decodes_as_plain(
            target, str(tmp_path), ragged_prompts(2, seed=1), max_new_tokens=9
        )
        assert "drafter: model LlamaForCausalLM" in stats.plan
        assert stats.num_drafted > 0
        shutil.rmtree(tmp_path, ignore_errors=True)


def test_tokenizer_is_loaded_with_its_model(tmp_path):
    """As the draft, use the target with its letters in another order."""
    target, letters, order = make_model("llama", vocab_size=8), "abcdefgh", torch.arange(7, -1, -1)
    hf_speculate.enable(target)
    draft = noisy_copy(target, 0.0)
    for table in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        table.weight.copy_(table.weight[order])
    draft.save_pretrained(tmp_path)
    letters_tokenizer(letters[::-1]).save_pretrained(tmp_path)
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "num_assistant_tokens": 3, "speculation_stats": stats}
    inputs, ours = ragged_prompts(1, vocab_size=8), letters_tokenizer(letters)
    target.generate(**inputs, assistant_model=tmp_path, tokenizer=ours, **options)
    assert stats.num_accepted == stats.num_verified > 0


def test_adapter_folder_is_loaded_with_its_base(tmp_path):
    target, draft = new_pair("llama")
    draft.save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded, ids = get(tmp_path / "adapter", target), torch.arange(9)[None]
    torch.testing.assert_close(loaded(ids).logits, adapted.merge_and_unload().double()(ids).logits)


def get(folder, target):
    return NamedDrafts().get(folder, target)


def test_heads_and_models_are_told_apart(tmp_path):
    marks = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}
    unmarked = write_original(tmp_path / "unmarked", EAGLE3, make_weights(EAGLE3), **marks)
    config = json.loads((unmarked / "config.json").read_text())
    del config["draft_vocab_size"]
    (unmarked / "config.json").write_text(json.dumps(config))
    assert isinstance(get(unmarked, target_of()), DraftHead)
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3", 1)
    assert isinstance(get(tmp_path, checkpoint), DraftHead)
    smaller = make_model("deepseek_v3", hidden_size=16, num_mtp_layers=1)
    smaller.save_pretrained(tmp_path / "smaller")
    assert type(get(tmp_path / "smaller", checkpoint)) is type(smaller)


def test_folder_that_cannot_draft_is_named(tmp_path):
    for source in (tmp_path, "nobody/nothing-here"):
        with pytest.raises(
            ConfigError, match=f"must name a draft head or a causal language model, got '{source}'"
        ):
            get(source, target_of())
    xpress = write_speculators(
        tmp_path / "x", EAGLE3, make_weights(EAGLE3), speculators_model_type="xpress"
    )
    with pytest.raises(UnsupportedModelError, match="got the speculators model type 'xpress'"):
        get(xpress, target_of())
    flare = write_z_lab(tmp_path / "f", DFLASH, make_weights(DFLASH), fusion_mode="flare")
    with pytest.raises(UnsupportedModelError, match="fusion_mode 'flare'"):
        get(flare, target_of())
    folder = tmp_path / "model"
    make_model("llama").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError,
        match=r"must name files with all weights of LlamaForCausalLM, got .*model\.norm",
    ):
        get(folder, target_of())
    (folder / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    with pytest.raises(
        ConfigError,
        match=r"must name a draft head or a causal language model, got .*never_heard_of",
    ):
        get(folder, target_of())
