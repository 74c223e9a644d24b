"""Shared parts of all head loaders: config, request, and network weights."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import ConfigError, SpeculateError, UnsupportedModelError, shown
from hf_speculate.models.context import context_len
from hf_speculate.options.heads.folder import VOCABULARY_WEIGHTS, HeadFolder
from hf_speculate.options.heads.head import HeadSpec, TargetShape
from hf_speculate.options.heads.layers import read_layer_config
from hf_speculate.options.heads.network import SHARED_TABLES, HeadNetwork, NetworkPlan
from hf_speculate.options.heads.recognise import HeadKind, named_target
from hf_speculate.options.heads.target_ids import target_ids

# Names that other trainers use for the same weights.
_RENAMED = (
    ("midlayer.", "layers.0."),
    ("mtp_layers.", "layers."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("candidate_selector.predecessor_codebook.weight", "candidate_selector.predecessor_codebook"),
    ("candidate_selector.successor_codebook.weight", "candidate_selector.successor_codebook"),
)
_IGNORED = ("verifier_lm_head.", "verifier_norm.")


class ConfigSource(NamedTuple):
    """A draft head's config and its target's shape."""

    config: dict[str, Any]  # content of `config.json`
    recognised: HeadKind
    name: str  # name of the folder or repository
    shape: TargetShape
    hidden_layers: tuple[int, ...] | None = None  # from the caller; None to use the config's

    @property
    def layer_fields(self) -> dict[str, Any]:
        """The part of the config that describes the layers."""
        return self.config.get("transformer_layer_config") or self.config

    def check_no_layers(self, head: str) -> None:
        """Raise `ConfigError` if the caller passed layers for a head without target states."""
        if self.hidden_layers is not None:
            raise ConfigError(
                f"aux_layers must be left out for {head}, got {list(self.hidden_layers)}; leave it "
                "out"
            )

    def spec(
        self, fields: dict[str, Any], hidden_layers: tuple[int, ...], **others: Any
    ) -> HeadSpec:
        """Build a head's spec from the sizes in `fields`; `others` are specific to its kind."""
        config, hidden_size = self.config, int(fields["hidden_size"])
        speculators: dict[str, Any] = config.get("speculators_config") or {}
        num_draft_tokens = (speculators.get("proposal_methods") or [{}])[0].get(
            "speculative_tokens"
        )
        # Muse-Glimmer's assistant has no embedding table, so its config lacks vocab_size.
        vocab_size = int(fields.get("vocab_size") or self.shape.vocab_size)
        draft_vocab_size = config.get("draft_vocab_size") or config.get("truncated_vocab_size")
        if fields.get("max_position_embeddings") and "max_position_embeddings" not in others:
            others["max_position_embeddings"] = context_len(read_layer_config(fields))
        sizes: dict[str, Any] = {
            "kind": self.recognised.kind,
            "format": self.recognised.format,
            "name": self.name,
            "hidden_size": hidden_size,
            "target_hidden_size": int(config.get("target_hidden_size") or hidden_size),
            "vocab_size": vocab_size,
            "draft_vocab_size": int(draft_vocab_size or vocab_size),
            "default_draft_tokens": None if num_draft_tokens is None else int(num_draft_tokens),
            "target_name": named_target(config).rstrip("/").rpartition("/")[2],
        }
        return HeadSpec(hidden_layers=hidden_layers, **(sizes | others))


class LoadRequest(NamedTuple):
    """A request to load a head."""

    folder: HeadFolder
    spec: HeadSpec
    options: Any  # network options for `load_network`
    target: PreTrainedModel
    dtype: torch.dtype
    device: torch.device


def load_network(
    make: Callable[[NetworkPlan], HeadNetwork], request: LoadRequest, ignored: Collection[str] = ()
) -> HeadNetwork:
    """Load a network with the weights in a folder, except for those in `ignored`."""
    spec, options, file = request.spec, request.options, request.folder.weights_file
    renamed = ((own_name(name), weight) for name, weight in request.folder.weights().items())
    weights = {name: weight for name, weight in renamed if name is not None and name not in ignored}
    d2t, t2d = (weights.pop(name, None) for name in VOCABULARY_WEIGHTS)
    ids = None if d2t is None else target_ids(d2t, t2d, spec.vocab_size, file).to(request.device)
    vocabulary = DraftVocabulary(spec.vocab_size, ids)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    with naming(file, "the weights of the network that config.json describes"):
        _check_shapes(request, shapes, vocabulary, file)
        with torch.device("meta"):
            network = make(
                NetworkPlan(options, shapes, spec.target_hidden_size, vocabulary, request.device)
            )
    load_into(network, weights, request)
    return network


