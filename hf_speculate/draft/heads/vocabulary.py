"""The draft vocabulary of a head: which ids of the target it can propose."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_speculate.errors import UnsupportedModelError


@dataclass(frozen=True)
class DraftVocabulary:
    """Maps the columns of a head's logits to ids of the target."""

    size: int  # V, of the target
    target_ids: Tensor | None = None  # [Vd] int64, those of the columns, increasing; None if column j is id j

    def ids(self, columns: Tensor) -> Tensor:
        return columns if self.target_ids is None else self.target_ids[columns]

    def scattered(self, logits: Tensor) -> Tensor:
        """[..., V] from logits [..., Vd]: -inf at every id that the head cannot propose."""
        num_columns = logits.shape[-1]
        if self.target_ids is None and num_columns >= self.size:
            return logits[..., : self.size]
        if self.target_ids is None:
            return torch.nn.functional.pad(logits, (0, self.size - num_columns), value=-torch.inf)
        full = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return full.index_copy_(-1, self.target_ids, logits)

    def to(self, device: torch.device) -> "DraftVocabulary":
        return DraftVocabulary(self.size, None if self.target_ids is None else self.target_ids.to(device))


def read_offsets(d2t: Tensor, t2d: Tensor | None, size: int) -> Tensor:
    """[Vd] int64, the target's ids of the draft's columns: `d2t` [Vd] is added to a column's number.

    `t2d` [V] bool marks the ids that have a column, if the file has it. Ids that do not increase, lie outside of the
    vocabulary, or contradict `t2d` raise an `UnsupportedModelError`.
    """
    ids = torch.arange(len(d2t), device="cpu") + d2t.cpu().long()
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise UnsupportedModelError(
            f"d2t must hold offsets that give increasing ids below {size}, got ids from {int(ids.min())} to "
            f"{int(ids.max())}; save draft_id + d2t[draft_id] = target_id"
        )
    if t2d is not None and not torch.equal(t2d.cpu().bool().nonzero().flatten(), ids):
        raise UnsupportedModelError(
            f"t2d must mark the {len(ids)} ids that d2t leads to, got {int(t2d.bool().sum())} others; save both from "
            "one vocabulary"
        )
    return ids
