"""Loads a draft head of any served kind, or says from configs alone whether it fits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_speculate.draft.base import Drafter, DrafterSetup
from hf_speculate.errors import ConfigError, UnsupportedModelError, warn_user
from hf_speculate.field_checks import integer, is_int
from hf_speculate.models.context import context_len as context_len_of
from hf_speculate.models.language_model import device_of, dtype_of
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.heads.chain import ChainDrafter
from hf_speculate.options.heads.dflash import BlockDrafter, DFlashNetwork, read_dflash
from hf_speculate.options.heads.dflash2 import DFlash2Network, SelectingDrafter, read_dflash2
from hf_speculate.options.heads.eagle3 import Eagle3Network, read_eagle3
from hf_speculate.options.heads.folder import HeadFolder
from hf_speculate.options.heads.head import DraftHead, HeadSpec, TargetShape, known_name, shape_of
from hf_speculate.options.heads.load_network import ConfigSource, LoadRequest, load_network, naming
from hf_speculate.options.heads.mtp import load_mtp, read_mtp
from hf_speculate.options.heads.network import HeadNetwork
from hf_speculate.options.heads.parallel import ParallelDrafter
from hf_speculate.options.heads.pard import load_pard, read_pard
from hf_speculate.options.heads.recognise import recognise

_MERGING = ("eagle3", "mtp")  # kinds that may read the target's embeddings of pictures
_LENGTH = integer("an int of at least 1", 1, math.inf, "leave it out for the length that the head was trained for")


class HeadFit(NamedTuple):
    """Whether a head fits a target."""

    spec: HeadSpec
    target: str  # name or path
    problems: tuple[str, ...]  # why it cannot be used; empty if it can
    notes: tuple[str, ...]  # what may lower the acceptance

    @property
    def ok(self) -> bool:
        """Whether `generate()` takes the head for this target."""
        return not self.problems

    @property
    def level(self) -> str:
        """The worst of what was found: "ok", "warning" or "does not fit"."""
        return "does not fit" if self.problems else "warning" if self.notes else "ok"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {**self._asdict(), "spec": asdict(self.spec), "ok": self.ok, "level": self.level}

    def __str__(self) -> str:
        spec = self.spec
        layers = ", ".join(map(str, spec.hidden_layers)) or "none"
        lines = [
            f"{self.level}: {spec.name} as a draft head for {self.target}",
            f"  kind: {spec.kind}, {spec.format} format",
            f"  reads hidden states of layers: {layers} (-1 is the state after the final norm)",
            f"  drafts {spec.draft_vocab_size:,} of {spec.vocab_size:,} tokens",
            f"  default K: {spec.default_draft_tokens or 'none'}",
        ]
        lines += [f"  does not fit: {text}" for text in self.problems]
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.notes)])


class _Kind(NamedTuple):
    read: Callable[[ConfigSource], tuple[HeadSpec, Any]]  # and the network's options
    load: Callable[[LoadRequest], HeadNetwork]
    drafter: Callable[[Any, HeadSpec, DrafterSetup], Drafter]  # makes the drafter of the network


_KINDS = {
    "eagle3": _Kind(read_eagle3, partial(load_network, Eagle3Network), ChainDrafter),
    "peagle": _Kind(read_eagle3, partial(load_network, Eagle3Network), ParallelDrafter),
    "dflash": _Kind(read_dflash, partial(load_network, DFlashNetwork), BlockDrafter),
    "dflash2": _Kind(read_dflash2, partial(load_network, DFlash2Network), SelectingDrafter),
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
    context_len: int | None = None,
    subfolder: str = "",
    revision: str | None = None,
    merged_embeddings: bool | None = None,
) -> DraftHead:
    """Load a draft head for a target; pass it to `generate()` as `assistant_model`.

    Served are EAGLE-3 and 3.1 (original and speculators format), P-EAGLE, DFlash and DFlash 2 (z-lab and speculators),
    DSpark, PARD, and MTP layers, for which `head` is the folder of the target itself or a speculators "mtp" head.

    Args:
        head: a folder with `config.json` and weights (safetensors, sharded or not, or `pytorch_model.bin`), or the id
            of a Hub repository.
        target: the model that the head was trained for, with up to 1,024 ids more or fewer; left as it is.
        dtype: of the head's weights; the target's if None.
        device: of the head's weights; the target's if None.
        aux_layers: ids of the target's hidden states that the head reads, for configs that name them wrongly: i is the
            input of decoder layer i, and the number of layers is the state before the final norm. If None, those
            of the config. `hf_speculate.tools.checks.layers.check_layers` measures whether they are right.
        context_len: tokens up to which rows are drafted for, >= 1; longer rows decode plainly. If None, the
            `max_position_embeddings` of the config, beyond which the acceptance rate falls.
        subfolder: of the folder or repository, with "/" between its parts; empty for none. Of a repository, the weights
            in the subfolder alone are downloaded.
        revision: branch, tag or commit of the head's repository; None for its main branch.
        merged_embeddings: whether an EAGLE-3 or MTP head reads what the target's encoder makes of pictures and sounds,
            or the embeddings of the tokens that stand for them. If None, MTP layers read the former, and EAGLE-3 heads,
            most of which were trained so, the latter.

    Returns:
        The head, whose `repr` says what was loaded.

    Raises:
        ConfigError: a file is missing or damaged, config and weights do not belong together, fields exclude each
            other, or `aux_layers`, `context_len` or `merged_embeddings` cannot be.
        UnsupportedModelError: the kind is not served, or the head does not fit the target.
    """
    target = unwrapped(target, "target")
    folder, shape = HeadFolder(head, subfolder, revision), shape_of(target.config)
    fit, options = _read(folder, shape, shape.name, aux_layers)
    spec, loader = fit.spec, _KINDS[fit.spec.kind]
    if fit.problems:
        raise UnsupportedModelError(
            f"a draft head must fit its target, got {spec.name} ({spec.kind}): {'; '.join(fit.problems)}; "
            "load the head that was trained for this target"
        )
    for note in fit.notes:
        warn_user(f"the draft head {spec.name}: {note}")
    if context_len is not None:
        _LENGTH("context_len", context_len)
        spec = replace(spec, max_position_embeddings=context_len)
    if merged_embeddings is not None:
        spec = replace(spec, merges_media=_merges_media(spec, merged_embeddings))
    dtype = dtype_of(target) if dtype is None else dtype
    device = device_of(target) if device is None else torch.device(device)
    network = loader.load(LoadRequest(folder, spec, options, target, dtype, device))
    loaded = DraftHead(spec, network, target.config, partial(loader.drafter, network))
    loaded.check_target(target)
    return loaded


def _merges_media(spec: HeadSpec, wanted: bool) -> bool:
    """Whether a head is to read the target's embeddings of pictures and sounds; an error if it cannot."""
    if wanted and (spec.kind not in _MERGING or spec.hidden_size != spec.target_hidden_size):
        raise ConfigError(
            f"merged_embeddings must be left out for a head of kind {spec.kind} of width {spec.hidden_size}, got True; "
            f"only heads of kind {' or '.join(_MERGING)} of the target's width, {spec.target_hidden_size}, read them"
        )
    return wanted


