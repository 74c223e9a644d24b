"""Test heads for targets that read images, with positions in time, height and width (M-RoPE)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

import hf_speculate
from hf_speculate.errors import ConfigError
from hf_speculate.options.heads.layers import Rotary, read_layer_config
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.options.heads.row_axes import RowAxes
from tests.cases import assert_decodes_as_plain
from tests.options.heads.designs import EAGLE3, make_weights, write_speculators
from tests.options.heads.reference import Reference
from tests.support.compiled_calls import compile_config
from tests.support.tiny_encoders import IMAGE_TOKEN_ID, make_qwen2_vl, mixed_prompts

NUM_NEW, K = 12, 3
PICTURES_OF_ROWS = (0, 1, 2)
SPLIT = {"rope_type": "default", "mrope_section": [1, 1, 2]}
INTERLEAVED = {"type": "mrope", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
HEAD = replace(EAGLE3, hidden_size=32, target_hidden_size=32, vocab_size=64, aux_layers=(0, 1))


def of_rope(rope: dict[str, Any] | None):
    """Return a head whose config has this entry."""
    return replace(
        HEAD, rope={"rope_theta": 1000.0} | ({} if rope is None else {"rope_scaling": rope})
    )


def layers_of(head_dim: int, rope: dict[str, Any]):
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "intermediate_size": 8}
    return read_layer_config(
        {**sizes, "head_dim": head_dim, "rope_theta": 1e6, "rope_scaling": rope}
    )


@pytest.mark.parametrize(
    ("reference", "rope"),
    [
        (Qwen2VLRotaryEmbedding, {"type": "mrope", "mrope_section": [16, 24, 24]}),
        (Qwen3VLTextRotaryEmbedding, {"mrope_section": [24, 20, 20], "mrope_interleaved": True}),
        (Qwen3VLTextRotaryEmbedding, {"mrope_section": [28, 17, 19], "mrope_interleaved": True}),
    ],
)
def test_rotation_equals_that_of_the_target(reference, rope):
    config = layers_of(128, rope)
    config.rope_parameters |= {"mrope_section": rope["mrope_section"]}
    positions = torch.randint(0, 2000, (3, 2, 9))
    rotary, states = Rotary(config, torch.device("cpu")), torch.empty(0, dtype=torch.float64)
    rotation = rotary(positions, torch.float64)
    for ours, theirs in zip(rotation, reference(config)(states, positions), strict=True):
        torch.testing.assert_close(ours[:, 0], theirs, rtol=0, atol=1e-12)
    equal = rotary(positions[:1].expand(3, -1, -1), torch.float64)
    for ours, plain in zip(equal, rotary(positions[0], torch.float64), strict=True):
        assert torch.equal(ours, plain)
    assert not torch.equal(rotation.cos, equal.cos)


def test_mismatched_sections_are_named(tmp_path):
    folder = write_speculators(tmp_path, of_rope({"mrope_section": [2, 2, 1]}), make_weights(HEAD))
    with pytest.raises(
        ConfigError, match=r"mrope_section must be three numbers whose sum is 4, .* got \[2, 2, 1\]"
    ):
        load_drafter(folder, target())


def test_positions_continue_from_the_prompt_in_every_row():
    prompts = (
        torch.tensor([[[9, 9, 0, 1, 1, 2]], [[0, 1, 1, 2, 3, 3]]]).transpose(0, 1).repeat(3, 1, 1)
    )
    prompts[1, 1, 2] = 5
    axes = RowAxes(prompts, [2, 0], torch.device("cpu"))
    expected = torch.tensor([[0, 1, 1, 2, 3, 4], [0, 1, 1, 2, 3, 3]])
    numbers = torch.arange(6)[None]
    assert torch.equal(axes.at(numbers)[0], expected)
    assert axes.at(numbers)[1, 1, 2] == 5
    axes.rows([1])
    assert torch.equal(axes.at(numbers + 3)[2], torch.tensor([[2, 3, 3, 4, 5, 6]]))


@cache
def target() -> PreTrainedModel:
    """Return an enabled target. Tests share it: do not change it."""
    return hf_speculate.enable(make_qwen2_vl())


class Recorder:
    """Drafter that records another's drafts: (row, number of known tokens, drafted tokens)."""

    drafts_fewer = True

    def __init__(self, drafter: Any, records: list[tuple[int, int, list[int]]]):
        self.drafter, self.records, self.hidden_layers = drafter, records, drafter.hidden_layers
        self.is_compiled = drafter.is_compiled
        self.row_ids, self.num_known = (
            list(range(len(drafter._num_pads))),
            [1] * len(drafter._num_pads),
        )

    def project_states(self, states: Tensor) -> Tensor:
        return self.drafter.project_states(states)

    def draft(self, request: Any) -> Any:
        draft = self.drafter.draft(request)
        counts = request.kept.num_emitted.tolist()
        self.num_known = [num + more for num, more in zip(self.num_known, counts, strict=True)]
        drafted = [
            ids[:num]
            for ids, num in zip(draft.token_ids.tolist(), draft.lens.tolist(), strict=True)
        ]
        self.records += zip(self.row_ids, self.num_known, drafted, strict=True)
        return draft

    def rows(self, indices: Sequence[int]) -> None:
        self.drafter.rows(indices)
        self.row_ids, self.num_known = (
            [values[row] for row in indices] for values in (self.row_ids, self.num_known)
        )


