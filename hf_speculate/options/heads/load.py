"""Load a draft head of any supported kind, or check from configs whether it fits."""

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

_MERGING = ("eagle3", "mtp")  # kinds that can read the target's image embeddings
_LENGTH = integer(
    "an int of at least 1", 1, math.inf, "leave it out for the length that the head was trained for"
)


class HeadFit(NamedTuple):
    """The fit of a head to a target."""

    spec: HeadSpec
    target: str  # name or path
    problems: tuple[str, ...]  # obstacles; empty if it fits
    notes: tuple[str, ...]  # warnings about the acceptance rate

    @property
    def ok(self) -> bool:
        """Whether `generate()` accepts the head for this target."""
        return not self.problems

    @property
    def level(self) -> str:
        """The worst finding: "ok", "warning" or "does not fit"."""
        return "does not fit" if self.problems else "warning" if self.notes else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
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
    read: Callable[[ConfigSource], tuple[HeadSpec, Any]]  # spec and network options
    load: Callable[[LoadRequest], HeadNetwork]
    drafter: Callable[[Any, HeadSpec, DrafterSetup], Drafter]  # makes the drafter for the network


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

    Supported kinds are EAGLE-3 and 3.1 (original and speculators format), P-EAGLE, DFlash and
    DFlash 2 (z-lab and speculators), DSpark, PARD, and MTP layers. For MTP layers, `head` is the
    folder of the target itself or of a speculators "mtp" head.

    Args:
        head: a folder with `config.json` and weights (safetensors, sharded or not, or
            `pytorch_model.bin`), or the id of a Hub repository.
        target: the head's target, with up to 1,024 ids more or fewer than in training; it is not
            modified.
        dtype: dtype of the head's weights. If None, the target's dtype.
        device: device of the head's weights. If None, the target's device.
        aux_layers: ids of the target's hidden states to read, for heads whose config has wrong ids.
            Id i is the input of decoder layer i, and the number of layers is the state before the
            final norm. If None, the ids from the config.
            `hf_speculate.tools.checks.layers.check_layers` measures whether they are right.
        context_len: longest row to draft for, in tokens, >= 1; longer rows use plain decoding. If
            None, the `max_position_embeddings` of the config, beyond which the acceptance rate
            drops.
        subfolder: subfolder of the folder or repository, with "/" between its parts; empty for
            none. Only the subfolder's weights are downloaded from a repository.
        revision: branch, tag or commit of the head's repository. If None, its main branch.
        merged_embeddings: for EAGLE-3 and MTP heads, True to read the output of the target's
            encoder for images and audio, False to read the embeddings of their placeholder tokens.
            If None, True for MTP layers and False for EAGLE-3 heads, since most were trained that
            way.

    Returns:
        The head; its `repr` lists kind, layers, tokens and parameters.

    Raises:
        ConfigError: a file is missing or damaged, the weights do not match the config, fields
            exclude each other, or `aux_layers`, `context_len` or `merged_embeddings` is out of
            range or does not fit the head.
        UnsupportedModelError: the kind is not supported, or the head does not fit the target.
    """
    target = unwrapped(target, "target")
    folder, shape = HeadFolder(head, subfolder, revision), shape_of(target.config)
    fit, options = _read(folder, shape, shape.name, aux_layers)
    spec, loader = fit.spec, _KINDS[fit.spec.kind]
    if fit.problems:
        raise UnsupportedModelError(
            f"a draft head must fit its target, got {spec.name} ({spec.kind}): "
            f"{'; '.join(fit.problems)}; "
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
    """Return `wanted`; raise `ConfigError` if the head cannot read the target's embeddings."""
    if wanted and (spec.kind not in _MERGING or spec.hidden_size != spec.target_hidden_size):
        raise ConfigError(
            f"merged_embeddings must be left out for a head of kind {spec.kind} of width "
            f"{spec.hidden_size}, got True; "
            f"only heads of kind {' or '.join(_MERGING)} of the target's width, "
            f"{spec.target_hidden_size}, read them"
        )
    return wanted


def check_head(
    head: str | Path,
    target: str | Path | PreTrainedConfig,
    *,
    subfolder: str = "",
    revision: str | None = None,
) -> HeadFit:
    """Check whether a head fits a target, from their configs alone.

    Pass the folder or id of each; for the target, a config works as well. `subfolder` and
    `revision` belong to the head, as in `load_drafter`.

    Raises:
        ConfigError: the head has no config.json.
        UnsupportedModelError: the head's kind or one of its options is not supported.
        OSError: the target has no config.
    """
    config = target if isinstance(target, PreTrainedConfig) else AutoConfig.from_pretrained(target)
    shape, name = shape_of(config), str(config.name_or_path or config.model_type)
    if not isinstance(target, PreTrainedConfig):
        shape, name = shape._replace(name=known_name(str(target))), str(target)
    fit = _read(HeadFolder(head, subfolder, revision), shape, name)[0]
    head_len, target_len = fit.spec.max_position_embeddings, context_len_of(config)
    if head_len is None or (target_len is not None and target_len <= head_len):
        return fit
    bound = "has no bound" if target_len is None else f"is {target_len}"
    note = f"its context is {head_len} tokens, and the target's {bound}: longer rows decode plainly"
    return fit._replace(notes=(*fit.notes, note))


def _read(
    folder: HeadFolder, shape: TargetShape, target: str, aux_layers: Sequence[int] | None = None
) -> tuple[HeadFit, Any]:
    """Read a head's config; return its fit to a target of this shape, and the network options."""
    num_layers, layers = shape.num_layers, None if aux_layers is None else tuple(aux_layers)
    if layers == () or not all(
        is_int(layer) and 0 <= layer <= num_layers for layer in layers or ()
    ):
        raise ConfigError(
            f"aux_layers must be ids in 0..{num_layers}, got {list(layers or ())}; an id is the "
            "layer whose input is "
            "read, and leave it out for those of the head's config"
        )
    with naming(f"{folder.source}/config.json", "the fields of a draft head"):
        recognised = recognise(folder.config, folder.names, shape.model_type)
        source = ConfigSource(folder.config, recognised, folder.name, shape, layers)
        spec, options = _KINDS[recognised.kind].read(source)
    problems, notes = spec.problems_with(shape), list(spec.notes)
    if not problems and spec.vocab_size != shape.vocab_size:
        notes.append(
            f"its vocabulary has {spec.vocab_size} tokens, and the target's {shape.vocab_size}; "
            "ids are taken to mean "
            "the same in both"
        )
    if spec.target_name and shape.name and spec.target_name.lower() != shape.name.lower():
        notes.append(
            f"it was trained for {spec.target_name}, and the target is {shape.name}; the "
            "acceptance rate may be low"
        )
    return HeadFit(spec, target, tuple(problems), tuple(notes)), options
