"""Loads MTP layers: from the target's own checkpoint through transformers, and speculators "mtp" heads."""

import copy
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_speculate.compat import attention_name, set_attention_name
from hf_speculate.draft.heads.chain import ChainDrafter
from hf_speculate.draft.heads.head import DraftHead
from hf_speculate.draft.heads.layers import Rotary
from hf_speculate.draft.heads.load_prefixed_mtp import MASKED_ATTENTIONS, load_prefixed_mtp
from hf_speculate.draft.heads.load_request import LoadRequest
from hf_speculate.draft.heads.mtp import CheckpointMtpNetwork, SpeculatorsMtpNetwork
from hf_speculate.draft.heads.mtp_config import PREFIXED_TARGETS, describe_mtp, read_mtp
from hf_speculate.draft.heads.weights import load_into, shapes_of, weights_of
from hf_speculate.errors import ConfigError, UnsupportedModelError

_SHARED_TABLES = ("embed_tokens.weight", "lm_head.weight")


def load_mtp(request: LoadRequest) -> DraftHead:
    """MTP layers in either format.

    Args:
        request: what is to be loaded.

    Raises:
        ConfigError: another dtype or device than the target's is asked for.
        UnsupportedModelError: the checkpoint has no MTP layers, or weights do not fit.
    """
    if request.source.found.format == "speculators":
        return _load_speculators(request)
    target = request.target
    if request.dtype != target.dtype or request.device != target.device:
        raise ConfigError(
            f"dtype and device must be the target's for MTP layers of its checkpoint, {target.dtype} and "
            f"{target.device}, got {request.dtype} and {request.device}; leave both out"
        )
    spec = describe_mtp(request.source)
    is_prefixed = request.folder.config.get("model_type") in PREFIXED_TARGETS
    model = load_prefixed_mtp(request) if is_prefixed else _of_transformers(request)
    network = CheckpointMtpNetwork(model, request.source.shape.vocab_size)
    return DraftHead(spec, network, request.target.config, partial(ChainDrafter, network))


def _of_transformers(request: LoadRequest) -> MtpModel:
    """The layers as transformers loads them."""
    target = request.target
    try:
        model: MtpModel = MtpModel.from_pretrained(
            _renamed(target, request.folder.source), device_map={"": request.device}
        )
    except (OSError, RuntimeError, ValueError) as error:  # transformers' words for weights that are not there
        raise UnsupportedModelError(
            f"{request.folder.source} must hold the weights of the target's MTP layers, got none that load; use "
            f"another head ({error})"
        ) from error
    if attention_name(model.config) not in MASKED_ATTENTIONS:
        set_attention_name(model.config, "sdpa")  # its own copy
    return model


def _renamed(target: PreTrainedModel, source: str) -> PreTrainedModel:
    """A shallow copy of the target that says it was loaded from a folder; the target stays as it is."""
    twin = copy.copy(target)
    config = copy.copy(target.config)
    config.name_or_path = source
    twin.config = config
    return twin


def _load_speculators(request: LoadRequest) -> DraftHead:
    folder, config = request.folder, read_mtp(request.source)
    names = shapes_of(folder)
    rotary = Rotary(config.layers, request.device)
    with torch.device("meta"):
        has_norms = "layers.0.self_attn.q_norm.weight" in names
        network = SpeculatorsMtpNetwork(config.layers, has_norms, request.source.shape.vocab_size, rotary)
    weights = {name: weight for name, weight in weights_of(folder).items() if name not in _SHARED_TABLES}
    load_into(network, weights, folder.source, request.device, request.dtype)
    return DraftHead(config.spec, network, request.target.config, partial(ChainDrafter, network))
