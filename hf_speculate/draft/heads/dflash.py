"""DFlash and DSpark heads: a block of mask tokens that attends to projected states of the whole text.

Context states go into the keys and values of every layer as they are, without the layer's norm, at the positions of
their tokens. The block holds the newest token, whose state is not known yet, and mask tokens after it; its slots see
the whole context and, in layers that are not causal, each other.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_speculate.draft.heads.dflash_config import DFlashOptions
from hf_speculate.draft.heads.layer_config import LayerConfig
from hf_speculate.draft.heads.layers import DecoderLayer, RMSNorm, Rotary
from hf_speculate.draft.heads.markov import ConfidenceHead, MarkovHead
from hf_speculate.draft.heads.row_cache import Placed, RowCache
from hf_speculate.draft.heads.target_parts import TargetParts
from hf_speculate.draft.heads.vocabulary import DraftVocabulary

_TABLE, _HEAD, _MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"


class DFlashNetwork(nn.Module):
    """The network of a DFlash or DSpark head.

    Args:
        config: of its layers.
        options: of its forward.
        shapes: of the weights by name, which say what it has of its own.
        target_hidden_size: Ht.
        vocabulary: which ids it proposes.
        rotary: of its layers.
    """

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
        has_confidence = "confidence_head.proj.weight" in shapes
        self.confidence_head = ConfidenceHead(shapes["confidence_head.proj.weight"][1]) if has_confidence else None
        self._rotary = rotary

    def project(self, states: Tensor) -> Tensor:
        """[B, N, H], context states of the target's concatenated states [B, N, A * Ht]."""
        return self.hidden_norm(self.fc(states))  # type: ignore[no-any-return]

    def read(self, context: Tensor, cache: RowCache, placed: Placed) -> None:
        """Put context states [B, N, H] into the keys and values of every layer."""
        rotation = self._rotary(placed.columns, context.dtype)
        for index, layer in enumerate(self._layers):
            keys, values = layer.self_attn.keys_values(context, rotation)
            cache.write(index, keys, values, placed)

    def fill(self, newest_ids: Tensor, cache: RowCache, placed: Placed, parts: TargetParts) -> Tensor:
        """[B, b, H] of a block after the final norm.

        Args:
            newest_ids: [B] int64, the newest token of every row.
            cache: with the context of all tokens before it; the block is written after it.
            placed: of the block.
            parts: of the target.
        """
        states = self._embedded(newest_ids, parts)
        rotation = self._rotary(placed.columns, states.dtype)
        for index, layer in enumerate(self._layers):
            states = layer(states, rotation, cache, index, placed)
        return self.norm(states)  # type: ignore[no-any-return]

    def logits(self, states: Tensor, parts: TargetParts) -> Tensor:
        """[..., Vd] of states [..., H] after the final norm."""
        logits: Tensor = parts.logits(states) if self.lm_head is None else self.lm_head(states)
        if self.options.logit_scale != 1.0:
            logits = logits * self.options.logit_scale
        cap = self.options.softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def _layers(self) -> list[DecoderLayer]:
        layers: list[DecoderLayer] = list(self.layers)  # type: ignore[arg-type]  # __init__ made them
        return layers

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
