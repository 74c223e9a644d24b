"""DFlash 2 heads: a DFlash block with convolutions and left-to-right candidate selection.

Let u_j be the logits of slot j, z_j its state, C_j the ids of its k largest logits, and p the token
before it. The score of a candidate c is

    s_j[c] = u_j[c] + sum over rho of P[p, rho] * (W z_j)[rho] * S[c, rho]
    for c in C_j, -inf elsewhere

The drafted token is the argmax of s_j, or a sample from its softmax, which is the distribution
recorded for the verifier. The distribution depends only on earlier drafted tokens, so drafts are
exact samples from the recorded distribution.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_speculate.draft.token_choice import RoundDraft
from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import integer
from hf_speculate.models.inferencer import Chosen
from hf_speculate.options.heads.block_convolution import ConvolvedLayer
from hf_speculate.options.heads.dflash import (
    BlockDrafter,
    DFlashNetwork,
    DFlashOptions,
    read_dflash,
)
from hf_speculate.options.heads.head import HeadSpec
from hf_speculate.options.heads.layers import DecoderLayer
from hf_speculate.options.heads.load_network import ConfigSource
from hf_speculate.options.heads.network import NetworkPlan
from hf_speculate.options.heads.served import unserved

_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
_LAYER_IDS = {"z-lab": "target_layer_ids", "speculators": "aux_hidden_state_layer_ids"}
# config fields that describe the target, not the head
_PARTIAL_ROTARY = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True, kw_only=True)
class DFlash2Options(DFlashOptions):
    """Options of a DFlash 2 network."""

    num_taps: int  # T, slots per convolution
    group_size: int  # g, number of channels that share a kernel term
    selector_rank: int  # r
    num_candidates: int  # k
    vocab_size: int  # V of the head


class CandidateSelector(nn.Module):
    """Candidate scores that depend on the previous token."""

    def __init__(self, width: int, options: DFlash2Options):
        super().__init__()
        rank, num_ids = options.selector_rank, options.vocab_size
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(num_ids, rank, device="meta"))
        self.successor_codebook = nn.Parameter(torch.empty(num_ids, rank, device="meta"))

    def forward(self, previous: Tensor, features: Tensor, candidate_ids: Tensor) -> Tensor:
        """Return the scores [B, k] of candidates.

        Args:
            previous: [B] int64, the token before the slot.
            features: [B, r], projected states of the slot.
            candidate_ids: [B, k] int64.
        """
        joined = self.predecessor_codebook[previous] * features  # [B, r]
        return (self.successor_codebook[candidate_ids] @ joined[:, :, None])[:, :, 0]


class DFlash2Network(DFlashNetwork):
    """The network of a DFlash 2 head."""

    options: DFlash2Options

    def __init__(self, plan: NetworkPlan):
        super().__init__(plan)
        self.confidence_head = None
        self.candidate_selector = CandidateSelector(plan.options.layers.hidden_size, plan.options)

    def make_layer(self, plan: NetworkPlan) -> DecoderLayer:
        options: DFlash2Options = plan.options
        return ConvolvedLayer(
            options.layers, plan.has_head_norms, options.num_taps, options.group_size
        )


class SelectingDrafter(BlockDrafter):
    """A block drafter with candidate selection.

    It chooses among the most likely tokens of each slot, from left to right.
    """

    network: DFlash2Network

    def choose(self, previous: Tensor, states: Tensor, logits: Tensor, draft: RoundDraft) -> None:
        selector = self.network.candidate_selector
        num_rows = len(selector.predecessor_codebook)
        # the target's head may have more or fewer rows
        logits = self.parts.vocabulary.cut(logits)[..., :num_rows]
        num_candidates = min(self.network.options.num_candidates, logits.shape[-1])
        # [B, K, k]; ties go to the lower id
        candidate_ids = logits.topk(num_candidates).indices.sort().values
        unary, features = logits.gather(-1, candidate_ids), selector.hidden_projection(states)
        is_plain, chosen = draft.keys is None and self.chooser.is_plain, []
        for step in range(logits.shape[1]):
            ids, known = candidate_ids[:, step], self.parts.known(previous, num_rows)
            scores = unary[:, step] + selector(known, features[:, step], ids)  # [B, k]
            if not is_plain:
                previous = draft.choose(
                    torch.full_like(logits[:, step], -torch.inf).scatter_(1, ids, scores)
                )
                continue
            self.chooser.last_logits = scores
            previous = ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            chosen.append(previous)
        if is_plain:
            draft.tokens.add(Chosen(torch.stack(chosen, dim=1)))


def read_dflash2(source: ConfigSource) -> tuple[HeadSpec, DFlash2Options]:
    """Read the spec and options of a DFlash 2 head from its config."""
    fields: dict[str, Any] = {**source.config, **(source.config.get("dflash_config") or {})}
    spec, options = read_dflash(source._replace(config=_as_dflash(source, fields)))
    if spec.draft_vocab_size != spec.vocab_size:
        raise unserved(
            f"a DFlash 2 head with draft_vocab_size {spec.draft_vocab_size}", "its whole vocabulary"
        )
    if options.samples_from_anchor:
        raise unserved(
            "a DFlash 2 head with sample_from_anchor", "slots that predict their own tokens"
        )
    width = options.layers.hidden_size
    max_sizes = {"conv_kernel_size": options.block_size, "selector_top_k": spec.vocab_size}
    sizes = {name: _size(fields, name, max_sizes.get(name, math.inf)) for name in _DEFAULTS}
    if width % sizes["conv_group_size"]:
        raise ConfigError(
            f"conv_group_size of {source.name} must divide its width of {width}, got "
            f"{sizes['conv_group_size']}; check "
            "config.json"
        )
    return spec, DFlash2Options(
        **vars(options),
        num_taps=sizes["conv_kernel_size"],
        group_size=sizes["conv_group_size"],
        selector_rank=sizes["selector_rank"],
        num_candidates=sizes["selector_top_k"],
        vocab_size=spec.vocab_size,
    )


def _size(fields: Mapping[str, Any], name: str, max_value: float) -> int:
    value = fields.get(name)
    value = _DEFAULTS[name] if value is None else value
    bound = "" if max_value == math.inf else f" and at most {max_value}"
    integer(f"an int of at least 1{bound}", 1, max_value, "check config.json")(name, value)
    return int(value)


def _as_dflash(source: ConfigSource, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with DFlash 2's defaults filled in, in the fields of a DFlash head."""
    config, block_size = source.config, fields.get("block_size")
    layer_ids = _LAYER_IDS[source.recognised.format]
    if source.hidden_layers is None and not fields.get(layer_ids):
        raise ConfigError(
            f"{layer_ids} must be set for a DFlash 2 head, got none in config.json of "
            f"{source.name}; pass aux_layers="
        )
    if block_size is None and source.recognised.format == "z-lab":
        raise ConfigError(
            "block_size must be set for a DFlash 2 head, got none; add it to config.json of "
            f"{source.name}"
        )
    if config.get("block_size") not in (None, block_size):
        raise ConfigError(
            f"block_size must be the same in config.json of {source.name} and its dflash_config, "
            "got "
            f"{config['block_size']} and {block_size}; remove the wrong one"
        )
    config = {"input_embedding_scale": 1.0, "sliding_window_non_causal": True} | _fully_rotated(
        config
    )
    layers = config.get("transformer_layer_config")
    return config | ({"transformer_layer_config": _fully_rotated(layers)} if layers else {})


def _fully_rotated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the target's fields for partial RoPE, because the head rotates all dimensions."""
    result = {name: value for name, value in fields.items() if name not in _PARTIAL_ROTARY}
    for name in ("rope_parameters", "rope_scaling"):
        rope = result.get(name)
        if isinstance(rope, dict):
            result[name] = {
                key: _fully_rotated(value) if isinstance(value, dict) else value
                for key, value in rope.items()
                if key not in _PARTIAL_ROTARY
            }
    return result