def rows_alone(
    model: PreTrainedModel, inputs: dict[str, Tensor], outputs: Tensor
) -> list[dict[str, Tensor]]:
    """Return arguments for plain forwards over the text and images of each row, without padding."""
    rows, begin = [], 0
    num_prompt = inputs["input_ids"].shape[1]
    for row, num in enumerate(PICTURES_OF_ROWS):
        num_pads = int((inputs["attention_mask"][row] == 0).sum())
        ids = outputs[row : row + 1, num_pads:]
        arguments = {"input_ids": ids}
        if num:
            types = (ids == IMAGE_TOKEN_ID).int()
            types[:, num_prompt - num_pads :] = 0
            pixels = inputs["pixel_values"][16 * begin : 16 * (begin + num)]
            arguments |= {"mm_token_type_ids": types, "pixel_values": pixels}
            arguments["image_grid_thw"] = inputs["image_grid_thw"][begin : begin + num]
        rows.append(arguments)
        begin += num
    return rows


def axes_of_row(model: PreTrainedModel, arguments: dict[str, Tensor], num_more: int = K) -> Tensor:
    """Return the positions [3, T + num_more] of a row and of the tokens after it."""
    ids = torch.nn.functional.pad(arguments["input_ids"], (0, num_more), value=5)
    if "image_grid_thw" not in arguments:
        return torch.arange(ids.shape[1]).expand(3, -1)
    types = torch.nn.functional.pad(arguments["mm_token_type_ids"], (0, num_more))
    return model.model.get_rope_index(ids, types, arguments["image_grid_thw"])[0][:, 0]


@torch.no_grad()
def states_of_row(
    model: PreTrainedModel, arguments: dict[str, Tensor], layers: Sequence[int]
) -> Tensor:
    """Return states [T, A * D] of a forward without a cache."""
    given = model(**arguments, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([given[layer][0] for layer in layers], dim=-1)


def recorded(
    head: Any, inputs: dict[str, Tensor], model: PreTrainedModel | None = None, **options: Any
) -> tuple[list[Any], Tensor, Any]:
    """Return the drafts of a head in one call, and the call's output and statistics."""
    records: list[Any] = []
    stats = hf_speculate.SpeculationStats()
    draft_options = {
        "drafter": lambda setup: Recorder(head(setup), records),
        "num_assistant_tokens": K,
    }
    draft_options |= {"speculation_stats": stats, "max_new_tokens": NUM_NEW}
    text = (target() if model is None else model).generate(**inputs, **draft_options, **options)
    return records, text, stats


@pytest.mark.parametrize(
    "rope", [SPLIT, INTERLEAVED, None], ids=["split", "interleaved", "one axis"]
)
def test_drafts_after_pictures_equal_the_reference(tmp_path, rope):
    design, model, inputs = of_rope(rope), target(), mixed_prompts(target())
    weights = make_weights(design)
    head = load_drafter(write_speculators(tmp_path, design, weights), model)
    plain = model.generate(**inputs, max_new_tokens=NUM_NEW)
    eos = int(plain[1, 4 - NUM_NEW])  # one row leaves, the others go on
    records, text, _ = recorded(head, inputs, eos_token_id=eos)
    plain = model.generate(**inputs, max_new_tokens=NUM_NEW, eos_token_id=eos)
    assert torch.equal(plain, text)
    reference = Reference(
        design, weights, model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )
    alone = rows_alone(model, inputs, text)
    states = [states_of_row(model, arguments, design.aux_layers) for arguments in alone]
    axes = [axes_of_row(model, arguments) for arguments in alone]
    assert {row for row, *_ in records} == {0, 1, 2}
    for row, num_known, drafted in records:
        known = alone[row]["input_ids"][0, :num_known].tolist()
        reference.axes = None if rope is None else axes[row]
        logits = reference.logits(known, states[row][: num_known - 1], drafted, len(drafted))
        assert drafted == [design.draft_ids[index] for index in logits.argmax(-1).tolist()]


def test_positions_come_from_the_call_only(tmp_path):
    model, inputs = target(), mixed_prompts(target())
    head = load_drafter(write_speculators(tmp_path, of_rope(SPLIT), make_weights(HEAD)), model)
    expected = recorded(head, inputs)

    def poison(report: Any) -> None:
        model.model.rope_deltas = torch.full((7, 1), 1000)

    records = recorded(head, inputs, speculation_callback=poison)
    assert records[0] == expected[0]
    assert torch.equal(records[1], expected[1])


def test_text_rows_are_drafted_as_without_axes(tmp_path):
    model, inputs = target(), mixed_prompts(target())
    text = {name: inputs[name][:1] for name in ("input_ids", "attention_mask")}
    heads = [
        load_drafter(
            write_speculators(tmp_path / str(index), of_rope(rope), make_weights(HEAD)), model
        )
        for index, rope in enumerate((SPLIT, None))
    ]
    assert recorded(heads[0], text)[0] == recorded(heads[1], text)[0]
    assert recorded(heads[0], inputs)[0] != recorded(heads[1], inputs)[0]


@pytest.mark.fallback("eager forwards of the target")
def test_compiled_chains_continue_from_the_prompt(tmp_path):
    inputs = mixed_prompts(target())
    head = load_drafter(write_speculators(tmp_path, of_rope(SPLIT), make_weights(HEAD)), target())
    compiled = recorded(head, inputs, compile_config=compile_config())
    assert compiled[2].compiled == ["draft"]
    assert compiled[0] == recorded(head, inputs)[0]


def test_head_with_axes_drafts_under_every_schedule(tmp_path):
    head = load_drafter(
        write_speculators(tmp_path, of_rope(INTERLEAVED), make_weights(HEAD)), target()
    )
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens_schedule": "heuristic"}
    stats = assert_decodes_as_plain(target(), head, mixed_prompts(target()), **options)
    assert stats.num_drafted > 0
