"""Map a draft head's tokens to target ids, from `d2t` in its weights.

Most trainers save offsets, so that column j stands for id j + d2t[j]. Some save the ids themselves.
`t2d` marks the ids and decides between the two. Without `t2d`, values that increase at every column
are ids. Read as offsets, they would leave out both neighbours of every id, but n frequent ids out
of V contain about n^2 / V pairs of neighbours, which is thousands in any published head. An arange
is read as the first n ids, not as every other id, since no frequency count selects every other id.
A short `d2t` with two possible readings is not supported.
"""

from pathlib import Path

import torch
from torch import Tensor

from hf_speculate.errors import ConfigError

# With 20 expected pairs of neighbours, offsets have no pair with a probability of about exp(-20).
_RULED_OUT = 20


def target_ids(d2t: Tensor, t2d: Tensor | None, vocab_size: int, file: Path) -> Tensor:
    """Return increasing ids [Vd] int64 below V on the CPU, from d2t [Vd] int and t2d [V] bool.

    Raises:
        ConfigError: d2t and t2d contradict each other or give no increasing ids below V, or d2t is
            ambiguous.
    """
    stored = d2t.cpu().long().flatten()
    columns = torch.arange(len(stored), device="cpu")
    readings = [ids for ids in (columns + stored, stored) if _are_ids(ids, vocab_size)]
    if not readings:
        raise ConfigError(
            f"d2t in {file} must hold offsets that give increasing ids below {vocab_size}, or "
            "these ids, got values "
            f"from {int(stored.min()) if len(stored) else None} to "
            f"{int(stored.max()) if len(stored) else None}; save "
            "d2t[draft_id] = target_id - draft_id"
        )
    if t2d is not None:
        marked = t2d.cpu().bool().flatten().nonzero().flatten()
        readings = [ids for ids in readings if torch.equal(ids, marked)]
        if not readings:
            raise ConfigError(
                f"t2d in {file} must mark the {len(stored)} ids that d2t leads to, got "
                f"{len(marked)} others; save both "
                "from one vocabulary"
            )
    is_open = len(readings) == 2 and not torch.equal(*readings) and not torch.equal(stored, columns)
    if is_open and len(stored) ** 2 < _RULED_OUT * vocab_size:
        raise ConfigError(
            f"d2t in {file} must come with t2d if it rises at every one of {len(stored)} columns, "
            "for it may hold "
            "offsets or ids, got none; save t2d, which marks the ids"
        )
    return readings[-1]


def _are_ids(ids: Tensor, vocab_size: int) -> bool:
    is_rising = bool((ids[1:] > ids[:-1]).all())
    return len(ids) > 0 and is_rising and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
