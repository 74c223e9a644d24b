"""Compare the MTP layers of a target's checkpoint with a cacheless model and with plain text."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.types import SampleStrategy
from tests.cases import assert_decodes_as_plain
from tests.options.heads.rounds import Rounds, random_texts
from tests.support.tiny import INITIALIZER_RANGE, clamp_masks, make_model, ragged_prompts

NUM_NEW = 24
# in their checkpoints, the layer has the prefix `mtp.`
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# The round-off of the target's states is 1e-5 and depends on where its delta rule splits a text.
# Swapped weights change the states by 1.
TOLERANCE = 1e-4


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
    sizes |= {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = Glm4MoeConfig(**sizes, tie_word_embeddings=False)
    model = Glm4MoeForCausalLM._from_config(
        config, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    clamp_masks(model)
    return model.requires_grad_(False)


def make_checkpoint(
    folder, kind: str, num_mtp_layers: int, seed: int | None = None, vocab_size: int = 64
):
    """Make a target and its folder, with random MTP layers if a seed is given.

    Otherwise, the MTP layers are nearly copies of target layers. The folder contains only the
    weights of the MTP layers, because the target is already in memory.
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
            rest = rest.removeprefix("mtp_block.").replace(
                "post_norm.weight", "shared_head.norm.weight"
            )
            weights[f"model.layers.{1 + int(depth)}.{rest}"] = weight.contiguous()
    save_file(weights, folder / "model.safetensors")
    target.config.save_pretrained(folder)
    target.config.name_or_path = str(folder)
    # In real checkpoints, the numbers of MTP layers begin at 61.
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[1-9].*"]
    # `from_pretrained` leaves this empty if the names match the modules.
    target._weight_conversions = []
    return hf_speculate.enable(target)


def test_use_mtp_drafts_for_batches(tmp_path):
    target = make_checkpoint(tmp_path, "deepseek_v3", 2)
    inputs, options = (
        ragged_prompts(3, seed=3),
        {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 3},
    )
    stats = assert_decodes_as_plain(target, None, inputs, **options, use_mtp=True)
    assert min(stats.accepted_per_position) > 0  # the first layer also drafts the third token
    with pytest.raises(
        UnsupportedGenerationError, match="got prompt_lookup_num_tokens and use_mtp; omit one"
    ):
        target.generate(**inputs, use_mtp=True, prompt_lookup_num_tokens=2)


def test_quantised_mtp_layers_are_refused(tmp_path):
    """Quantise a tensor but not the config, because the config describes the target."""
    target = make_checkpoint(tmp_path, "deepseek_v3", 2)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = target.config.quantization_config = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 3, "use_mtp": True}
    stats = assert_decodes_as_plain(target, None, ragged_prompts(3, seed=3), **options)
    assert stats.num_accepted > 0
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("o_proj.weight"))
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=rf"quantised weights \({name} in float8_e4m3fn\)"
    ):
        load_drafter(tmp_path, target)


def test_target_is_unchanged_and_shares_no_module(tmp_path):
    target = make_checkpoint(tmp_path, "deepseek_v3", 1)
    before = target.config.to_dict()
    head = load_drafter(str(tmp_path), target, dtype=torch.float32)
    assert target.config.to_dict() == before
    assert not set(head.network.modules()) & set(target.modules())
    assert head.dtype == torch.float32


def by_expert(name, weight):
    """Split the weights by expert, as in checkpoints of Qwen3-Next."""
    head, own = (
        name.rpartition(".")[0],
        ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",),
    )
    for number, expert_weight in enumerate(weight):
        for one, values in zip(own, expert_weight.chunk(len(own)), strict=True):
            yield f"{head}.{number}.{one}.weight", values


