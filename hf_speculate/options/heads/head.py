"""A loaded draft head, returned by `load_drafter` and passed as `assistant_model`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_speculate.draft.base import Drafter, DrafterSetup
from hf_speculate.draft.vocab_mapping import MAX_PADDING
from hf_speculate.errors import UnsupportedModelError, warn_user
from hf_speculate.models.module_walk import weight_bytes
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.options.heads.layer_capture import FINAL_STATE
from hf_speculate.options.heads.network import SHARED_TABLES, HeadNetwork

_AT_ONCE = ("peagle", "dflash", "dflash2", "dspark", "pard")  # kinds with one step per round
_TABLE, _HEAD = SHARED_TABLES
_CHECK = "hf_speculate.tools.checks.layers"  # a lazy import, since it imports this module
_LOOKED_UP = (_TABLE, "predecessor_codebook", "successor_codebook")


class TargetShape(NamedTuple):
    """Sizes and names of a head's target."""

    hidden_size: int  # Ht
    num_layers: int  # L
    vocab_size: int  # V
    model_type: str
    name: str  # last part of `name_or_path`; empty if it is a local folder


def shape_of(config: PreTrainedConfig) -> TargetShape:
    """Return the shape of a target, from only its config."""
    text = config.get_text_config(decoder=True)
    name = known_name(str(config.name_or_path or ""))
    return TargetShape(
        text.hidden_size, text.num_hidden_layers, text.vocab_size, config.model_type, name
    )


def known_name(source: str) -> str:
    """Return the last part of a repository's id; empty for a local folder.

    A local folder may have any name.
    """
    return "" if Path(source).is_dir() else source.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class HeadSpec:
    """Kind, sizes and requirements of a draft head, read from its config."""

    kind: str  # "eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp" or "pard"
    format: str  # "original", "speculators", "z-lab" or "transformers"
    name: str  # name of the folder or repository
    hidden_layers: tuple[int, ...]  # ids of the target states it reads, see `Drafter.hidden_layers`
    hidden_size: int  # H, the head's own width
    target_hidden_size: int  # Ht, the target's width
    vocab_size: int  # V, size of the vocabulary in training
    draft_vocab_size: int  # Vd, number of ids in its proposals
    max_draft_tokens: int | None = None  # largest number per round; None if unbounded
    default_draft_tokens: int | None = None  # K recommended by its config; None if absent
    # context length in training; longer rows use plain decoding
    max_position_embeddings: int | None = None
    target_name: str = ""  # last part of its target's name; empty if its config names no target
    # L of the target in training; None if absent from its config
    num_target_layers: int | None = None
    notes: tuple[str, ...] = ()  # doubts about the config, one sentence each
    merges_media: bool = False  # whether it reads the target's image and audio embeddings

    def problems_with(self, target: TargetShape) -> list[str]:
        """Return why the head cannot draft for this target, in sentences; empty if it fits."""
        problems = []
        if self.hidden_layers and self.target_hidden_size != target.hidden_size:
            problems.append(
                f"it reads states of width {self.target_hidden_size}, and the target's are "
                f"{target.hidden_size}"
            )
        outside = [
            layer for layer in self.hidden_layers if not FINAL_STATE <= layer <= target.num_layers
        ]
        if outside:
            problems.append(
                f"it reads the states of layers {outside}, and the target has layers 0 to "
                f"{target.num_layers}"
            )
        if self.num_target_layers not in (None, target.num_layers):
            problems.append(
                f"it is for {self.num_target_layers} layers, and the target has {target.num_layers}"
            )
        if abs(self.vocab_size - target.vocab_size) > MAX_PADDING:
            problems.append(
                f"its vocabulary has {self.vocab_size} tokens, and the target's "
                f"{target.vocab_size}, more than "
                f"{MAX_PADDING:,} apart"
            )
        return problems


HeadDrafterFactory = Callable[[HeadSpec, DrafterSetup], Drafter]


