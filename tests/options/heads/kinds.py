"""Load every kind of head for a small target, for tests that all kinds share."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.load import load_drafter
from tests.options.heads.designs import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    MTP,
    NUM_TARGET_LAYERS,
    PEAGLE,
    VOCAB_SIZE,
    Design,
    make_weights,
    write_speculators,
)
from tests.options.heads.rounds import target_of
from tests.options.heads.test_mtp import make_checkpoint
from tests.options.heads.test_pard import write_pard

Loaded = tuple[DraftHead, PreTrainedModel]


def _written(design: Design) -> Callable[[Path], Loaded]:
    def load(folder: Path) -> Loaded:
        return load_drafter(
            write_speculators(folder, design, make_weights(design)), target_of()
        ), target_of()

    return load


def _pard(folder: Path) -> Loaded:
    write_pard(folder)
    return load_drafter(folder, target_of()), target_of()


def _mtp_of_checkpoint(folder: Path) -> Loaded:
    target = make_checkpoint(folder, "deepseek_v3", 2, seed=5, vocab_size=VOCAB_SIZE)
    return load_drafter(folder, target), target


WITH_WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
KINDS: dict[str, Callable[[Path], Loaded]] = {
    "EAGLE-3": _written(replace(EAGLE3, aux_layers=(0, 2, NUM_TARGET_LAYERS))),
    "EAGLE-3, two layers": _written(replace(EAGLE3, num_layers=2, **WITH_WINDOWS)),
    "P-EAGLE": _written(PEAGLE),
    "DFlash": _written(replace(DFLASH, **WITH_WINDOWS)),
    "DFlash 2": _written(replace(DFLASH2, **WITH_WINDOWS).with_options(selector_rank=48)),
    "DSpark": _written(DSPARK.with_options(markov_head_type="rnn")),
    "MTP, speculators": _written(MTP),
    "MTP, two layers of a checkpoint": _mtp_of_checkpoint,
    "PARD": _pard,
}
