"""Test heads that read the target's image embeddings: MTP layers, and EAGLE-3 on request."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.errors import ConfigError
from hf_speculate.options.heads.load import load_drafter
from tests.options.heads.designs import DFLASH, make_weights, write_speculators
from tests.options.heads.reference import Reference
from tests.options.heads.rounds import target_of
from tests.options.heads.test_axes import (
    HEAD,
    K,
    axes_of_row,
    recorded,
    rows_alone,
    states_of_row,
    target,
)
from tests.support.tiny import INITIALIZER_RANGE
from tests.support.tiny_encoders import make_qwen3_5_vl, mixed_prompts

NUM_NEW = 12


def merged_of_row(arguments: dict[str, Tensor], inputs: Tensor) -> dict[int, Tensor]:
    """Return the inputs to the target's first layer at image tokens, keyed by token number."""
    types = arguments.get("mm_token_type_ids", torch.zeros(1, 0))[0].tolist()
    return {number: inputs[number] for number, token_type in enumerate(types) if token_type}


def test_eagle3_head_reads_pictures_on_request(tmp_path):
    model, inputs, weights = target(), mixed_prompts(target()), make_weights(HEAD)
    folder = write_speculators(tmp_path, HEAD, weights)
    head = load_drafter(folder, model, merged_embeddings=True)
    records, text, stats = recorded(head, inputs)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NUM_NEW), text)
    assert "hidden layers: [0, 1, 0]" in stats.plan
    reference = Reference(
        HEAD, weights, model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )
    alone = rows_alone(model, inputs, text)
    states = [states_of_row(model, arguments, (*HEAD.aux_layers, 0)) for arguments in alone]
    for row, num_known, drafted in records:
        known, own = alone[row]["input_ids"][0, :num_known].tolist(), states[row]
        reference.merged = merged_of_row(alone[row], own[:, -32:])
        logits = reference.logits(known, own[: num_known - 1, :-32], drafted, len(drafted))
        assert drafted == [HEAD.draft_ids[index] for index in logits.argmax(-1).tolist()]
    assert records != recorded(load_drafter(folder, model), inputs)[0]


def test_text_prompts_are_drafted_as_without_pictures(tmp_path):
    model = target()
    folder = write_speculators(tmp_path, HEAD, make_weights(HEAD))
    text = {
        name: value[:1]
        for name, value in mixed_prompts(model).items()
        if name in ("input_ids", "attention_mask")
    }
    merging, plain = (
        recorded(load_drafter(folder, model, merged_embeddings=told), text) for told in (True, None)
    )
    assert merging[0] == plain[0]
    assert "hidden layers: [0, 1]" in merging[2].plan


@pytest.mark.parametrize("has_pictures", [True, False])
def test_target_writing_into_its_input_changes_no_draft(tmp_path, has_pictures, monkeypatch):
    model = target()
    head = load_drafter(
        write_speculators(tmp_path, HEAD, make_weights(HEAD)), model, merged_embeddings=True
    )
    inputs = mixed_prompts(model)
    inputs = (
        inputs if has_pictures else {name: inputs[name] for name in ("input_ids", "attention_mask")}
    )
    expected = recorded(head, inputs)
    first = model.model.language_model.layers[0]
    forward = first.forward

    def spoil(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(hidden_states.clone(), *args, **kwargs)
        hidden_states.fill_(torch.nan)
        return output

    monkeypatch.setattr(first, "forward", spoil)
    spoilt = recorded(head, inputs)
    assert spoilt[0] == expected[0]
    assert torch.equal(spoilt[1], expected[1])


def test_heads_that_cannot_read_pictures_are_named(tmp_path):
    folder = write_speculators(tmp_path, DFLASH, make_weights(DFLASH))
    with pytest.raises(
        ConfigError, match="merged_embeddings must be left out for a head of kind dflash"
    ):
        load_drafter(folder, target_of(), merged_embeddings=True)


@cache
def reader_with_mtp() -> PreTrainedModel:
    """Return an enabled Qwen3.5 with images and an MTP layer. Tests share it."""
    model = make_qwen3_5_vl()
    model.config.text_config.mtp_num_hidden_layers = 1
    return hf_speculate.enable(model)


def write_mtp(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Write random weights for the MTP layer next to the target's config, and return them."""
    generator, width = torch.Generator().manual_seed(5), model.config.text_config.hidden_size
    layer = model.get_decoder().layers[1]
    shapes = {f"layers.0.{name}": weight.shape for name, weight in layer.named_parameters()}
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
    save_file(
        {f"mtp.{name}": weight for name, weight in weights.items()}, folder / "model.safetensors"
    )
    model.config.save_pretrained(folder)
    return weights


@torch.no_grad()
def mtp_reference(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    text: list[int],
    states: Tensor,
    merged: dict[int, Tensor],
    axes: Tensor,
    drafted: list[int],
) -> Tensor:
    """Return [K, V] from the layer applied to its own outputs and, in each step, the whole text."""
    config = copy.deepcopy(model.config.text_config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    block = type(model.get_decoder())(config).to(torch.float64).eval()
    of_layer = {
        name.removeprefix("layers.0."): one
        for name, one in weights.items()
        if name.startswith("layers.")
    }
    block.layers[0].load_state_dict(of_layer)
    block.norm.weight.copy_(weights["norm.weight"])

    def normed(values: Tensor, name: str) -> Tensor:
        return rms_norm(
            values,
            values.shape[-1:],
            1 + weights[f"pre_fc_norm_{name}.weight"],
            config.rms_norm_eps,
        )

    scores, own = [], []
    for step in range(len(drafted)):
        rows = model.get_input_embeddings()(torch.tensor(text[1:] + drafted[:step]))
        embeddings = torch.stack(
            [merged.get(number, row) for number, row in enumerate(rows, start=1)]
        )
        joined = torch.cat(
            [normed(embeddings, "embedding"), normed(torch.cat([states, *own]), "hidden")], dim=-1
        )
        positions = axes[:, None, : len(joined)]
        fused = (joined @ weights["fc.weight"].T)[None]
        outputs = block(
            inputs_embeds=fused, position_ids=positions, use_cache=False
        ).last_hidden_state
        scores.append(model.get_output_embeddings()(outputs[0, -1]))
        own.append(outputs[0, -1:])
    return torch.stack(scores)


@pytest.mark.parametrize("merges", [True, False])
def test_mtp_layers_read_pictures_at_target_positions(tmp_path, merges):
    model = reader_with_mtp()
    inputs, weights = mixed_prompts(model), write_mtp(tmp_path, model)
    head = load_drafter(tmp_path, model, **({} if merges else {"merged_embeddings": False}))
    records, text, _ = recorded(head, inputs, model=model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NUM_NEW), text)
    alone = rows_alone(model, inputs, text)
    states = [states_of_row(model, arguments, (-1, 0)) for arguments in alone]
    for row, num_known, drafted in records:
        known, own = alone[row]["input_ids"][0, :num_known].tolist(), states[row]
        width = own.shape[1] // 2
        merged = merged_of_row(alone[row], own[:, width:]) if merges else {}
        axes = axes_of_row(model, alone[row])
        logits = mtp_reference(
            model, weights, known, own[: num_known - 1, :width], merged, axes, drafted
        )
        assert drafted == logits.argmax(-1).tolist()
    assert len(records) > K
