"""DFlash and DSpark heads: a block of mask tokens that attends to projected states of the whole text.

Context states go into the keys and values of every layer as they are, without the layer's norm, at the positions of
their tokens. The block holds the newest token, whose state is not known yet, and mask tokens after it; its slots see
the whole context and, in layers that are not causal, each other. Heads are read in z-lab's and the speculators format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.heads.head import DraftHead, HeadSpec
from hf_speculate.draft.heads.kinds import HeadKind, unserved
from hf_speculate.draft.heads.layers import DecoderLayer, LayerConfig, RMSNorm, Rotary, read_layer_config
from hf_speculate.draft.heads.load_network import ConfigSource, HeadConfig, LoadRequest, load_network
from hf_speculate.draft.heads.round import HeadDrafter, NewTokens, Proposal
from hf_speculate.draft.heads.row_cache import Placed, RowCache
from hf_speculate.draft.heads.target_parts import TargetParts, TargetShape
from hf_speculate.draft.heads.vocabulary import DraftVocabulary
from hf_speculate.errors import ConfigError

_TABLE, _HEAD, _MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"
_CONFIDENCE = "confidence_head.proj.weight"
_DEFAULT_BLOCK_SIZE = {"z-lab": 16, "speculators": 8}
_DEFAULT_THETA = {"z-lab": 1e6, "speculators": 1e4}


@dataclass(frozen=True)
class DFlashOptions:
    """How a head's forward differs from the plain one."""

    block_size: int  # b, tokens of a block, the newest one included
    mask_token_id: int  # id of the other tokens of a block
    num_states: int  # A, target states that are concatenated for each token
    is_causal: tuple[bool, ...]  # by layer, whether tokens of a block hide those after them
    # whether the newest token's own slot predicts the token after it; otherwise it predicts nothing, and slot k
    # predicts the token that stands at its place
    samples_from_anchor: bool = False
    # factor on rows of the target's embedding table; None for the target's own scale
    embedding_scale: float | None = None
    logit_scale: float = 1.0  # factor on the logits
    softcapping: float | None = None  # bound of the logits by a tanh; None for no bound
    markov_head: str | None = None  # "vanilla", "gated" or "rnn", the DSpark variant; None for DFlash
    markov_reaches_confidence: bool = False  # whether the confidence head reads the previous token's embedding too


