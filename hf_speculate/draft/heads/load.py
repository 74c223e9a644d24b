"""Loads a draft head of any served kind, or says from configs alone whether it fits."""

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_speculate.draft.base import Drafter, DrafterSetup
from hf_speculate.draft.heads.chain import ChainDrafter
from hf_speculate.draft.heads.dflash import BlockDrafter, DFlashNetwork, read_dflash
from hf_speculate.draft.heads.eagle3 import Eagle3Network, read_eagle3
from hf_speculate.draft.heads.fit import HeadFit, fit_of
from hf_speculate.draft.heads.folder import HeadFolder
from hf_speculate.draft.heads.head import DraftHead, HeadSpec
from hf_speculate.draft.heads.kinds import recognise
from hf_speculate.draft.heads.load_network import ConfigSource, HeadConfig, LoadRequest, load_network
from hf_speculate.draft.heads.mtp import load_mtp, read_mtp
from hf_speculate.draft.heads.network import HeadNetwork
from hf_speculate.draft.heads.parallel import ParallelDrafter
from hf_speculate.draft.heads.pard import load_pard, read_pard
from hf_speculate.draft.heads.target_parts import TargetShape, known_name, shape_of
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.field_checks import is_int
from hf_speculate.models.language_model import device_of


class _Kind(NamedTuple):
    read: Callable[[ConfigSource], HeadConfig]
    load: Callable[[LoadRequest], HeadNetwork]
    drafter: Callable[[Any, HeadSpec, DrafterSetup], Drafter]  # of the network


_KINDS = {
    "eagle3": _Kind(read_eagle3, partial(load_network, Eagle3Network), ChainDrafter),
    "peagle": _Kind(read_eagle3, partial(load_network, Eagle3Network), ParallelDrafter),
    "dflash": _Kind(read_dflash, partial(load_network, DFlashNetwork), BlockDrafter),
    "dspark": _Kind(read_dflash, partial(load_network, DFlashNetwork), BlockDrafter),
    "mtp": _Kind(read_mtp, load_mtp, ChainDrafter),
    "pard": _Kind(read_pard, load_pard, ParallelDrafter),
}


def load_drafter(
    head: str | Path,
    target: PreTrainedModel,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    aux_layers: Sequence[int] | None = None,
) -> DraftHead:
    """Load a draft head for a target; pass it to `generate()` as `assistant_model`.

    Served are EAGLE-3 and 3.1 (original and speculators format), P-EAGLE, DFlash (z-lab and speculators), DSpark,
    PARD, and MTP layers, for which `head` is the folder of the target itself or a speculators "mtp" head.

    Args:
        head: a folder with `config.json` and weights (safetensors, sharded or not, or `pytorch_model.bin`), or the id
            of a Hub repository.
        target: the model that the head was trained for; left as it is.
        dtype: of the head's weights; the target's if None.
        device: of the head's weights; the target's if None.
        aux_layers: ids of the target's hidden states that the head reads, for configs that name them wrongly: i is the
            input of decoder layer i, and the number of layers is the state before the final norm. If None, those
            of the config. `DraftHead.check_layers` measures whether they are right.

    Returns:
        The head, whose `repr` says what was loaded.

    Raises:
        ConfigError: there is no config, fields exclude each other, or `aux_layers` cannot be.
        UnsupportedModelError: the kind is not served, or the head does not fit the target.
    """
    folder, shape = HeadFolder(head), shape_of(target.config)
    source = _source_of(folder, shape)
    if aux_layers is not None:
        source = source._replace(hidden_layers=_checked(aux_layers, shape.num_layers))
    kind = _KINDS[source.found.kind]
    config = kind.read(source)
    fit = fit_of(config.spec, shape, shape.name)
    if fit.problems:
        raise UnsupportedModelError(
            f"a draft head must fit its target, got {folder.name} ({source.found.kind}): {'; '.join(fit.problems)}; "
            "load the head that was trained for this target"
        )
    for note in fit.notes:
        warnings.warn(f"the draft head {folder.name}: {note}", stacklevel=2)
    dtype = target.dtype if dtype is None else dtype
    device = device_of(target) if device is None else torch.device(device)
    network = kind.load(LoadRequest(folder, config, target, shape.vocab_size, dtype, device))
    return DraftHead(config.spec, network, target.config, partial(kind.drafter, network))


def check_head(head: str | Path, target: str | Path | PreTrainedConfig) -> HeadFit:
    """Whether a head fits a target, without loading weights of either; both by folder or id, the target also by config.

    Raises:
        ConfigError: there is no config, or its fields exclude each other.
        UnsupportedModelError: the kind of head is not known or not served.
    """
    config = target if isinstance(target, PreTrainedConfig) else AutoConfig.from_pretrained(target)
    folder, shape, name = HeadFolder(head), shape_of(config), str(config.name_or_path or config.model_type)
    if not isinstance(target, PreTrainedConfig):
        shape, name = shape._replace(name=known_name(str(target))), str(target)
    source = _source_of(folder, shape)
    return fit_of(_KINDS[source.found.kind].read(source).spec, shape, name)


def _source_of(folder: HeadFolder, shape: TargetShape) -> ConfigSource:
    found = recognise(folder.config, folder.weights, shape.model_type)
    return ConfigSource(folder.config, found, folder.name, shape)


def _checked(aux_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    if not aux_layers or not all(is_int(layer) and 0 <= layer <= num_layers for layer in aux_layers):
        raise ConfigError(
            f"aux_layers must be ids in 0..{num_layers}, got {list(aux_layers)!r}; an id is the layer whose input is "
            "read, and leave it out for those of the head's config"
        )
    return tuple(aux_layers)


class HeadStore:
    """The draft heads that calls of one target named, by source, dtype and device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[tuple[str, torch.dtype, torch.device], DraftHead] = {}

    def get(self, source: str | Path, target: PreTrainedModel) -> DraftHead:
        """The head of a folder or a Hub repository, loaded by `load_drafter` on first use."""
        key = (str(source), target.dtype, device_of(target))
        with self._lock:
            if key not in self._heads:
                self._heads[key] = load_drafter(source, target)
            return self._heads[key]
