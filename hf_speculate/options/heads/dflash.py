"""DFlash and DSpark heads, in which a block of mask tokens attends to projected target states.

Context states are written to the keys and values of every layer at the positions of their tokens,
without the layer's norm. The block consists of the newest token, which has no state yet, and mask
tokens after it. Its slots see the whole context and, in non-causal layers, each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.token_choice import RoundDraft
from hf_speculate.errors import ConfigError
from hf_speculate.options.heads.head import HeadSpec
from hf_speculate.options.heads.layers import DecoderLayer, read_layer_config, windows_of
from hf_speculate.options.heads.load_network import ConfigSource
from hf_speculate.options.heads.network import FusingNetwork, NetworkPlan, TargetParts
from hf_speculate.options.heads.round import HeadDrafter, NewTokens
from hf_speculate.options.heads.row_cache import CacheView
from hf_speculate.options.heads.served import unserved

_MASK, _CONFIDENCE = "mask_embedding", "confidence_head.proj.weight"
_DEFAULT_BLOCK_SIZE = {"z-lab": 16, "speculators": 8}
_DEFAULT_THETA = {"z-lab": 1e6, "speculators": 1e4}


@dataclass(frozen=True)
class DFlashOptions:
    """Options of a DFlash or DSpark network."""

    layers: Qwen3Config
    block_size: int  # b, number of tokens in a block, including the newest token
    mask_token_id: int  # id of the other tokens in a block
    num_states: int  # A, number of target states concatenated for each token
    is_causal: tuple[bool, ...]  # by layer, whether later block tokens are hidden
    samples_from_anchor: bool = False  # whether a slot predicts the next token instead of its own
    embedding_scale: float | None = None  # factor on embeddings; None for the target's factor
    logit_scale: float = 1.0  # factor on the logits
    softcapping: float | None = None  # bound on the logits, applied with tanh; None if unbounded
    markov_head: str | None = None  # DSpark: "vanilla", "gated" or "rnn"; None for DFlash
    markov_reaches_confidence: bool = False  # whether the confidence head reads Markov embeddings


class DFlashNetwork(FusingNetwork):
    """The network of a DFlash or DSpark head.

    The names of the checkpoint's weights determine which optional modules exist.
    """

    layers: Any  # an `nn.ModuleList` of `DecoderLayer`

    def __init__(self, plan: NetworkPlan):
        super().__init__(plan)
        self.options: DFlashOptions = plan.options
        layers, shapes = plan.options.layers, plan.shapes
        width = layers.hidden_size
        masks = zip(self.layer_masks, self.options.is_causal, strict=True)
        self.layer_masks = [mask._replace(is_causal=is_causal) for mask, is_causal in masks]
        self.fc = nn.Linear(self.options.num_states * plan.target_hidden_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, layers.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(plan) for _ in range(layers.num_hidden_layers))
        self.mask_embedding = (
            nn.Parameter(torch.empty(*shapes[_MASK], device="meta")) if _MASK in shapes else None
        )
        markov = self.options.markov_head
        self.markov_head = None if markov is None else MarkovHead(markov, width, shapes)
        # The sigmoid of its output estimates the probability that a slot's token is accepted.
        confidence = (
            nn.Linear(shapes[_CONFIDENCE][1], 1, bias=False) if _CONFIDENCE in shapes else None
        )
        self.confidence_head = None if confidence is None else nn.ModuleDict({"proj": confidence})

    def make_layer(self, plan: NetworkPlan) -> DecoderLayer:
        return DecoderLayer(plan.options.layers, plan.has_head_norms)

    @property
    def least_vocab_size(self) -> int:
        has_own = self.embed_tokens is not None or self.mask_embedding is not None
        return 0 if has_own else self.options.mask_token_id + 1

    def project(self, states: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(states))  # type: ignore[no-any-return]

    def read(self, context: Tensor, view: CacheView) -> None:
        """Write context states [B, N, H] to the keys and values of every layer."""
        rotation = self.rotary(view.columns, context.dtype)
        for index, layer in enumerate(self.layers):
            view.write(index, *layer.self_attn.keys_values(context, rotation))

    def fill(self, newest_ids: Tensor, view: CacheView, parts: TargetParts) -> Tensor:
        """Return the states [B, b, H] of a block after the context, with the final norm applied.

        The block begins with the newest ids [B] int64.
        """
        options = self.options
        mask_id = options.mask_token_id if self.mask_embedding is None else 0  # replaced below
        masks = newest_ids.new_full((len(newest_ids), options.block_size - 1), mask_id)
        token_ids = torch.cat([newest_ids[:, None], masks], dim=1)  # [B, b]
        if self.embed_tokens is not None:
            states: Tensor = self.embed_tokens(
                parts.known(token_ids, self.embed_tokens.num_embeddings)
            )
        elif options.embedding_scale is not None:
            states = parts.embedded(token_ids, is_scaled=False) * options.embedding_scale
        else:
            states = parts.embedded(token_ids)
        if self.mask_embedding is not None:
            states[:, 1:] = self.mask_embedding.reshape(-1)
        rotation = self.rotary(view.columns, states.dtype)
        for index, layer in enumerate(self.layers):
            states = layer(states, rotation, view, index)
        return self.norm(states)  # type: ignore[no-any-return]

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        logits, cap = super().logits(normed, parts), self.options.softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class MarkovHead(nn.Module):
    """A bias on the logits that depends on the previous token.

    With e = w1[previous token] and h the slot's state, the bias is w2 of e ("vanilla"), of e gated
    by sigmoid(gate(h, e)) ("gated"), or of tanh(output) of a recurrent unit over the block's slots
    ("rnn").
    """

    def __init__(self, variant: str, width: int, shapes: Mapping[str, Sequence[int]]):
        super().__init__()
        num_ids, rank = shapes["markov_head.markov_w1.weight"]
        self.markov_w1 = nn.Embedding(num_ids, rank)
        self.markov_w2 = nn.Linear(rank, shapes["markov_head.markov_w2.weight"][0], bias=False)
        self.gate_proj = nn.Linear(width + rank, rank, bias=False) if variant == "gated" else None
        self.joint_proj = (
            nn.Linear(width + 2 * rank, 3 * rank, bias=False) if variant == "rnn" else None
        )

    def forward(
        self, embeddings: Tensor, states: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the bias [B, Vd] of a slot and the memory [B, r] of the recurrent unit.

        Args:
            embeddings: [B, r], of the previous tokens.
            states: [B, H], of the slot.
            memory: [B, r], of the previous slot; None in the first slot, and for variants without a
                recurrent unit.
        """
        if self.gate_proj is not None:
            gate = torch.sigmoid(self.gate_proj(torch.cat([states, embeddings], dim=-1)))
            return self.markov_w2(gate * embeddings), None
        if self.joint_proj is None:
            return self.markov_w2(embeddings), None
        memory = torch.zeros_like(embeddings) if memory is None else memory
        joint = self.joint_proj(torch.cat([memory, embeddings, states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        memory = gate * memory + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), memory


class BlockDrafter(HeadDrafter[DFlashNetwork]):
    """A drafter of one block per round.

    A draft shorter than the block consists of the block's first tokens. With a confidence head, a
    row's draft ends before the product of its estimates falls below the call's threshold.
    """

    def __init__(self, network: DFlashNetwork, spec: HeadSpec, setup: DrafterSetup):
        super().__init__(network, spec, setup)
        self._threshold = 0.0 if network.confidence_head is None else setup.confidence_threshold
        if self._threshold:
            self.chooser.settings = self.chooser.settings._replace(confidence_threshold=0.0)

    def propose(self, new: NewTokens, num_draft_tokens: int, draft: RoundDraft) -> Tensor | None:
        network, options = self.network, self.network.options
        self.read_new(new)
        view = self.cache.view(options.block_size)
        block = network.fill(new.newest_ids, view, self.parts)  # [B, b, H]
        first = int(not options.samples_from_anchor)
        states = block[:, first : first + num_draft_tokens]  # [B, K, H]
        logits = network.logits(states, self.parts)  # [B, K, Vd]
        return self.choose(new.newest_ids, states, logits, draft)

    def read_new(self, new: NewTokens) -> None:
        if new.states is not None and new.width:
            self.network.read(new.states, self.cache.view(new.width))
            self.cache.advance(new.counts, new.lens)

    def choose(
        self, previous: Tensor, states: Tensor, logits: Tensor, draft: RoundDraft
    ) -> Tensor | None:
        """Choose K tokens after `previous` [B] from states [B, K, H] and logits [B, K, Vd].

        Returns:
            The draft length of each row, [B] int32; None if every row has K tokens.
        """
        network, memory = self.network, None
        if network.markov_head is None and not self._threshold:
            draft.choose_all(logits)
            return None
        product = torch.ones(len(previous), device=self.device)
        lens = torch.zeros_like(previous, dtype=torch.int32)
        for step in range(logits.shape[1]):
            scores, features = logits[:, step], states[:, step]
            if network.markov_head is not None:
                table = network.markov_head.markov_w1
                embeddings = table(self.parts.known(previous, table.num_embeddings))  # [B, r]
                bias, memory = network.markov_head(embeddings, features, memory)
                # the target's head may have more or fewer rows
                num_ids = min(scores.shape[1], bias.shape[1])
                scores = scores[:, :num_ids] + bias[:, :num_ids]
                if network.options.markov_reaches_confidence:
                    features = torch.cat([features, embeddings], dim=-1)
            previous = draft.choose(scores)
            if self._threshold and network.confidence_head is not None:
                product = (
                    product * network.confidence_head["proj"](features)[:, 0].float().sigmoid()
                )
                lens += (product >= self._threshold).to(torch.int32)
        return lens if self._threshold else None


def read_dflash(source: ConfigSource) -> tuple[HeadSpec, DFlashOptions]:
    """Read the spec and options of a DFlash or DSpark head from its config."""
    config, head = source.config, source.recognised
    fields: dict[str, Any] = {**config, **(config.get("dflash_config") or {})}
    if fields.get("mask_token_id") is None:
        raise ConfigError(
            "mask_token_id must be set for a DFlash head, got none; add it to config.json of "
            f"{source.name}"
        )
    # z-lab's network, ported to a transformers class
    is_muse = config.get("model_type") == "muse_glimmer_assistant"
    layer_fields = source.layer_fields | _windows(source.layer_fields, fields, is_muse)
    layers = read_layer_config(layer_fields, 5e5 if is_muse else _DEFAULT_THETA[head.format])
    block_size = int(fields.get("block_size") or _DEFAULT_BLOCK_SIZE[head.format])
    ids = source.hidden_layers or _layer_ids(
        fields, head.format, layers.num_hidden_layers, source.shape.num_layers
    )
    samples_from_anchor = bool(fields.get("sample_from_anchor", head.kind == "dspark"))
    scale = fields.get("input_embedding_scale")
    has_markov = head.kind == "dspark" and fields.get("markov_rank")
    markov = str(fields.get("markov_head_type") or "vanilla") if has_markov else None
    if markov not in (None, "vanilla", "gated", "rnn"):
        raise unserved(
            f"a DSpark head with markov_head_type {markov!r}", "'vanilla', 'gated' or 'rnn'"
        )
    options = DFlashOptions(
        layers=layers,
        block_size=block_size,
        mask_token_id=int(fields["mask_token_id"]),
        num_states=len(ids),
        is_causal=_causal_layers(fields, layers, is_muse),
        samples_from_anchor=samples_from_anchor,
        embedding_scale=None if scale is None else float(scale),
        logit_scale=float(fields.get("output_multiplier") or 1.0),
        softcapping=float(fields.get("final_logit_softcapping") or 0.0) or None,
        markov_head=markov,
        markov_reaches_confidence=bool(fields.get("confidence_head_with_markov", False)),
    )
    notes = []
    if (
        not source.hidden_layers
        and head.format == "z-lab"
        and fields.get("target_layer_ids") is None
    ):
        notes.append(
            f"its config names no target_layer_ids, so it is taken to read layers {list(ids)}; if "
            "the acceptance rate "
            "is low, pass aux_layers="
        )
    num_slots = block_size if samples_from_anchor else block_size - 1
    num_layers = config.get("num_target_layers")
    spec = source.spec(
        layer_fields,
        ids,
        max_draft_tokens=num_slots,
        num_target_layers=num_layers,
        notes=tuple(notes),
    )
    return replace(
        spec, default_draft_tokens=min(spec.default_draft_tokens or num_slots, num_slots)
    ), options


def _layer_ids(
    fields: dict[str, Any], head_format: str, num_layers: int, num_target_layers: int
) -> tuple[int, ...]:
    """Return the ids of the target states, counted as inputs of layers.

    z-lab's configs name layers by their outputs, speculators' by their inputs.
    """
    if head_format == "speculators":
        layer_ids = fields.get("aux_hidden_state_layer_ids")
        if not layer_ids:
            raise ConfigError(
                "aux_hidden_state_layer_ids must be set for a speculators DFlash head, got none; "
                "pass aux_layers="
            )
        return tuple(int(layer) for layer in layer_ids)
    layer_ids = fields.get("target_layer_ids")
    if layer_ids is None:  # evenly spaced from the second to the third-last layer
        span, steps = num_target_layers - 4, max(num_layers - 1, 1)
        layer_ids = [round(1 + index * span / steps) for index in range(num_layers)]
    return tuple(int(layer) + 1 for layer in layer_ids)


def _windows(layer_fields: dict[str, Any], fields: dict[str, Any], is_muse: bool) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window` as changed by DFlash's own fields."""
    types, window = layer_fields.get("layer_types") or (), layer_fields.get("sliding_window")
    all_sliding = ["sliding_attention"] * int(layer_fields.get("num_hidden_layers") or 1)
    if is_muse:  # Muse's windows do not count the query itself
        return {"layer_types": types or all_sliding, "sliding_window": int(window or 2048) + 1}
    window = fields.get("swa_window_size") or window or fields.get("sliding_window")
    if not fields.get("use_swa") or "sliding_attention" in types:
        return {"sliding_window": window}
    if window is None:
        raise ConfigError(
            "swa_window_size must be set with use_swa, got none; add it to dflash_config"
        )
    return {"layer_types": all_sliding, "sliding_window": window}


def _causal_layers(fields: dict[str, Any], layers: Qwen3Config, is_muse: bool) -> tuple[bool, ...]:
    """Return, for each layer, whether it is causal.

    A single value in the config applies to all layers. If the config has none, only windowed layers
    are causal.
    """
    windows = windows_of(layers)
    for is_causal in (fields.get("is_causal"), fields.get("causal")):
        if is_causal is not None:
            return (bool(is_causal),) * len(windows)
    hides_all = not is_muse and not fields.get("sliding_window_non_causal")
    return tuple(window is not None and hides_all for window in windows)
