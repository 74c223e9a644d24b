"""What the loaders of all kinds of draft heads share: the config, the request, and a network with its weights."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.draft.heads.folder import HeadFolder, HeadKind
from hf_speculate.draft.heads.head import HeadSpec, TargetShape
from hf_speculate.draft.heads.layers import read_layer_config
from hf_speculate.draft.heads.network import SHARED_TABLES, HeadNetwork, NetworkPlan
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.models.context import context_len
from hf_speculate.models.language_model import vocab_size_of

# Names of the same weight in other trainers' files.
_RENAMED = (
    ("midlayer.", "layers.0."),
    ("mtp_layers.", "layers."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_IGNORED = ("verifier_lm_head.", "verifier_norm.")


class ConfigSource(NamedTuple):
    """The config of a draft head, and what it is read for."""

    config: dict[str, Any]  # content of `config.json`
    found: HeadKind
    name: str  # of the folder or repository
    shape: TargetShape
    hidden_layers: tuple[int, ...] | None = None  # given by the caller; None for those of the config

    @property
    def layer_fields(self) -> dict[str, Any]:
        """The part of the config that describes the layers."""
        return self.config.get("transformer_layer_config") or self.config

    def check_no_layers(self, head: str) -> None:
        """Refuse layers that the caller gave, for a head that reads none."""
        if self.hidden_layers is not None:
            raise ConfigError(f"aux_layers must be left out for {head}, got {list(self.hidden_layers)}; leave it out")

    def spec(self, fields: dict[str, Any], hidden_layers: tuple[int, ...], **others: Any) -> HeadSpec:
        """The spec of a head whose sizes are in `fields`; `others` are what only its kind has."""
        config, hidden_size = self.config, int(fields["hidden_size"])
        speculators: dict[str, Any] = config.get("speculators_config") or {}
        num_draft_tokens = (speculators.get("proposal_methods") or [{}])[0].get("speculative_tokens")
        target = str((speculators.get("verifier") or {}).get("name_or_path") or "")
        # Muse-Glimmer's assistant has no table, so its config says nothing of a vocabulary.
        vocab_size = int(fields.get("vocab_size") or self.shape.vocab_size)
        draft_vocab_size = config.get("draft_vocab_size") or config.get("truncated_vocab_size")
        if fields.get("max_position_embeddings") and "max_position_embeddings" not in others:
            others["max_position_embeddings"] = context_len(read_layer_config(fields))
        sizes: dict[str, Any] = {
            "kind": self.found.kind,
            "format": self.found.format,
            "name": self.name,
            "hidden_size": hidden_size,
            "target_hidden_size": int(config.get("target_hidden_size") or hidden_size),
            "vocab_size": vocab_size,
            "draft_vocab_size": int(draft_vocab_size or vocab_size),
            "default_draft_tokens": None if num_draft_tokens is None else int(num_draft_tokens),
            "target_name": target.rstrip("/").rpartition("/")[2],
        }
        return HeadSpec(hidden_layers=hidden_layers, **(sizes | others))


class LoadRequest(NamedTuple):
    """A head that is to be loaded."""

    folder: HeadFolder
    spec: HeadSpec
    options: Any  # of a network that `load_network` makes
    target: PreTrainedModel
    dtype: torch.dtype
    device: torch.device


def load_network(
    make: Callable[[NetworkPlan], HeadNetwork], request: LoadRequest, ignored: Collection[str] = ()
) -> HeadNetwork:
    """A network with the weights of a folder, but for those `ignored`."""
    spec, options, size = request.spec, request.options, vocab_size_of(request.target)
    renamed = ((_renamed(name), weight) for name, weight in request.folder.weights().items())
    weights = {name: weight for name, weight in renamed if name is not None and name not in ignored}
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    vocabulary = DraftVocabulary(size, None if d2t is None else _target_ids(d2t, t2d, size).to(request.device))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    _check_shapes(spec, options, shapes, vocabulary)
    with torch.device("meta"):
        network = make(NetworkPlan(options, shapes, spec.target_hidden_size, vocabulary, request.device))
    load_into(network, weights, request)
    return network


def _target_ids(d2t: Tensor, t2d: Tensor | None, size: int) -> Tensor:
    """[Vd] int64, `d2t` [Vd] added to a column's number; `t2d` [V] bool marks the ids that have a column."""
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


def _check_shapes(
    spec: HeadSpec, options: Any, shapes: Mapping[str, tuple[int, ...]], vocabulary: DraftVocabulary
) -> None:
    """Refuse a head whose config names other states than its weights join, or whose target cannot lend it a table."""
    num = shapes["fc.weight"][1] / spec.target_hidden_size if "fc.weight" in shapes else None
    if num is not None and num != options.num_states:
        raise ConfigError(
            f"{spec.name} must read as many target states as fc.weight joins, {num:g} of width "
            f"{spec.target_hidden_size}, got layers {list(spec.hidden_layers)}; pass aux_layers="
        )
    missing = [name for name in SHARED_TABLES if name not in shapes]
    if missing and spec.hidden_size != spec.target_hidden_size:
        raise UnsupportedModelError(
            f"{spec.name} of width {spec.hidden_size} must have {' and '.join(missing)} of its own, for the target's "
            f"are of width {spec.target_hidden_size}, got neither; save the head with them"
        )
    num_columns = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else vocabulary.size
    num_ids = vocabulary.size if vocabulary.target_ids is None else len(vocabulary.target_ids)
    if num_columns != num_ids:
        raise UnsupportedModelError(
            f"lm_head.weight of {spec.name} must have a row for each of the {num_ids} tokens that it proposes, got "
            f"{num_columns}; save the head with its lm_head and d2t"
        )


def _renamed(name: str) -> str | None:
    """The name of a stored weight in our networks; None for what no network needs."""
    name = name.removeprefix("model.")
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return None if name.startswith(_IGNORED) or name.endswith("rotary_emb.inv_freq") else name


def load_into(network: nn.Module, weights: Mapping[str, Tensor], request: LoadRequest) -> None:
    """Give a network on the meta device its weights; linear layers get a bias if there are weights for one."""
    modules = dict(network.named_modules())
    for name, weight in weights.items():
        owner = modules.get(name.removesuffix(".bias")) if name.endswith(".bias") else None
        if isinstance(owner, nn.Linear) and owner.bias is None:
            owner.bias = nn.Parameter(torch.empty(weight.shape, device="meta"))
    on_device = {name: weight.to(request.device, request.dtype) for name, weight in weights.items()}
    try:
        network.load_state_dict(on_device, assign=True)
    except RuntimeError as error:  # torch's words name missing and unknown weights, and those of another shape
        raise UnsupportedModelError(
            f"the weights of {request.folder.source} must be those of the network that its config describes, got "
            f"others; check that config.json belongs to these weights ({error})"
        ) from error
