"""The target's ids that a draft head proposes, as the `d2t` of its weights gives them.

Trainers save offsets: column j stands for id j + d2t[j]. Some save the ids themselves. `t2d`, which marks the ids,
tells which. Without it, values that rise at every column are ids: as offsets they would leave out both neighbours of
every id, and of n frequent ids out of V about n^2 / V pairs are neighbours, thousands in any head that is published. An
arange is the first n ids, and not every other one, which no count of frequencies gives. A short `d2t` that could be
either is refused.
"""

from pathlib import Path

import torch
from torch import Tensor

from hf_speculate.errors import ConfigError

# Expected pairs of neighbours from which on offsets without any are ruled out: the chance is about exp(-20).
_RULED_OUT = 20


def target_ids(d2t: Tensor, t2d: Tensor | None, vocab_size: int, file: Path) -> Tensor:
    """[Vd] int64 ids of V, increasing, on the CPU, of d2t [Vd] int and t2d [V] bool.

    Raises:
        ConfigError: they give no increasing ids below V, or different ones, or d2t has two meanings.
    """
    stored = d2t.cpu().long().flatten()
    columns = torch.arange(len(stored), device="cpu")
    readings = [ids for ids in (columns + stored, stored) if _are_ids(ids, vocab_size)]
    if not readings:
        raise ConfigError(
            f"d2t in {file} must hold offsets that give increasing ids below {vocab_size}, or these ids, got values "
            f"from {int(stored.min()) if len(stored) else None} to {int(stored.max()) if len(stored) else None}; save "
            "d2t[draft_id] = target_id - draft_id"
        )
    if t2d is not None:
        marked = t2d.cpu().bool().flatten().nonzero().flatten()
        readings = [ids for ids in readings if torch.equal(ids, marked)]
        if not readings:
            raise ConfigError(
                f"t2d in {file} must mark the {len(stored)} ids that d2t leads to, got {len(marked)} others; save both "
                "from one vocabulary"
            )
    is_open = len(readings) == 2 and not torch.equal(*readings) and not torch.equal(stored, columns)
    if is_open and len(stored) ** 2 < _RULED_OUT * vocab_size:
        raise ConfigError(
            f"d2t in {file} must come with t2d if it rises at every one of {len(stored)} columns, for it may hold "
            "offsets or ids, got none; save t2d, which marks the ids"
        )
    return readings[-1]


def _are_ids(ids: Tensor, vocab_size: int) -> bool:
    is_rising = bool((ids[1:] > ids[:-1]).all())
    return len(ids) > 0 and is_rising and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
