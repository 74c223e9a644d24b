"""Puts the weights of a draft head into its network, and names what does not fit."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from hf_speculate.draft.heads.folder import HeadFolder
from hf_speculate.draft.heads.kinds import check_weight_names
from hf_speculate.errors import UnsupportedModelError

# Names of the same weight in other trainers' files.
_RENAMED = (
    ("midlayer.", "layers.0."),
    ("mtp_layers.", "layers."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_IGNORED = ("verifier_lm_head.", "verifier_norm.")
_SHOWN = 5  # names in an error message

_Network = TypeVar("_Network", bound=nn.Module)


def renamed(name: str) -> str | None:
    """The name of a stored weight in our networks; None for what no network needs."""
    name = name.removeprefix("model.")
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    if name.startswith(_IGNORED) or name.endswith("rotary_emb.inv_freq"):
        return None
    return name


def shapes_of(folder: HeadFolder) -> dict[str, tuple[int, ...]]:
    """The shapes of a head's weights under the names of our networks."""
    check_weight_names(folder.weight_shapes)
    pairs = ((renamed(name), shape) for name, shape in folder.weight_shapes.items())
    return {name: shape for name, shape in pairs if name is not None}


def weights_of(folder: HeadFolder) -> dict[str, Tensor]:
    """A head's weights on the CPU under the names of our networks."""
    pairs = ((renamed(name), weight) for name, weight in folder.weights.items())
    return {name: weight for name, weight in pairs if name is not None}


def load_into(
    network: _Network, weights: Mapping[str, Tensor], source: str, device: torch.device, dtype: torch.dtype
) -> _Network:
    """Give a network on the meta device its weights; linear layers get a bias if there are weights for one."""
    modules = dict(network.named_modules())
    for name, weight in weights.items():
        owner = modules.get(name.removesuffix(".bias")) if name.endswith(".bias") else None
        if isinstance(owner, nn.Linear) and owner.bias is None:
            owner.bias = nn.Parameter(torch.empty(weight.shape, device="meta"))
    wanted = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    given = {name: tuple(weight.shape) for name, weight in weights.items()}
    problems = [
        *(f"no {name}" for name in sorted(wanted.keys() - given.keys())),
        *(f"{name} that has no place" for name in sorted(given.keys() - wanted.keys())),
        *(
            f"{name} of shape {list(given[name])} for {list(wanted[name])}"
            for name in sorted(wanted.keys() & given.keys())
            if given[name] != wanted[name]
        ),
    ]
    if problems:
        more = "" if len(problems) <= _SHOWN else f" and {len(problems) - _SHOWN} more"
        raise UnsupportedModelError(
            f"the weights of {source} must be those of the network that its config describes, got "
            f"{', '.join(problems[:_SHOWN])}{more}; check that config.json belongs to these weights"
        )
    network.load_state_dict({name: weight.to(device, dtype) for name, weight in weights.items()}, assign=True)
    return network
