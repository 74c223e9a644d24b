"""Test that damaged folders and folders with wrong content raise errors that name the file."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_speculate.errors import ConfigError, SpeculateError, UnsupportedModelError
from hf_speculate.options.heads.load import load_drafter
from tests.options.heads.designs import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    MTP,
    PEAGLE,
    make_weights,
    write_original,
)
from tests.options.heads.designs import write_speculators as write
from tests.options.heads.rounds import target_of
from tests.options.heads.test_mtp import make_checkpoint, make_hybrid
from tests.options.heads.test_pard import write_pard

SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def eagle(folder):
    write(folder, EAGLE3, make_weights(EAGLE3))
    return target_of()


def sharded(folder):
    write_original(folder, EAGLE3, make_weights(EAGLE3), saving={"max_shard_size": 4096})
    return target_of()


def pickled(folder):
    write_original(folder, EAGLE3, make_weights(EAGLE3), saving={"safe_serialization": False})
    return target_of()


def pard(folder):
    write_pard(folder)
    return target_of()


def deepseek(folder):
    return make_checkpoint(folder, "deepseek_v3", 2, seed=5)


def hybrid(folder):
    return make_hybrid(folder, "qwen3_5")[0]


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def with_json(name: str, **fields: Any) -> Callable[[Path], None]:
    """Change fields of a JSON file; None removes a field."""

    def change(content: bytes) -> bytes:
        new = {
            key: value for key, value in (json.loads(content) | fields).items() if value is not None
        }
        return json.dumps(new).encode()

    return rewritten(name, change)


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        weights = load_file(folder / SAFE)
        change(weights)
        save_file(weights, folder / SAFE)

    return rewrite


def without_a_shard(folder):
    (folder / shard_of(folder)).unlink()


def without_a_listed_weight(folder):
    path = folder / shard_of(folder)
    weights = load_file(path)
    weights.popitem()
    save_file(weights, path)


def shard_of(folder):
    return sorted(json.loads((folder / INDEX).read_text())["weight_map"].values())[0]


def one_more_layer(weights):
    for name in [name for name in weights if name.startswith("model.layers.2.")]:
        weights[name.replace("layers.2.", "layers.3.")] = weights[name].clone()


def one_layer_less(weights):
    for name in [name for name in weights if name.startswith("model.layers.2.")]:
        del weights[name]


EXTRA = "model.layers.1.mlp.extra.weight"
FAULTS = {  # function that writes a folder, damage, and error message
    "cut off": (
        eagle,
        rewritten(SAFE, lambda content: content[:-9]),
        f"{SAFE} must be a whole file .*incomplete",
    ),
    "longer": (
        eagle,
        rewritten(SAFE, lambda content: content + b"more"),
        f"{SAFE} must be a whole file",
    ),
    "empty": (
        eagle,
        rewritten(SAFE, lambda content: b""),
        f"{SAFE} must be a whole file .*got 0 bytes",
    ),
    "pointer": (eagle, rewritten(SAFE, lambda content: POINTER), f"{SAFE} must be a whole file"),
    "pickle cut off": (
        pickled,
        rewritten("pytorch_model.bin", lambda content: content[:-9]),
        r"\.bin must be a whole",
    ),
    "pickle of a list": (
        pickled,
        lambda folder: torch.save([torch.ones(1)], folder / "pytorch_model.bin"),
        r"pytorch_model\.bin must hold tensors by name, got list",
    ),
    "no weight_map": (
        sharded,
        with_json(INDEX, weight_map=None),
        f"{INDEX} must be an index whose weight_map .*metadata",
    ),
    "a weight_map of a list": (
        sharded,
        with_json(INDEX, weight_map=["a"]),
        f"{INDEX} must be an index whose weight_map",
    ),
    "an index cut off": (
        sharded,
        rewritten(INDEX, lambda content: content[:-9]),
        f"{INDEX} must be a whole file",
    ),
    "no shard": (
        sharded,
        without_a_shard,
        f"{INDEX} must name files that lie beside it, got model-00001-of",
    ),
    "a shard without a weight": (
        sharded,
        without_a_listed_weight,
        r"00001-of-\d+\.safetensors must hold the weights that",
    ),
    "no weight": (
        eagle,
        with_weights(lambda weights: weights.pop("norm.weight")),
        (
            rf"{SAFE} must hold the weights of the network that config\.json describes, "
            r"got none of norm\.weight;"
        ),
    ),
    "left over": (
        eagle,
        with_weights(lambda weights: weights.update({name: torch.ones(1) for name in "abcd"})),
        f"{SAFE} must hold .* got left over a, b, c and 1 more;",
    ),
    "another shape": (
        eagle,
        with_weights(lambda weights: weights.update({"norm.weight": torch.ones(3)})),
        rf"{SAFE} must hold .* got of another shape norm\.weight \[3\] for \[24\]",
    ),
    "no dimension": (
        eagle,
        with_weights(lambda weights: weights.update({"fc.weight": torch.tensor(1.0)})),
        f"{SAFE} must hold the weights of the network",
    ),
    "PARD without a weight": (
        pard,
        with_weights(lambda weights: weights.pop("model.norm.weight")),
        rf"{SAFE} must hold .* none of model\.norm\.weight;",
    ),
    "PARD with one more": (
        pard,
        with_weights(lambda weights: weights.update(extra=torch.ones(1))),
        f"{SAFE} must hold .* left over extra;",
    ),
    "PARD cut off": (
        pard,
        rewritten(SAFE, lambda content: content[:-9]),
        f"{SAFE} must be a whole file",
    ),
    "PARD's token": (
        pard,
        with_json("config.json", pard_token=99),
        "pard_token of .* must be an id below its vocab_size",
    ),
    "one MTP layer of two": (
        deepseek,
        with_weights(one_layer_less),
        rf"{SAFE} must hold the 2 MTP layers .*layers \[0\]",
    ),
    "three MTP layers of two": (
        deepseek,
        with_weights(one_more_layer),
        rf"{SAFE} must hold the 2 MTP .*\[0, 1, 2\]",
    ),
    "an MTP layer with one more": (
        deepseek,
        with_weights(lambda weights: weights.update({EXTRA: torch.ones(1)})),
        rf"{SAFE} must hold .* left over 0\.mtp_block\.mlp\.extra\.weight",
    ),
    "an MTP layer cut off": (
        deepseek,
        rewritten(SAFE, lambda content: content[:-9]),
        f"{SAFE} must be a whole file",
    ),
    "one prefixed layer of two": (
        hybrid,
        with_json("config.json", mtp_num_hidden_layers=2),
        rf"{SAFE} must hold the 2 MTP layers .*layers \[0\]",
    ),
    "a prefixed layer with one more": (
        hybrid,
        with_weights(lambda weights: weights.update({"mtp.extra": torch.ones(1)})),
        rf"{SAFE} must hold .* left over 0\.mtp_block\.extra",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_error_names_the_damaged_file(name, tmp_path):
    make, damage, message = FAULTS[name]
    target = make(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_drafter(tmp_path, target)
    assert "; " in str(caught.value)  # followed by the next step


def test_checkpoint_without_its_mtp_layers_is_named(tmp_path):
    target = deepseek(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / SAFE)
    with pytest.raises(
        UnsupportedModelError,
        match=f"{SAFE} must hold the weights of the target's MTP layers, got none",
    ):
        load_drafter(tmp_path, target)


DESIGNS = {
    "EAGLE-3": EAGLE3.with_options(fc_norm=True),
    "P-EAGLE": PEAGLE,
    "DFlash": replace(
        DFLASH, layer_types=("sliding_attention", "full_attention"), sliding_window=4
    ),
    "DFlash 2": DFLASH2,
    "DSpark": DSPARK.with_options(enable_confidence_head=True, confidence_head_with_markov=True),
    "MTP": MTP,
}
MISSING = object()
JUNK: tuple[Any, ...] = (MISSING, None, "junk", -1, [["junk"]], {"junk": 1})


def damaged(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config with one field missing or of another type, for every field."""
    for section in (None, "transformer_layer_config", "speculators_config"):
        for field in config if section is None else config[section]:
            for junk in JUNK:
                changed = copy.deepcopy(config)
                fields = changed if section is None else changed[section]
                fields[field] = junk
                if junk is MISSING:
                    del fields[field]
                yield changed