def _check_shapes(
    request: LoadRequest,
    shapes: Mapping[str, tuple[int, ...]],
    vocabulary: DraftVocabulary,
    file: Path,
) -> None:
    """Check that the states, tables and mask token in a config fit the shapes of the weights.

    Raises:
        ConfigError: the weights do not match the config.
        UnsupportedModelError: a table is missing, and the target's table does not fit.
    """
    spec, options = request.spec, request.options
    num_states = shapes["fc.weight"][1] / spec.target_hidden_size if "fc.weight" in shapes else None
    if num_states is not None and num_states != options.num_states:
        raise ConfigError(
            f"{spec.name} must read as many target states as fc.weight joins, {num_states:g} of "
            "width "
            f"{spec.target_hidden_size}, got layers {list(spec.hidden_layers)} for the weights of "
            f"{file}; pass "
            "aux_layers="
        )
    table, head = SHARED_TABLES
    missing = [name for name in SHARED_TABLES if name not in shapes]
    if missing and spec.hidden_size != spec.target_hidden_size:
        raise UnsupportedModelError(
            f"{file} must hold {' and '.join(missing)} of {spec.name}, for its width is "
            f"{spec.hidden_size} and the "
            f"target's {spec.target_hidden_size}, got neither; save the head with them"
        )
    num_ids = spec.vocab_size if vocabulary.target_ids is None else len(vocabulary.target_ids)
    num_columns = shapes[head][0] if head in shapes else spec.vocab_size
    if num_columns != num_ids:
        raise UnsupportedModelError(
            f"lm_head.weight in {file} must have a row for each of the {num_ids} tokens that "
            f"{spec.name} proposes, got "
            f"{num_columns}; save the head with its lm_head and d2t"
        )
    if table in shapes and shapes[table][0] < spec.vocab_size:
        raise ConfigError(
            f"embed_tokens.weight in {file} must have a row for each of {spec.vocab_size} tokens, "
            "got "
            f"{shapes[table][0]}; check that config.json belongs to these weights"
        )
    mask_id, num_rows = (
        getattr(options, "mask_token_id", None),
        shapes[table][0] if table in shapes else None,
    )
    if mask_id is not None and (mask_id < 0 or (num_rows is not None and mask_id >= num_rows)):
        raise ConfigError(
            f"mask_token_id of {spec.name} must be an id with an embedding, got {mask_id}; check "
            "that config.json "
            f"belongs to the weights of {file}"
        )


def own_name(name: str) -> str | None:
    """Return the name that our networks use for a stored weight; None for unused weights."""
    name = name.removeprefix("model.")
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return None if name.startswith(_IGNORED) or name.endswith("rotary_emb.inv_freq") else name


def load_into(network: nn.Module, weights: Mapping[str, Tensor], request: LoadRequest) -> None:
    """Load weights into a network on the meta device.

    Linear layers get a bias if the weights contain one.
    """
    modules = dict(network.named_modules())
    for name, weight in weights.items():
        owner = modules.get(name.removesuffix(".bias")) if name.endswith(".bias") else None
        if isinstance(owner, nn.Linear) and owner.bias is None:
            owner.bias = nn.Parameter(torch.empty(weight.shape, device="meta"))
    check_weights(network.state_dict(), weights, request.folder.weights_file)
    on_device = {name: weight.to(request.device, request.dtype) for name, weight in weights.items()}
    network.load_state_dict(on_device, assign=True)


def check_weights(
    expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], file: Path
) -> None:
    """Raise `ConfigError` if weights are missing, left over, or have the wrong shape."""
    shapes = {
        name: (list(expected[name].shape), list(weights[name].shape))
        for name in expected
        if name in weights
    }
    faults = {
        "none of": sorted(expected.keys() - weights.keys()),
        "left over": sorted(weights.keys() - expected.keys()),
        "of another shape": [
            f"{name} {got} for {want}" for name, (want, got) in shapes.items() if want != got
        ],
    }
    if any(faults.values()):
        got = "; ".join(f"{text} {shown(names)}" for text, names in faults.items() if names)
        raise ConfigError(
            f"{file} must hold the weights of the network that config.json describes, got {got}; "
            "check that both "
            "belong together, and download or save them again"
        )


@contextmanager
def naming(file: str | Path, content: str) -> Iterator[None]:
    """Re-raise errors from damaged content as a `ConfigError` with the file's name."""
    try:
        yield
    except (SpeculateError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged content may raise any type
        raise ConfigError(
            f"{file} must hold {content}, got a fault in it ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); "
            "download or save it again"
        ) from error
