"""MTP layers of a target's checkpoint: the drafts of transformers' own generator, then batches and longer drafts."""

from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationMixin, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import hf_speculate
from hf_speculate.draft.heads.chain import ChainDrafter
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from tests.cases import assert_equal_ids
from tests.draft.heads.watching import watch_drafter, watch_generators
from tests.tiny import INITIALIZER_RANGE, LOGIT_SCALE, clamp_masks, make_model, ragged_prompts

NUM_NEW = 24
_SIZES = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


def make_target(kind: str, num_mtp_layers: int, vocab_size: int):
    if kind == "deepseek_v3":
        return make_model("deepseek_v3", num_mtp_layers=num_mtp_layers, vocab_size=vocab_size, **_SIZES)
    config = Glm4MoeConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_mtp_layers=num_mtp_layers,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
        **_SIZES,
    )
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM._from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    model.requires_grad_(False).get_output_embeddings().weight.mul_(LOGIT_SCALE)
    clamp_masks(model)
    return model


def make_checkpoint(folder, kind: str, num_mtp_layers: int, seed: int | None = None, vocab_size: int = 64):
    """A target and its folder; MTP layers nearly repeat its layer, or are random with a seed.

    The folder holds the MTP layers' weights alone: the target is in memory already.
    """
    target = make_target(kind, num_mtp_layers, vocab_size)
    drafts = MtpModel(target, num_mtp_layers).to(torch.float64).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed or 0)
    for layer in drafts.layers:
        if seed is None:
            layer.mtp_block.load_state_dict(target.model.layers[0].state_dict())
            layer.post_norm.load_state_dict(target.model.norm.state_dict())
            layer.enorm.weight.fill_(INITIALIZER_RANGE)
            layer.eh_proj.weight.copy_(torch.eye(*layer.eh_proj.weight.shape, dtype=torch.float64))
        else:
            for weight in layer.parameters():
                weight.normal_(0, INITIALIZER_RANGE, generator=generator)
    weights = {}
    for name, weight in drafts.state_dict().items():
        if name.startswith("layers."):
            _, depth, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm.weight", "shared_head.norm.weight")
            weights[f"model.layers.{1 + int(depth)}.{rest}"] = weight.contiguous()
    save_file(weights, folder / "model.safetensors")
    target.config.save_pretrained(folder)
    target.config.name_or_path = str(folder)
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[1-9].*"]  # the real ones name layers 61 and on
    target._weight_conversions = []  # as from_pretrained leaves it where names are those of the modules
    return hf_speculate.enable(target)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes targets with their folders, once each."""

    @cache
    def made(kind: str = "deepseek_v3", num_mtp_layers: int = 1, seed: int | None = None):
        folder = tmp_path_factory.mktemp("mtp")
        return make_checkpoint(folder, kind, num_mtp_layers, seed), folder

    return made


@pytest.mark.parametrize(
    ("kind", "num_layers", "seed"),
    [("deepseek_v3", 1, None), ("deepseek_v3", 2, None), ("deepseek_v3", 3, 5), ("glm4_moe", 2, 5)],
)
def test_the_drafts_are_those_of_transformers(kind, num_layers, seed, checkpoint, monkeypatch):
    target, folder = checkpoint(kind, num_layers, seed)
    theirs = watch_generators(monkeypatch, MTPCandidateGenerator)
    ours = watch_drafter(monkeypatch, ChainDrafter)
    inputs = ragged_prompts(1, seed=3, min_len=9, max_len=9)
    text = GenerationMixin.generate(target, **inputs, max_new_tokens=NUM_NEW, use_mtp=True)
    head = load_drafter(folder, target)
    stats = hf_speculate.SpeculationStats()
    options = {"assistant_model": head, "num_assistant_tokens": num_layers, "speculation_stats": stats}
    assert_equal_ids(text, target.generate(**inputs, max_new_tokens=NUM_NEW, **options))
    num = min(len(ours), len(theirs)) - num_layers  # at the end of the text it may ask for more than we do
    assert num > 5
    assert ours[:num] == [ids for _, ids in theirs[:num]]
    assert stats.num_accepted > 0 or seed is not None


def test_use_mtp_drafts_for_batches(checkpoint):
    target, _ = checkpoint("deepseek_v3", 2)
    inputs, stats = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats()
    options = {"use_mtp": True, "num_assistant_tokens": 3, "speculation_stats": stats}
    ours = target.generate(**inputs, max_new_tokens=NUM_NEW, **options)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)
    assert min(stats.accepted_per_position) > 0  # the third token comes from the first layer again
    with pytest.raises(ConfigError, match="draft_state must come with"):
        target.generate(**inputs, use_mtp=True, draft_state=hf_speculate.DraftState())
    with pytest.raises(UnsupportedGenerationError, match="use_mtp must be left out with prompt_lookup_num_tokens"):
        target.generate(**inputs, use_mtp=True, prompt_lookup_num_tokens=2)


def test_the_target_stays_as_it_is_and_what_cannot_be_loaded_is_named(checkpoint, tmp_path):
    target, folder = checkpoint()
    before = target.config.to_dict()
    head = load_drafter(str(folder), target)
    assert target.config.to_dict() == before
    assert head.network._shared[0].embed_tokens is target.get_input_embeddings()
    with pytest.raises(ConfigError, match="dtype and device must be the target's for MTP layers"):
        load_drafter(folder, target, dtype=torch.float32)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="must hold the weights of the target's MTP layers"):
        load_drafter(tmp_path, target)