@pytest.mark.filterwarnings("ignore:the draft head", "ignore:.*rope")
@pytest.mark.parametrize("name", DESIGNS)
def test_damaged_config_loads_or_is_named(name, tmp_path):
    folder, errors = write(tmp_path, DESIGNS[name], make_weights(DESIGNS[name])), []
    path = folder / "config.json"
    for config in damaged(json.loads(path.read_text())):
        path.write_text(json.dumps(config))
        try:
            load_drafter(folder, target_of())
        except SpeculateError as error:
            errors.append(str(error))
    assert any(
        "config.json must hold the fields of a draft head, got a fault in it" in error
        for error in errors
    )
    assert all(" must " in error and ", got " in error and "; " in error for error in errors)


@pytest.mark.parametrize("name", DESIGNS)
def test_damaged_weights_load_or_are_named(name, tmp_path):
    """Remove each weight, some of its rows, or some of its dimensions."""
    weights, errors = make_weights(DESIGNS[name]), []
    folder = write(tmp_path, DESIGNS[name], weights)
    for weight_name, weight in weights.items():
        others = {other: one for other, one in weights.items() if other != weight_name}
        for junk in ({}, {weight_name: weight[:0]}, {weight_name: weight.flatten()[0].clone()}):
            save_file(others | junk, folder / SAFE)
            try:
                load_drafter(folder, target_of())
            except SpeculateError as error:
                errors.append(str(error))
    assert len(errors) > 2 * len(weights)
    assert [error for error in errors if SAFE not in error] == []
