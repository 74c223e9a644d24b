"""MTP layers under `mtp.` in checkpoints of hybrid targets, against a model without cache and plain `generate`."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm

import hf_speculate
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.types import SampleStrategy
from tests.cases import assert_equal_ids
from tests.draft.heads.rounds import Rounds, random_texts
from tests.tiny import INITIALIZER_RANGE, make_model, ragged_prompts

KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
TOLERANCE = 1e-4  # the target's states round at 1e-5, by where its delta rule cuts a text; swapped weights differ by 1
NUM_NEW = 24


def one_layer(target):
    """A model of one attention layer, whose inputs are what `mtp.fc` gives."""
    model = make_model(
        target.config.model_type.removesuffix("_text"), num_hidden_layers=1, layer_types=["full_attention"]
    )
    return model.model


def by_expert(name, weight):
    """The weights of the experts one by one, as checkpoints of Qwen3-Next hold them."""
    head, own = name.rpartition(".")[0], ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
    for number, part in enumerate(weight):
        for one, values in zip(own, part.chunk(len(own)), strict=True):
            yield f"{head}.{number}.{one}.weight", values


def write(folder, target, seed, is_fused):
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
def loaded(tmp_path_factory):
    """Makes targets with their heads, once each."""

    @cache
    def made(kind, seed=None, is_fused=True):
        overrides = {} if kind == "qwen3_next" else {"mtp_num_hidden_layers": 1}
        target = hf_speculate.enable(make_model(kind, **overrides))
        folder = write(tmp_path_factory.mktemp("mtp"), target, seed, is_fused)
        target.config.name_or_path = str(folder)
        return target, load_drafter(folder, target), folder

    return made


@torch.no_grad()
def reference(target, folder, text, states, drafted):
    """[K, V] of the layer applied to its own outputs, from the file's weights over the whole text in every step."""
    weights = load_file(folder / "model.safetensors")
    block, norms = one_layer(target), {name: 1 + weight for name, weight in weights.items() if "pre_fc" in name}
    block.layers[0].load_state_dict(
        {name.removeprefix("mtp.layers.0."): w for name, w in weights.items() if "mtp.layers" in name}
    )
    block.norm.weight.copy_(weights["mtp.norm.weight"])
    width, eps, scores, own = target.config.hidden_size, target.config.rms_norm_eps, [], []
    for step in range(len(drafted)):
        ids = torch.tensor([text[1:] + drafted[:step]])
        embeddings = rms_norm(
            target.get_input_embeddings()(ids), (width,), norms["mtp.pre_fc_norm_embedding.weight"], eps
        )
        read = rms_norm(torch.cat([states, *own])[None], (width,), norms["mtp.pre_fc_norm_hidden.weight"], eps)
        inputs = torch.cat([embeddings, read], dim=-1) @ weights["mtp.fc.weight"].T
        outputs = block(inputs_embeds=inputs, use_cache=False).last_hidden_state
        scores.append(target.get_output_embeddings()(outputs[0, -1]))
        own.append(outputs[0, -1:])
    return torch.stack(scores)


@pytest.mark.parametrize(("kind", "is_fused"), [("qwen3_5", True), ("qwen3_5_moe", True), ("qwen3_next", False)])
def test_drafts_are_those_of_the_layer_over_the_whole_text(kind, is_fused, loaded):
    target, head, _ = loaded(kind, 5, is_fused)
    _, _, folder = loaded(kind, 5)  # the same numbers in the layout of the modules
    rounds = Rounds(head, target, random_texts([7, 3, 2], seed=1, vocab_size=64))
    for number, accepted in enumerate([(2, 0, 4), (4, 1, 3), (0, 2, None)]):
        draft = rounds.draft(4, SampleStrategy.RANDOM)
        for row, text in enumerate(rounds.texts):
            expected = reference(target, folder, text, rounds.states(row), draft.token_ids[row].tolist())
            torch.testing.assert_close(draft.token_logits[row], expected, rtol=0, atol=TOLERANCE)
        rounds.accept(draft, accepted, seed=number)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_plain_and_use_mtp_loads_them_from_the_targets_checkpoint(kind, loaded):
    target, head, folder = loaded(kind)
    inputs, stats, before = ragged_prompts(3, seed=3), hf_speculate.SpeculationStats(), target.config.to_dict()
    options = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "speculation_stats": stats}
    source = {"use_mtp": True} if kind == "qwen3_5" else {"assistant_model": head}
    ours = target.generate(**inputs, **options, max_new_tokens=NUM_NEW, **source)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)
    assert stats.cache == "hybrid"
    assert stats.num_accepted > 0
    assert target.config.to_dict() == before
    assert head.num_parameters == sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