def make_hybrid(folder, kind: str):
    """Return a target, the folder of its random layer, and the layer's weights.

    The names match the modules in transformers.
    """
    generator = torch.Generator().manual_seed(5)
    target = hf_speculate.enable(
        make_model(kind, **{} if kind == "qwen3_next" else {"mtp_num_hidden_layers": 1})
    )
    width = target.config.hidden_size
    shapes = {
        f"layers.0.{name}": weight.shape
        for name, weight in target.model.layers[1].named_parameters()
    }
    shapes |= {
        f"{name}.weight": (width,)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    shapes["fc.weight"] = (width, 2 * width)
    weights = {
        name: torch.empty(shape, dtype=torch.float64).normal_(
            0, INITIALIZER_RANGE, generator=generator
        )
        for name, shape in shapes.items()
    }
    stored = {f"mtp.{name}": weight for name, weight in weights.items()}
    if kind == "qwen3_next":
        fused = {name: stored.pop(name) for name in list(stored) if ".experts." in name}
        stored |= {name: part.clone() for both in fused.items() for name, part in by_expert(*both)}
    save_file(stored, folder / "model.safetensors")
    target.config.save_pretrained(folder)
    target.config.name_or_path = str(folder)
    return target, folder, weights


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request, tmp_path_factory):
    """Return a target, its head, and the weights."""
    target, folder, weights = make_hybrid(tmp_path_factory.mktemp("mtp"), request.param)
    return target, load_drafter(folder, target), weights


@torch.no_grad()
def reference(target, weights, text, states, drafted):
    """Return [K, V] from the layer applied to its own outputs and, in each step, the whole text."""
    kind = target.config.model_type.removesuffix("_text")
    block = make_model(kind, num_hidden_layers=1, layer_types=["full_attention"]).model
    of_layer = {
        name.removeprefix("layers.0."): one
        for name, one in weights.items()
        if name.startswith("layers.")
    }
    block.layers[0].load_state_dict(of_layer)
    block.norm.weight.copy_(weights["norm.weight"])

    def normed(values, name):
        weight = 1 + weights[f"pre_fc_norm_{name}.weight"]
        return rms_norm(values, values.shape[-1:], weight, target.config.rms_norm_eps)

    scores, own = [], []
    for step in range(len(drafted)):
        embeddings = target.get_input_embeddings()(torch.tensor(text[1:] + drafted[:step]))
        joined = torch.cat(
            [normed(embeddings, "embedding"), normed(torch.cat([states, *own]), "hidden")], dim=-1
        )
        outputs = block(
            inputs_embeds=(joined @ weights["fc.weight"].T)[None], use_cache=False
        ).last_hidden_state
        scores.append(target.get_output_embeddings()(outputs[0, -1]))
        own.append(outputs[0, -1:])
    return torch.stack(scores)


def test_drafts_equal_the_layer_over_the_whole_text(hybrid):
    target, head, weights = hybrid
    rounds = Rounds(head, target, random_texts([7, 3, 2], seed=1, vocab_size=64))
    for number, accepted in enumerate([(2, 0, 4), (4, 1, 3), (0, None)]):
        draft = rounds.draft(4, SampleStrategy.RANDOM, seeds=range(len(rounds.texts)))
        for row, text in enumerate(rounds.texts):
            expected = reference(
                target, weights, text, rounds.states(row), draft.token_ids[row].tolist()
            )
            torch.testing.assert_close(draft.token_logits[row], expected, rtol=0, atol=TOLERANCE)
        rounds.accept(draft, accepted, seed=number)
        if number == 1:
            rounds.rows([2, 0])


def test_use_mtp_loads_layers_and_gives_the_plain_text(hybrid):
    target, head, weights = hybrid
    inputs, before = ragged_prompts(3, seed=3), target.config.to_dict()
    options = {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "use_mtp": True,
    }
    stats = assert_decodes_as_plain(target, None, inputs, **options, max_new_tokens=NUM_NEW)
    assert stats.cache == "hybrid"
    assert len(stats.verified_per_position) == 3
    assert target.config.to_dict() == before
    assert head.num_parameters == sum(weight.numel() for weight in weights.values())
