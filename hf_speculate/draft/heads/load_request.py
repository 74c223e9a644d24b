"""Arguments of the loaders of all kinds of draft heads."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_speculate.draft.heads.folder import HeadFolder
from hf_speculate.draft.heads.kinds import HeadKind
from hf_speculate.draft.heads.target_parts import TargetShape


class LoadRequest(NamedTuple):
    """A head that is to be loaded."""

    folder: HeadFolder
    found: HeadKind
    target: PreTrainedModel
    shape: TargetShape
    dtype: torch.dtype
    device: torch.device
    hidden_layers: tuple[int, ...] | None  # given by the caller; None for those of the config
