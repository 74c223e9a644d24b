"""A Gemma 4 assistant: a small transformers model over its target's keys and values.

For one row, let n be the number of tokens read by the target, h the target's state after the final
norm at the last of them, and t the newest token:

    x = pre_projection([E(t), h]),    z = norm(layers(x))
    logits = lm_head(z),    h' = post_projection(z)

E is the target's scaled embedding table. The layers compute no keys and values. Each attends to the
n tokens in the target's last layer of the same type that stores its states. For the next step, the
drafted token replaces t and h' replaces h. The query stays at one position, and drafted tokens
reach it only through h.

With ordered embeddings, the assistant scores, for each row, only the tokens of the m centroids
whose inner products with z are largest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.compat import attention_name
from hf_speculate.draft.vocab_mapping import MAX_PADDING
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.models.language_model import device_of, dtype_of, plain_weight, vocab_size_of
from hf_speculate.models.module_walk import weight_bytes

LAST_READ, NEWEST = -1, 0  # position of the query minus n: last token read, or newest token
_TARGET_TYPES = ("gemma4_text", "gemma4_unified_text")
_ATTENTIONS = ("sdpa", "eager")  # for masks [B, 1, 1, T]
_SLIDING = "sliding_attention"


class Context(NamedTuple):
    """The target's states for one round's queries."""

    # keys and values [B, H, T, D] of the target, by layer type
    states: dict[str, tuple[Tensor, Tensor]]
    # additive masks [B or 1, 1, 1, T] by layer type; None if all columns are visible
    masks: dict[str, Tensor | None]
    positions: Tensor  # [B or 1, 1] int64, positions of the queries


class Gemma4Assistant:
    """A Gemma 4 assistant for its target.

    Pass this object or the model itself as `assistant_model`.

    Args:
        model: transformers' assistant, in the target's dtype and on its device.
        position: position of the query minus the number of tokens read by the target: -1 as in
            servers, or 0 as in transformers. `check_positions` measures both.

    Raises:
        ConfigError: the position is neither -1 nor 0.
        UnsupportedModelError: the attention implementation does not support a mask per row.
    """

    draft_source = "gemma4_assistant"  # name of its kind of draft source

    def __init__(self, model: PreTrainedModel, position: int = LAST_READ):
        if position not in (LAST_READ, NEWEST):
            raise ConfigError(
                f"position must be {LAST_READ} or {NEWEST}, got {position}; leave it out for "
                f"{LAST_READ}, and measure "
                "both with check_positions"
            )
        self.model: Any = model
        self.position = position
        self.config = model.config.get_text_config(decoder=True)
        if attention_name(self.config) not in _ATTENTIONS:
            raise UnsupportedModelError(
                f"the attention implementation of {type(model).__name__} must be "
                f"{' or '.join(_ATTENTIONS)}, got "
                f"{attention_name(self.config)!r}, which takes no mask for each row; load it with "
                "attn_implementation='sdpa'"
            )

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def windows(self) -> dict[str, int | None]:
        """Attention window by layer type, in tokens; None for full attention."""
        types = dict.fromkeys(self.config.layer_types)
        return {
            layer_type: self.config.sliding_window if layer_type == _SLIDING else None
            for layer_type in types
        }

    @property
    def num_step_bytes(self) -> int:
        """Size in bytes of the weights read by one step.

        For ordered embeddings, only the share of centroids that a step reads counts.
        """
        model, embedder = self.model, self.model.masked_embedding
        tables = {
            id(weight)
            for module in (model.lm_head, model.model.embed_tokens)
            for weight in module.parameters()
        }
        others = sum(
            weight_bytes(weight) for weight in model.parameters() if id(weight) not in tables
        )
        share = (
            1.0
            if embedder is None
            else embedder.centroid_intermediate_top_k / embedder.num_centroids
        )
        return others + int(sum(map(weight_bytes, model.lm_head.parameters())) * share)

    def sources(self, target: PreTrainedModel) -> dict[str, int]:
        """Return the index of the target's last layer that stores its states, by layer type.

        Only layer types of both the assistant and the target are listed.
        """
        text = target.config.get_text_config(decoder=True)
        storing = text.layer_types[: text.num_hidden_layers - text.num_kv_shared_layers]
        last = {layer_type: index for index, layer_type in enumerate(storing)}
        return {layer_type: last[layer_type] for layer_type in self.windows if layer_type in last}

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise `UnsupportedModelError` if the assistant cannot draft for a target."""
        text = target.config.get_text_config(decoder=True)
        problems = [f"it reads states of Gemma 4, and the target is of type {text.model_type}"]
        if text.model_type in _TARGET_TYPES:
            problems = self._problems_with(target)
        if problems:
            raise UnsupportedModelError(
                f"assistant_model must be the assistant of its target {type(target).__name__}, got "
                f"{self.name}: "
                f"{'; '.join(problems)}; load the assistant of this target's checkpoint as the "
                "target is loaded"
            )

    def _problems_with(self, target: PreTrainedModel) -> list[str]:
        """Return why the assistant cannot draft for this target, in sentences; empty if it fits."""
        decoder: Any = target.get_decoder()
        text, problems = target.config.get_text_config(decoder=True), list[str]()
        width, sizes = (
            self.model.backbone_hidden_size,
            (int(self.config.vocab_size), vocab_size_of(target)),
        )
        if width != text.hidden_size:
            problems.append(
                f"it reads states of width {width}, and the target's are {text.hidden_size}"
            )
        if abs(sizes[0] - sizes[1]) > MAX_PADDING:
            problems.append(f"its vocabulary has {sizes[0]} tokens, and the target's {sizes[1]}")
        dtypes = [dtype_of(model) for model in (self.model, target)]
        if dtypes[0] != dtypes[1]:
            problems.append(f"it is in {dtypes[0]}, and the target in {dtypes[1]}")
        if tensor_parallel_size(target) > 1:
            problems.append("it reads whole keys, and each process has a part of the target's")
        sources = self.sources(target)
        attentions = {
            layer_type: decoder.layers[index].self_attn for layer_type, index in sources.items()
        }
        for index, layer_type in enumerate(self.config.layer_types):
            if layer_type not in sources:
                problems.append(
                    f"it reads a layer of type {layer_type}, and the target stores states of none"
                )
                continue
            draft_attention, target_attention = (
                self.model.model.layers[index].self_attn,
                attentions[layer_type],
            )
            shapes = _key_shape(draft_attention, self.config), _key_shape(target_attention, text)
            if shapes[0] != shapes[1]:
                problems.append(
                    f"it reads keys of {shapes[0]} (heads, width) in {layer_type}, and the "
                    f"target's are {shapes[1]}"
                )
        devices = {
            weight.device for attention in attentions.values() for weight in attention.parameters()
        }
        elsewhere = {device for device in devices if device.type != "meta"} - {
            device_of(self.model)
        }
        if elsewhere:
            problems.append(
                f"it is on {device_of(self.model)}, and keys that it reads on "
                f"{', '.join(map(str, elsewhere))}"
            )
        return list(dict.fromkeys(problems))

    def step(self, embeddings: Tensor, states: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return logits [B, V] after a token, and states [B, D] for the next step.

        Logits of unscored tokens are -inf.

        Args:
            embeddings: [B, D], the target's embeddings of the token.
            states: [B, D], of the token before: the target's after the final norm, or those
                returned by the previous step.
            context: the target's states for the round.
        """
        model = self.model
        output = model.model(
            # [B, 1, H]
            inputs_embeds=model.pre_projection(torch.cat([embeddings, states], dim=-1)[:, None]),
            attention_mask=context.masks,
            position_ids=context.positions,
            shared_kv_states=context.states,
            use_cache=False,
        )
        normed = output.last_hidden_state[:, 0]  # [B, H]
        return self._logits(normed), model.post_projection(normed)

    def _logits(self, normed: Tensor) -> Tensor:
        embedder, head = self.model.masked_embedding, self.model.lm_head
        if embedder is None:
            logits: Tensor = head(normed)
            cap = self.config.final_logit_softcapping
            return logits if cap is None else torch.tanh(logits / cap) * cap
        # [B, m]
        best = embedder.centroids(normed).topk(embedder.centroid_intermediate_top_k).indices
        ids = embedder.token_ordering.view(embedder.num_centroids, -1)[best].flatten(1)  # [B, N]
        weight = plain_weight(head)
        if weight is None or weight.is_meta:  # only the module can read its rows
            all_logits: Tensor = head(normed)  # [B, V]
            return torch.full_like(all_logits, -torch.inf).scatter_(
                1, ids, all_logits.gather(1, ids)
            )
        scores: Tensor = (weight[ids] @ normed[..., None])[..., 0]  # [B, N]
        return scores.new_full((len(ids), weight.shape[0]), -torch.inf).scatter_(1, ids, scores)


def _key_shape(attention: Any, config: Any) -> Sequence[int]:
    """Return the number of heads and the width of the keys that an attention layer reads."""
    return config.num_attention_heads // attention.num_key_value_groups, attention.head_dim
