"""A loaded draft head: what `load_drafter` returns and `generate(assistant_model=head)` takes."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.heads.network import SHARED_TABLES
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.models.compilation import CompiledUnits
from hf_speculate.models.language_model import device_of
from hf_speculate.models.layer_capture import FINAL_STATE, LayerCapture
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import Kept, Stream

# Below this acceptance rate of first tokens a head probably reads wrong layers; published heads reach 0.4.
_LEAST_ACCEPTANCE_RATE = 0.2
_MIN_DRAFTS = 200
_SHIFTS = (0, 1, -1)  # of the ids of layers that `check_layers` compares
_FEWEST_READ = 8  # tokens before the first that it predicts, if the prompts are that long
_AT_ONCE = ("peagle", "dflash", "dspark", "pard")  # kinds that draft all tokens of a round in one step
_MARGIN = 0.05  # by which another shift must be better, about two standard deviations of 200 tokens
_TABLE, _HEAD = SHARED_TABLES


class TargetShape(NamedTuple):
    """The numbers of a target that a head must fit."""

    hidden_size: int  # Ht
    num_layers: int  # L
    vocab_size: int  # V
    model_type: str
    name: str  # last part of `name_or_path`; empty if it is a local folder

    def __str__(self) -> str:
        return f"hidden size {self.hidden_size}, {self.num_layers} layers and {self.vocab_size} tokens"


def shape_of(config: PreTrainedConfig) -> TargetShape:
    """The shape of a target, from its config alone."""
    text = config.get_text_config(decoder=True)
    name = known_name(str(config.name_or_path or ""))
    return TargetShape(text.hidden_size, text.num_hidden_layers, text.vocab_size, config.model_type, name)


def known_name(source: str) -> str:
    """The last part of a repository's id; empty for a local folder, which may have any name."""
    return "" if Path(source).is_dir() else source.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class HeadSpec:
    """Kind, sizes and requirements of a draft head, as its config gives them."""

    kind: str  # "eagle3", "peagle", "dflash", "dspark", "mtp" or "pard"
    format: str  # "original", "speculators", "z-lab" or "transformers"
    name: str  # of the folder or repository
    hidden_layers: tuple[int, ...]  # ids of the target's states that it reads, see `Drafter.hidden_layers`
    hidden_size: int  # H, the head's own width
    target_hidden_size: int  # Ht, the width of the states that it reads
    vocab_size: int  # V, the vocabulary that it was made for
    draft_vocab_size: int  # Vd, how many of these ids it can propose
    max_draft_tokens: int | None = None  # the most that it proposes in a round; None if there is no bound
    default_draft_tokens: int | None = None  # K that its config recommends; None if it names none
    max_position_embeddings: int | None = None  # length that it was trained for
    target_name: str = ""  # last part of the name of the target that it was trained for; empty if its config has none
    num_target_layers: int | None = None  # L of that target; None if its config does not say
    is_vocab_padded: bool = False  # whether a target with a longer or shorter table of the same ids will do
    notes: tuple[str, ...] = ()  # doubts about the config, each a sentence


class LayerCheck(NamedTuple):
    """How often a head's first token was the target's own choice, by what it read."""

    layers: tuple[int, ...]  # that it reads
    accuracies: dict[int, float]  # by shift of all ids: 0, and +1 and -1 where there are such layers
    num_tokens: int  # that were predicted with each

    @property
    def best_layers(self) -> tuple[int, ...]:
        """The ids with the highest accuracy, pass them as `aux_layers`."""
        best = max(self.accuracies, key=lambda shift: self.accuracies[shift])
        return tuple(layer + best for layer in self.layers)


HeadDrafterFactory = Callable[[HeadSpec, DrafterSetup], Drafter]


class DraftHead:
    """A draft head for one kind of target; pass it as `assistant_model`, to this target or a copy of it.

    The head holds its own weights. Embeddings and a language modelling head that it shares are taken from the target of
    each call.

    Attributes:
        hidden_layers: ids of the target's states that it reads, see `Drafter.hidden_layers`.
        default_draft_tokens: K that its config recommends; None if it names none.
        num_parameters: numbers in its own weights.
    """

    def __init__(self, spec: HeadSpec, network: nn.Module, config: PreTrainedConfig, factory: HeadDrafterFactory):
        self.spec, self.config, self.shape = spec, config, shape_of(config)
        self.network = network.eval().requires_grad_(False)
        self.description = f"{spec.kind} head {spec.name}"
        self.hidden_layers, self.default_draft_tokens = spec.hidden_layers, spec.default_draft_tokens
        self.num_parameters = sum(weight.numel() for weight in self.network.parameters())
        self._factory = factory
        self._units = CompiledUnits()

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of its weights."""
        return next(self.network.parameters()).device

    @property
    def drafts_at_once(self) -> bool:
        """Whether one step drafts all tokens of a round."""
        return self.spec.kind in _AT_ONCE

    def num_step_bytes(self, target: PreTrainedModel) -> int:
        """Bytes of the weights that a step reads, those of the target's language modelling head among them if shared.

        Tables of embeddings are not counted: a step reads one row of them for each token.
        """
        named = list(self.network.named_parameters(remove_duplicate=False))
        heads = {id(weight) for name, weight in named if name.endswith(_HEAD)}
        weights = {id(weight): weight for name, weight in named if id(weight) in heads or not name.endswith(_TABLE)}
        shared = None if heads else target.get_output_embeddings()
        read = [*weights.values(), *(() if shared is None else shared.parameters())]
        return sum(weight.numel() * weight.element_size() for weight in read)

    def __call__(self, setup: DrafterSetup) -> Drafter:
        """The drafter of one call."""
        wanted, found = str(self.shape), str(shape_of(setup.target.config))
        if found != wanted:
            raise UnsupportedModelError(
                f"the target of {self.spec.name} must have {wanted}, got {found} in {type(setup.target).__name__}; "
                "load the head for this target with load_drafter"
            )
        longest = self.spec.max_position_embeddings
        if longest is not None and setup.max_length > longest:
            warnings.warn(
                f"{self.spec.name} was trained on texts of up to {longest} tokens, and this call may reach "
                f"{setup.max_length}; the acceptance rate may be lower beyond that",
                stacklevel=2,
            )
        if setup.compilation is not None:
            setup = replace(setup, compilation=setup.compilation._replace(units=self._units))
        return self._factory(self.spec, setup)

    @torch.no_grad()
    def check_layers(
        self, target: PreTrainedModel, prompts: Tensor | Mapping[str, Tensor], num_tokens: int = 200
    ) -> LayerCheck:
        """Measure whether the head reads the layers that it was trained on: an id that is off by one is silent.

        The head predicts each next token of the prompts from the target's states, with its ids as they are and shifted
        by one, and each prediction is compared with the target's own choice.

        Args:
            target: that it was loaded for.
            prompts: [B, T] int64, or what a tokenizer returns: `input_ids`, and `attention_mask` for padding.
            num_tokens: that are predicted, at most.

        Returns:
            The accuracies by shift; a warning is given if a shift is clearly better.

        Raises:
            ConfigError: the head reads no layers, or the prompts hold fewer than three tokens.
        """
        if not self.hidden_layers or FINAL_STATE in self.hidden_layers:
            raise ConfigError(
                "check_layers needs a head that reads the states of layers, got one that reads "
                f"{self.hidden_layers or 'none'}; there is nothing to shift"
            )
        shifted = {shift: tuple(layer + shift for layer in self.hidden_layers) for shift in _SHIFTS}
        shifted = {shift: ids for shift, ids in shifted.items() if min(ids) >= 0 and max(ids) <= self.shape.num_layers}
        batch = {"input_ids": prompts} if isinstance(prompts, Tensor) else prompts
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        texts = [row[mask.bool()].to(device_of(target)) for row, mask in zip(batch["input_ids"], masks, strict=True)]
        longest = _FEWEST_READ + -(-num_tokens // max(len(texts), 1))
        texts = [text[:longest] for text in texts if len(text) > 2]
        if not texts:
            raise ConfigError("prompts must hold a text of at least three tokens, got none; pass some lines of text")
        hits: dict[int, list[bool]] = {shift: [] for shift in shifted}
        with LayerCapture(target, sorted({layer for ids in shifted.values() for layer in ids})) as capture:
            for text in texts:
                choices = target(text[None], use_cache=False).logits[0].argmax(-1)  # [T]
                for shift, ids in shifted.items():
                    states = torch.cat([capture.state(layer).to(target.device) for layer in ids], dim=-1)
                    hits[shift] += _hits(self.with_layers(ids), target, text, states, choices)
        accuracies = {shift: sum(found) / len(found) for shift, found in hits.items()}
        check = LayerCheck(self.hidden_layers, accuracies, len(hits[0]))
        if accuracies[0] + _MARGIN < max(accuracies.values()):
            warnings.warn(
                f"the head predicts {max(accuracies.values()):.0%} of {len(hits[0])} tokens from layers "
                f"{check.best_layers}, and {accuracies[0]:.0%} from {self.hidden_layers}; load it with "
                f"aux_layers={list(check.best_layers)}",
                stacklevel=3,
            )
        return check

    def with_layers(self, hidden_layers: tuple[int, ...]) -> "DraftHead":
        """The same network reading as many other states of the target."""
        spec = replace(self.spec, hidden_layers=hidden_layers)
        return DraftHead(spec, self.network, self.config, self._factory)

    def __repr__(self) -> str:
        spec, last = self.spec, self.shape.num_layers
        words = {FINAL_STATE: "after the final norm", last: f"{last} (before the final norm)"}
        reads = ", ".join(words.get(layer, str(layer)) for layer in spec.hidden_layers) or "no hidden states"
        share = "" if spec.draft_vocab_size == spec.vocab_size else f" of {spec.vocab_size:,}"
        most = "" if spec.max_draft_tokens is None else f", at most {spec.max_draft_tokens}"
        return (
            f"DraftHead({spec.name}: {spec.kind}, {spec.format} format; reads layers {reads}; proposes "
            f"{spec.draft_vocab_size:,}{share} tokens; {self.num_parameters:,} parameters in "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}; "
            f"default K {spec.default_draft_tokens or 'as the schedule says'}{most})"
        )


def warn_of_low_first_acceptance(spec: HeadSpec, stats: SpeculationStats) -> None:
    """Warn if few of the first drafted tokens of a call were accepted, and the head reads layers that may be wrong."""
    if not spec.hidden_layers or FINAL_STATE in spec.hidden_layers or not stats.drafted_per_position:
        return
    num_drafted = stats.drafted_per_position[0]
    if num_drafted < _MIN_DRAFTS or stats.accepted_per_position[0] >= _LEAST_ACCEPTANCE_RATE * num_drafted:
        return
    warnings.warn(
        f"fewer than {_LEAST_ACCEPTANCE_RATE:.0%} of the first tokens that {spec.name} drafted were accepted; it may "
        "read other layers than it was trained on: measure it with head.check_layers(target, prompts)",
        stacklevel=4,
    )


def _hits(head: DraftHead, target: PreTrainedModel, text: Tensor, states: Tensor, choices: Tensor) -> list[bool]:
    """Whether the first drafted token was the target's choice, token by token of a text."""
    setup = DrafterSetup(
        target=target,
        batch_size=1,
        num_pads=(0,),
        max_length=len(text) + 1,
        max_draft_tokens=1,
        vocab_size=head.shape.vocab_size,
        eos_token_ids=frozenset(),
        device=target.device,
        processors=BlockLogitsProcessorList(),
        stream=Stream.DRAFT,
    )
    drafter, ids, hits, told = head(setup), text[None], [], 1
    states = drafter.project_states(states)
    for num_read in range(min(_FEWEST_READ, len(text) // 2) + 1, len(text) + 1):
        count = torch.tensor([num_read - told], dtype=torch.int32, device="cpu")
        kept = Kept(ids[:, told:num_read], count, states[:, told - 1 : num_read - 1])
        draft = drafter.draft(DraftRequest(ids[:, :num_read], None, 1, kept=kept))
        hits.append(bool(draft.token_ids[0, 0] == choices[num_read - 1]))
        told = num_read
    return hits