class DraftHead:
    """A draft head for one kind of target.

    Pass it to `generate()` as `assistant_model`, with its target or another model of the same
    shape. The head holds its own weights. Embeddings, a language modelling head and other shared
    parts are taken from the target in each call. The target may have gained or lost up to 1,024 ids
    at the end of its vocabulary.

    Attributes:
        hidden_layers: ids of the target states read by the head, see `Drafter.hidden_layers`.
        default_draft_tokens: K recommended by its config; None if absent.
        num_parameters: number of the head's own parameters.
    """

    draft_source = "a draft head"  # name of its kind of draft source

    def __init__(
        self,
        spec: HeadSpec,
        network: HeadNetwork,
        config: PreTrainedConfig,
        factory: HeadDrafterFactory,
    ):
        self.spec, self.shape = spec, shape_of(config)
        self.config = config  # the target's config; transformers' pipelines compare it
        self.network = network.eval().requires_grad_(False)
        self.description = f"{spec.kind} head {spec.name}"
        self.hidden_layers, self.default_draft_tokens = (
            spec.hidden_layers,
            spec.default_draft_tokens,
        )
        self.num_parameters = sum(weight.numel() for weight in self.network.parameters())
        self._factory = factory
        self._units = CompiledUnits()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of its weights."""
        return next(self.network.parameters()).device

    @property
    def drafts_at_once(self) -> bool:
        """Whether one step drafts all tokens of a round."""
        return self.spec.kind in _AT_ONCE

    def num_step_bytes(self, target: PreTrainedModel) -> int:
        """Return the size in bytes of the weights read by one step.

        A language modelling head shared with the target is included. Embedding tables and codebooks
        are excluded, since a step reads only a few of their rows per token.
        """
        named = list(self.network.named_parameters(remove_duplicate=False))
        heads = {id(weight) for name, weight in named if name.endswith(_HEAD)}
        weights = {
            id(weight): weight
            for name, weight in named
            if id(weight) in heads or not name.endswith(_LOOKED_UP)
        }
        shared = None if heads else target.get_output_embeddings()
        # Some libraries keep quantised weights in buffers.
        read = [
            *weights.values(),
            *(() if shared is None else (*shared.parameters(), *shared.buffers())),
        ]
        return sum(map(weight_bytes, read))

    def __call__(self, setup: DrafterSetup) -> Drafter:
        """Make the drafter of one call."""
        self.check_target(setup.target)
        if setup.compilation is not None:
            setup = replace(setup, compilation=setup.compilation._replace(units=self._units))
        return self._factory(self.spec, setup)

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise `UnsupportedModelError` if the head cannot draft for a target."""
        shape, min_vocab_size = shape_of(target.config), self.network.least_vocab_size
        problems = self.spec.problems_with(shape)
        if self.hidden_layers and shape.num_layers != self.shape.num_layers:
            problems.append(
                f"it was loaded for {self.shape.num_layers} layers, and the target has "
                f"{shape.num_layers}"
            )
        if shape.vocab_size < min_vocab_size:
            problems.append(
                f"it looks up token {min_vocab_size - 1}, and the target has {shape.vocab_size}"
            )
        if problems:
            raise UnsupportedModelError(
                f"a draft head must fit its target {type(target).__name__}, got {self.spec.name} "
                f"({self.spec.kind}): "
                f"{'; '.join(problems)}; load the head that was trained for this target with "
                "load_drafter"
            )

    def check_layers(
        self, target: PreTrainedModel, prompts: Tensor | Mapping[str, Tensor], num_tokens: int = 200
    ) -> Any:
        """Call `hf_speculate.tools.checks.layers.check_layers`; deprecated."""
        warn_user(
            f"DraftHead.check_layers is deprecated; call check_layers(head, ...) of {_CHECK}",
            DeprecationWarning,
        )
        return importlib.import_module(_CHECK).check_layers(self, target, prompts, num_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DraftHead":
        """Return the object itself, since `generate` copies a `GenerationConfig` in every call."""
        return self

    def with_layers(self, hidden_layers: tuple[int, ...]) -> "DraftHead":
        """Return a head with the same network over the same number of other target states."""
        spec = replace(self.spec, hidden_layers=hidden_layers)
        return DraftHead(spec, self.network, self.config, self._factory)

    def __repr__(self) -> str:
        spec, last = self.spec, self.shape.num_layers
        words = {FINAL_STATE: "after the final norm", last: f"{last} (before the final norm)"}
        reads = (
            ", ".join(words.get(layer, str(layer)) for layer in spec.hidden_layers)
            or "no hidden states"
        )
        share = "" if spec.draft_vocab_size == spec.vocab_size else f" of {spec.vocab_size:,}"
        limit = "" if spec.max_draft_tokens is None else f", at most {spec.max_draft_tokens}"
        return (
            f"DraftHead({spec.name}: {spec.kind}, {spec.format} format; reads layers {reads}; "
            "proposes "
            f"{spec.draft_vocab_size:,}{share} tokens; {self.num_parameters:,} parameters in "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}; "
            f"default K {spec.default_draft_tokens or 'as the schedule says'}{limit})"
        )