class DFlashNetwork(nn.Module):
    """The network of a DFlash or DSpark head; the weights' names say what it has of its own."""

    layers: Any  # an `nn.ModuleList` of `DecoderLayer`

    def __init__(
        self,
        config: LayerConfig,
        options: DFlashOptions,
        shapes: Mapping[str, Sequence[int]],
        target_hidden_size: int,
        vocabulary: DraftVocabulary,
        rotary: Rotary,
    ):
        super().__init__()
        self.options, self.vocabulary, self.windows = options, vocabulary, config.windows
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(options.num_states * target_hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        has_norms = "layers.0.self_attn.q_norm.weight" in shapes
        self.layers = nn.ModuleList([DecoderLayer(config, has_norms) for _ in range(config.num_layers)])
        self.norm = RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(shapes[_TABLE][0], width) if _TABLE in shapes else None
        self.lm_head = nn.Linear(width, shapes[_HEAD][0], bias=False) if _HEAD in shapes else None
        self.mask_embedding = nn.Parameter(torch.empty(*shapes[_MASK], device="meta")) if _MASK in shapes else None
        self.markov_head = None if options.markov_head is None else MarkovHead(options.markov_head, width, shapes)
        self.confidence_head = ConfidenceHead(shapes[_CONFIDENCE][1]) if _CONFIDENCE in shapes else None
        self._rotary = rotary

    def project(self, states: Tensor) -> Tensor:
        """[B, N, H], context states of the target's concatenated states [B, N, A * Ht]."""
        return self.hidden_norm(self.fc(states))  # type: ignore[no-any-return]

    def read(self, context: Tensor, cache: RowCache, placed: Placed) -> None:
        """Put context states [B, N, H] into the keys and values of every layer."""
        rotation = self._rotary(placed.columns, context.dtype)
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(context, rotation)
            cache.write(index, keys, values, placed)

    def fill(self, newest_ids: Tensor, cache: RowCache, placed: Placed, parts: TargetParts) -> Tensor:
        """[B, b, H] of a block after the final norm, behind the context, that begins with the newest ids [B] int64."""
        states = self._embedded(newest_ids, parts)
        rotation = self._rotary(placed.columns, states.dtype)
        for index, layer in enumerate(self.layers):
            states = layer(states, rotation, cache, index, placed)
        return self.norm(states)  # type: ignore[no-any-return]

    def logits(self, states: Tensor, parts: TargetParts) -> Tensor:
        """[..., Vd] of states [..., H] after the final norm."""
        logits: Tensor = parts.logits(states) if self.lm_head is None else self.lm_head(states)
        if self.options.logit_scale != 1.0:
            logits = logits * self.options.logit_scale
        cap = self.options.softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _embedded(self, newest_ids: Tensor, parts: TargetParts) -> Tensor:
        """[B, b, H] embeddings of a block."""
        options = self.options
        masks = newest_ids.new_full((len(newest_ids), options.block_size - 1), options.mask_token_id)
        token_ids = torch.cat([newest_ids[:, None], masks], dim=1)  # [B, b]
        if self.embed_tokens is not None:
            states: Tensor = self.embed_tokens(token_ids)
        elif options.embedding_scale is not None:
            states = parts.raw_embedded(token_ids) * options.embedding_scale
        else:
            states = parts.embedded(token_ids)
        if self.mask_embedding is None:
            return states
        mask = self.mask_embedding.reshape(-1).expand(len(states), options.block_size - 1, -1)
        return torch.cat([states[:, :1], mask], dim=1)


class MarkovHead(nn.Module):
    """Adds to a slot's logits what follows from the token before it.

    With e = w1[previous token] and h the slot's state, the bias is w2 of e ("vanilla"), of e gated by
    sigmoid(gate(h, e)) ("gated"), or of tanh(output) of a recurrent unit over the block's slots ("rnn").
    """

    def __init__(self, kind: str, width: int, shapes: Mapping[str, Sequence[int]]):
        super().__init__()
        num_ids, rank = shapes["markov_head.markov_w1.weight"]
        num_columns = shapes["markov_head.markov_w2.weight"][0]
        self.markov_w1 = nn.Embedding(num_ids, rank)
        self.markov_w2 = nn.Linear(rank, num_columns, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank, bias=False) if kind == "gated" else None
        self.joint_proj = nn.Linear(width + 2 * rank, 3 * rank, bias=False) if kind == "rnn" else None

    def forward(self, embeddings: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The bias [B, Vd] of a slot with states [B, H] after tokens [B, r], and a recurrent unit's memory [B, r]."""
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


class ConfidenceHead(nn.Module):
    """Estimates the probability that the target keeps a slot's token."""

    def __init__(self, in_width: int):
        super().__init__()
        self.proj = nn.Linear(in_width, 1, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[B] in (0, 1) of [B, in_width]."""
        return torch.sigmoid(self.proj(states)[:, 0].float())


class BlockDrafter(HeadDrafter[DFlashNetwork]):
    """Drafts with one block a round, whatever K is; a shorter draft is the beginning of the block's.

    A DFlash block gives each token a distribution that depends on none of the others. DSpark's Markov head makes it
    depend on the token before, so its tokens are chosen from left to right. If the call sets a confidence threshold
    and the head has a confidence head, a row's draft ends before the first token at which the product of the
    estimates falls below it; otherwise the threshold is on the probability of the drafted token, as for draft models.
    """

    def __init__(self, network: DFlashNetwork, spec: HeadSpec, setup: DrafterSetup):
        super().__init__(network, spec, setup)
        self._threshold = 0.0
        if network.confidence_head is not None:
            self._threshold = setup.confidence_threshold
            self.chooser.settings = replace(self.chooser.settings, confidence_threshold=0.0)

    def propose(self, new: NewTokens, num_draft_tokens: int, proposal: Proposal) -> Tensor | None:
        network, options = self.network, self.network.options
        if new.states is not None and new.width:
            network.read(new.states, self.cache, self.cache.place(new.width, network.windows, self.dtype))
            self.cache.advance(new.counts, new.lens)
        placed = self.cache.place(options.block_size, network.windows, self.dtype, is_causal=options.is_causal)
        block = network.fill(new.newest_ids, self.cache, placed, self.parts)  # [B, b, H]
        first = int(not options.samples_from_anchor)
        states = block[:, first : first + num_draft_tokens]  # [B, K, H]
        logits = network.logits(states, self.parts)  # [B, K, Vd]
        if network.markov_head is None and not self._threshold:
            proposal.add_all(logits)
            return None
        return self._from_left_to_right(new.newest_ids, states, logits, proposal)

    def _from_left_to_right(
        self, newest_ids: Tensor, states: Tensor, logits: Tensor, proposal: Proposal
    ) -> Tensor | None:
        """Choose tokens that depend on the one before; [B] how many count, or None if all do."""
        network = self.network
        previous, memory = newest_ids, None
        product = torch.ones(len(newest_ids), device=self.device)
        lens = torch.zeros(len(newest_ids), dtype=torch.int32, device=self.device)
        for step in range(logits.shape[1]):
            scores, features = logits[:, step], states[:, step]
            if network.markov_head is not None:
                embeddings = network.markov_head.markov_w1(previous)  # [B, r]
                bias, memory = network.markov_head(embeddings, features, memory)
                scores = scores + bias
                if network.options.markov_reaches_confidence:
                    features = torch.cat([features, embeddings], dim=-1)
            previous = proposal.add(scores)
            if self._threshold and network.confidence_head is not None:
                product = product * network.confidence_head(features)
                lens += (product >= self._threshold).to(torch.int32)
        return lens if self._threshold else None


def read_dflash(source: ConfigSource) -> HeadConfig[DFlashOptions]:
    """The DFlash or DSpark head that a config describes."""
    config, found = source.config, source.found
    fields: dict[str, Any] = {**config, **(config.get("dflash_config") or {})}
    layers = read_layer_config(source.layer_fields, 5e5 if _is_muse(config) else _DEFAULT_THETA[found.format])
    layers = _with_windows(layers, config, fields)
    block_size = int(fields.get("block_size") or _DEFAULT_BLOCK_SIZE[found.format])
    if fields.get("mask_token_id") is None:
        raise ConfigError(
            f"mask_token_id must be set for a DFlash head, got none; add it to config.json of {source.name}"
        )
    ids = source.hidden_layers or _layer_ids(fields, found, layers.num_layers, source.shape)
    samples_from_anchor = bool(fields.get("sample_from_anchor", found.kind == "dspark"))
    scale = fields.get("input_embedding_scale")
    options = DFlashOptions(
        block_size=block_size,
        mask_token_id=int(fields["mask_token_id"]),
        num_states=len(ids),
        is_causal=_causal_layers(config, fields, layers),
        samples_from_anchor=samples_from_anchor,
        embedding_scale=None if scale is None else float(scale),
        logit_scale=float(fields.get("output_multiplier") or 1.0),
        softcapping=float(fields.get("final_logit_softcapping") or 0.0) or None,
        markov_head=_markov_head(fields) if found.kind == "dspark" else None,
        markov_reaches_confidence=bool(fields.get("confidence_head_with_markov", False)),
    )
    most = block_size if samples_from_anchor else block_size - 1
    num_target_layers = config.get("num_target_layers")
    spec = source.spec(source.layer_fields, ids, max_draft_tokens=most, num_target_layers=num_target_layers)
    spec = replace(spec, default_draft_tokens=min(spec.default_draft_tokens or most, most))
    return HeadConfig(spec, layers, options)


def _layer_ids(fields: dict[str, Any], found: HeadKind, num_layers: int, shape: TargetShape) -> tuple[int, ...]:
    """Ids of target states as inputs of layers: z-lab names layers by their outputs, speculators by their inputs."""
    if found.format == "speculators":
        given = fields.get("aux_hidden_state_layer_ids")
        if not given:
            raise ConfigError(
                "aux_hidden_state_layer_ids must be set for a speculators DFlash head, got none; pass aux_layers="
            )
        return tuple(int(layer) for layer in given)
    given = fields.get("target_layer_ids")
    if given is None:
        first, last = 1, shape.num_layers - 3
        steps = max(num_layers - 1, 1)
        given = [round(first + index * (last - first) / steps) for index in range(num_layers)]
    return tuple(int(layer) + 1 for layer in given)


def _with_windows(layers: LayerConfig, config: dict[str, Any], fields: dict[str, Any]) -> LayerConfig:
    """The layers with the windows that DFlash's own fields name."""
    types = config.get("layer_types") or (config.get("transformer_layer_config") or {}).get("layer_types")
    window = fields.get("swa_window_size")
    if _is_muse(config):  # whose windows count the tokens before a query without the query itself
        windows = layers.windows if types else (int(config.get("sliding_window") or 2048),) * layers.num_layers
        return replace(layers, windows=tuple(None if one is None else one + 1 for one in windows))
    if fields.get("use_swa") and "sliding_attention" not in (types or ()):
        window = window or config.get("sliding_window")
        if window is None:
            raise ConfigError("swa_window_size must be set with use_swa, got none; add it to dflash_config")
        return replace(layers, windows=(int(window),) * layers.num_layers)
    if window is not None:
        return replace(layers, windows=tuple(None if one is None else int(window) for one in layers.windows))
    return layers


def _causal_layers(config: dict[str, Any], fields: dict[str, Any], layers: LayerConfig) -> tuple[bool, ...]:
    """By layer: what the config says for all; otherwise layers with a window are causal, and others are not."""
    for given in (
        config.get("is_causal"),
        fields.get("causal"),
        False if _is_muse(config) else None,
    ):
        if given is not None:
            return (bool(given),) * layers.num_layers
    if fields.get("sliding_window_non_causal"):
        return (False,) * layers.num_layers
    return tuple(window is not None for window in layers.windows)


def _markov_head(fields: dict[str, Any]) -> str | None:
    if not fields.get("markov_rank"):
        return None
    kind = str(fields.get("markov_head_type") or "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise unserved(f"a DSpark head with markov_head_type {kind!r}", "'vanilla', 'gated' or 'rnn'")
    return kind


def _is_muse(config: dict[str, Any]) -> bool:
    return bool(config.get("model_type") == "muse_glimmer_assistant")  # transformers' own class of z-lab's network


def load_dflash(request: LoadRequest) -> DraftHead:
    """A DFlash or DSpark head."""
    config = read_dflash(request.source)
    return request.head(config.spec, load_network(request, DFlashNetwork, config), BlockDrafter)
