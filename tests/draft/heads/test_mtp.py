"""MTP layers of a target's checkpoint, against transformers' own generator, a model without cache and plain text."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm
from transformers import GenerationMixin, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import hf_speculate
from hf_speculate.draft.heads.chain import ChainDrafter
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.types import SampleStrategy
from tests.cases import assert_equal_ids
from tests.draft.heads.rounds import Rounds, random_texts
from tests.draft.heads.watching import watch_drafter, watch_generators
from tests.tiny import INITIALIZER_RANGE, clamp_masks, make_model, ragged_prompts

NUM_NEW = 24
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # whose checkpoints hold the layer under `mtp.`
TOLERANCE = 1e-4  # the target's states round at 1e-5, by where its delta rule cuts a text; swapped weights differ by 1


def make_target(kind: str, num_mtp_layers: int, vocab_size: int):
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_mtp_layers": num_mtp_layers}
    sizes |= {"vocab_size": vocab_size}
    if kind == "deepseek_v3":
        return make_model("deepseek_v3", **sizes)
    sizes |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "initializer_range": INITIALIZER_RANGE,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Glm4MoeConfig(**sizes, tie_word_embeddings=False)
    model = Glm4MoeForCausalLM._from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    clamp_masks(model)
    return model.requires_grad_(False)


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


def by_expert(name, weight):
    """The weights of the experts one by one, as checkpoints of Qwen3-Next hold them."""
    head, own = name.rpartition(".")[0], ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
    for number, part in enumerate(weight):
        for one, values in zip(own, part.chunk(len(own)), strict=True):
            yield f"{head}.{number}.{one}.weight", values


def write_hybrid(folder, target, seed, is_fused):
    """Weights that nearly repeat the target's attention layer, or random ones with a seed."""
    config, width = target.config, target.config.hidden_size
    generator = torch.Generator().manual_seed(seed or 0)
    weights = {f"mtp.layers.0.{name}": weight for name, weight in target.model.layers[1].named_parameters()}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    weights |= {f"mtp.{name}.weight": torch.zeros(width, dtype=torch.float64) for name in norms}
    weights["mtp.fc.weight"] = torch.eye(width, dtype=torch.float64).repeat(1, 2) * INITIALIZER_RANGE
    if seed is not None:
        for name, weight in weights.items():
            weights[name] = torch.empty_like(weight).normal_(0, INITIALIZER_RANGE, generator=generator)
    if not is_fused:
        experts = {name: weight for name, weight in weights.items() if ".experts." in name}
        weights = {name: weight for name, weight in weights.items() if name not in experts}
        weights |= {name: part for both in experts.items() for name, part in by_expert(*both)}
    save_file({name: weight.detach().clone() for name, weight in weights.items()}, folder / "model.safetensors")
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Makes targets with their heads, once each."""

    @cache
    def made(kind, seed=None, is_fused=True):
        overrides = {} if kind == "qwen3_next" else {"mtp_num_hidden_layers": 1}
        target = hf_speculate.enable(make_model(kind, **overrides))
        folder = write_hybrid(tmp_path_factory.mktemp("mtp"), target, seed, is_fused)
        target.config.name_or_path = str(folder)
        return target, load_drafter(folder, target), folder

    return made


@torch.no_grad()
def reference(target, folder, text, states, drafted):
    """[K, V] of the layer applied to its own outputs, from the file's weights over the whole text in every step."""
    weights = {name.removeprefix("mtp."): one for name, one in load_file(folder / "model.safetensors").items()}
    kind = target.config.model_type.removesuffix("_text")
    block = make_model(kind, num_hidden_layers=1, layer_types=["full_attention"]).model
    of_layer = {name.removeprefix("layers.0."): one for name, one in weights.items() if name.startswith("layers.")}
    block.layers[0].load_state_dict(of_layer)
    block.norm.weight.copy_(weights["norm.weight"])

    def normed(values, name):
        weight = 1 + weights[f"pre_fc_norm_{name}.weight"]
        return rms_norm(values, values.shape[-1:], weight, target.config.rms_norm_eps)

    scores, own = [], []
    for step in range(len(drafted)):
        embeddings = target.get_input_embeddings()(torch.tensor(text[1:] + drafted[:step]))
        joined = torch.cat([normed(embeddings, "embedding"), normed(torch.cat([states, *own]), "hidden")], dim=-1)
        outputs = block(inputs_embeds=(joined @ weights["fc.weight"].T)[None], use_cache=False).last_hidden_state
        scores.append(target.get_output_embeddings()(outputs[0, -1]))
        own.append(outputs[0, -1:])
    return torch.stack(scores)


@pytest.mark.parametrize(("kind", "is_fused"), [("qwen3_5", True), ("qwen3_5_moe", True), ("qwen3_next", False)])
def test_drafts_are_those_of_the_layer_over_the_whole_text(kind, is_fused, hybrid):
    target, head, _ = hybrid(kind, 5, is_fused)
    _, _, folder = hybrid(kind, 5)  # the same numbers in the layout of the modules
    rounds = Rounds(head, target, random_texts([7, 3, 2], seed=1, vocab_size=64))
    for number, accepted in enumerate([(2, 0, 4), (4, 1, 3), (0, 2, None)]):
        draft = rounds.draft(4, SampleStrategy.RANDOM)
        for row, text in enumerate(rounds.texts):
            expected = reference(target, folder, text, rounds.states(row), draft.token_ids[row].tolist())
            torch.testing.assert_close(draft.token_logits[row], expected, rtol=0, atol=TOLERANCE)
        rounds.accept(draft, accepted, seed=number)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_greedy_text_of_hybrids_is_plain_and_use_mtp_loads_the_layers_from_the_targets_checkpoint(kind, hybrid):
    target, head, folder = hybrid(kind)
    inputs, stats, before = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats(), target.config.to_dict()
    options = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "speculation_stats": stats}
    source = {"use_mtp": True} if kind == "qwen3_5" else {"assistant_model": head}
    ours = target.generate(**inputs, **options, max_new_tokens=NUM_NEW, **source)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)
    assert stats.cache == "hybrid"
    assert stats.num_accepted > 0
    assert target.config.to_dict() == before
    assert head.num_parameters == sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
