"""Arguments of the loaders of all kinds of draft heads."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_speculate.draft.heads.config_source import ConfigSource
from hf_speculate.draft.heads.folder import HeadFolder


class LoadRequest(NamedTuple):
    """A head that is to be loaded."""

    folder: HeadFolder
    source: ConfigSource
    target: PreTrainedModel
    dtype: torch.dtype
    device: torch.device