def check_head(
    head: str | Path,
    target: str | Path | PreTrainedConfig,
    *,
    subfolder: str = "",
    revision: str | None = None,
) -> HeadFit:
    """Whether a head fits a target, from configs alone: both by folder or id, or the target's config itself.

    `subfolder` and `revision` are the head's, as for `load_drafter`.

    Raises:
        ConfigError: the head has no config.json.
        UnsupportedModelError: the head is of a kind, or has an option, that is not served.
        OSError: the target has no config.
    """
    config = target if isinstance(target, PreTrainedConfig) else AutoConfig.from_pretrained(target)
    shape, name = shape_of(config), str(config.name_or_path or config.model_type)
    if not isinstance(target, PreTrainedConfig):
        shape, name = shape._replace(name=known_name(str(target))), str(target)
    fit = _read(HeadFolder(head, subfolder, revision), shape, name)[0]
    longest, of_target = fit.spec.max_position_embeddings, context_len_of(config)
    if longest is None or (of_target is not None and of_target <= longest):
        return fit
    bound = "has no bound" if of_target is None else f"is {of_target}"
    note = f"its context is {longest} tokens, and the target's {bound}: longer rows decode plainly"
    return fit._replace(notes=(*fit.notes, note))


def _read(
    folder: HeadFolder, shape: TargetShape, target: str, aux_layers: Sequence[int] | None = None
) -> tuple[HeadFit, Any]:
    """Whether a head fits a target of this shape and name, and the options of its network."""
    num_layers, layers = shape.num_layers, None if aux_layers is None else tuple(aux_layers)
    if layers == () or not all(is_int(layer) and 0 <= layer <= num_layers for layer in layers or ()):
        raise ConfigError(
            f"aux_layers must be ids in 0..{num_layers}, got {list(layers or ())}; an id is the layer whose input is "
            "read, and leave it out for those of the head's config"
        )
    with naming(f"{folder.source}/config.json", "the fields of a draft head"):
        recognised = recognise(folder.config, folder.names, shape.model_type)
        source = ConfigSource(folder.config, recognised, folder.name, shape, layers)
        spec, options = _KINDS[recognised.kind].read(source)
    problems, notes = spec.problems_with(shape), list(spec.notes)
    if not problems and spec.vocab_size != shape.vocab_size:
        notes.append(
            f"its vocabulary has {spec.vocab_size} tokens, and the target's {shape.vocab_size}; ids are taken to mean "
            "the same in both"
        )
    if spec.target_name and shape.name and spec.target_name.lower() != shape.name.lower():
        notes.append(
            f"it was trained for {spec.target_name}, and the target is {shape.name}; the acceptance rate may be low"
        )
    return HeadFit(spec, target, tuple(problems), tuple(notes)), options
