"""Base classes for head networks.

Module names match the names of weights in checkpoints.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.language_model import (
    device_of,
    dtype_of,
    input_table,
    module_device,
    plain_weight,
    vocab_size_of,
)
from hf_speculate.options.heads.layers import Rotary, windows_of
from hf_speculate.options.heads.row_cache import LayerMask

SHARED_TABLES = _TABLE, _HEAD = "embed_tokens.weight", "lm_head.weight"


class TargetParts:
    """Modules and vocabulary that a head shares with its target.

    The modules are used on the head's device and in its dtype. Each call may have another target,
    or a target with new modules, so no network stores them, and each drafter looks them up.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._embeddings: Any = input_table(target)
        if self._embeddings is None:
            raise UnsupportedModelError(
                "a draft head must share the embeddings of its target, got "
                f"{type(target).__name__}, which names none; "
                "use another draft"
            )
        # for example by PEFT, for an adapter
        self._is_wrapped = not isinstance(self._embeddings, nn.Embedding)
        self._scale, norm = (
            _member(self._embeddings, name) for name in ("embed_scale", "embed_norm")
        )
        if isinstance(self._scale, Tensor) and self._scale.is_meta:  # an offloaded buffer
            self._scale = _member(self._embeddings, "scalar_embed_scale")
        self._is_normed = norm is not None
        self._head: Any = target.get_output_embeddings()
        self._rotary: Any = getattr(target.get_decoder(), "rotary_emb", None)
        self._vocab_size = vocab_size_of(target)
        self._token_device = module_device(self._embeddings, device_of(target))
        self._head_device = (
            None if self._head is None else module_device(self._head, device_of(target))
        )
        head_weight = plain_weight(self._head)
        self._head_dtype = dtype_of(target) if head_weight is None else head_weight.dtype
        # the target id of each token in the head's vocabulary
        self.vocabulary = vocabulary.resized(self._vocab_size)
        self.device, self.dtype = device, dtype

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the target that a head reads."""
        modules = (self._embeddings, self._head, self._rotary)
        return [module for module in modules if module is not None]

    def known(self, token_ids: Tensor, num_rows: int) -> Tensor:
        """Clamp target ids to a table with `num_rows` rows.

        Ids beyond the table are mapped to its last row.
        """
        return token_ids if num_rows >= self._vocab_size else token_ids.clamp_max(num_rows - 1)

    def embedded(self, token_ids: Tensor, is_scaled: bool = True) -> Tensor:
        """Return embeddings [..., Ht] of ids [...] int64, without a norm.

        With `is_scaled`, the target's embedding scale (such as Gemma's) is applied.
        """
        weight = plain_weight(self._embeddings)  # only the module reads rows of a quantised table
        num_rows = _member(self._embeddings, "num_embeddings") if weight is None else len(weight)
        token_ids = self.known(token_ids, num_rows or self._vocab_size).to(self._token_device)
        needs_unscaled = not is_scaled and self._scale is not None
        is_bare = weight is not None and (
            self._is_normed or (needs_unscaled and not self._is_wrapped)
        )
        rows: Tensor = self._bare_rows(token_ids) if is_bare else self._embeddings(token_ids)
        if needs_unscaled and not is_bare:
            rows = rows / self._scale
        return rows.to(self.device, self.dtype)

    def _bare_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows [..., Ht] of the table itself; an offloading hook loads them first."""
        hook = getattr(self._embeddings, "_hf_hook", None)
        if hook is None:
            return embedding(token_ids, self._embeddings.weight)
        (token_ids,), _ = hook.pre_forward(self._embeddings, token_ids)
        rows: Tensor = hook.post_forward(
            self._embeddings, embedding(token_ids, self._embeddings.weight)
        )
        return rows

    def rotation(
        self, states: Tensor, positions: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines [B, N, R] in the states' dtype; None without a rotary embedding.

        Positions are [B, N] or [3, B, N].
        """
        if self._rotary is None:
            return None
        # Older versions of transformers need a position for each axis.
        if positions.ndim == 2 and hasattr(self._rotary, "mrope_section"):
            positions = positions.expand(3, -1, -1)
        cos, sin = self._rotary(states, position_ids=positions, **options)
        return cos.to(self.device), sin.to(self.device)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., V] for states [..., Ht] after a final norm."""
        logits: Tensor = self._head(states.to(self._head_device, self._head_dtype))
        return logits.to(self.device, self.dtype)


def _member(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module or of the module that it wraps; None if there is none."""
    return next(
        (getattr(submodule, name) for submodule in module.modules() if hasattr(submodule, name)),
        None,
    )


class HeadNetwork(nn.Module, ABC):
    """The network of a draft head."""

    def __init__(self, vocabulary: DraftVocabulary, windows: Sequence[int | None]):
        super().__init__()
        self.vocabulary = vocabulary
        # one mask per layer with a cache
        self.layer_masks = [LayerMask(window) for window in windows]

    def project(self, states: Tensor) -> Tensor:
        """Project the target's concatenated states [B, N, A * Ht] to [B, N, H]."""
        return states

    @property
    def least_vocab_size(self) -> int:
        """Smallest V of a target; above 0 if mask tokens are looked up in the target's table."""
        return 0

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        """Return logits [..., Vd] for states [..., H] after the final norm."""
        return parts.logits(normed)


class NetworkPlan(NamedTuple):
    """The inputs for building a network."""

    options: Any  # options for this kind of head
    shapes: Mapping[str, Sequence[int]]  # shapes of the checkpoint's weights, by name
    target_hidden_size: int  # Ht
    vocabulary: DraftVocabulary
    device: torch.device

    @property
    def has_head_norms(self) -> bool:
        return "layers.0.self_attn.q_norm.weight" in self.shapes


class FusingNetwork(HeadNetwork):
    """A network that fuses several target states.

    Tables missing from its checkpoint are taken from the target.
    """

    def __init__(self, plan: NetworkPlan):
        layers, shapes = plan.options.layers, plan.shapes
        width = layers.hidden_size
        super().__init__(plan.vocabulary, windows_of(layers))
        self.rotary = Rotary(layers, plan.device)
        self.norm = nn.RMSNorm(width, layers.rms_norm_eps)
        self.embed_tokens = nn.Embedding(shapes[_TABLE][0], width) if _TABLE in shapes else None
        self.lm_head = nn.Linear(width, shapes[_HEAD][0], bias=False) if _HEAD in shapes else None
        self.logit_scale: float = plan.options.logit_scale

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        logits: Tensor = parts.logits(normed) if self.lm_head is None else self.lm_head(normed)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale
