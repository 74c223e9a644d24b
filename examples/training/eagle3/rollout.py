"""Run all draft steps of an EAGLE-3 head after every token of a text at once."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from hf_speculate.options.heads.eagle3 import Eagle3Network
from hf_speculate.options.heads.layers import Rotation


def rollout(
    network: Eagle3Network, table: Tensor, ids: Tensor, states: Tensor, num_steps: int
) -> list[Tensor]:
    """Return the logits of each draft step after every token of a text.

    The tokens of the text serve as drafts. The chain of pair i begins with the pairs up to i, with
    states of the target. Step k adds a pair of token i+k and the output of the head at the previous
    pair.

    Args:
        network: one-layer network.
        table: [V, H], embeddings of the target.
        ids: [R, W] int64.
        states: [R, W-1, A * H], where state i is that of the target at token i.
        num_steps: K.

    Returns:
        K tensors; tensor k (from 1) is [R, W-k, Vd], and its column i predicts token i+k+1.
    """
    states = network.project(states)  # [R, W-1, H]
    all_logits: list[Tensor] = []
    keys: list[Tensor] = []  # by step, [R, heads, W-k, D]
    values: list[Tensor] = []
    for step in range(1, num_steps + 1):
        num_pairs = ids.shape[1] - step
        states, keys, values = (
            states[:, :num_pairs],
            [step_states[:, :, :num_pairs] for step_states in keys],
            [step_states[:, :, :num_pairs] for step_states in values],
        )
        positions = torch.arange(step - 1, step - 1 + num_pairs).expand(len(ids), -1)
        rotation = network.rotary(positions, states.dtype)
        states = _layer(
            network.layers[0], embedding(ids[:, step:], table), states, rotation, keys, values
        )
        all_logits.append(network.lm_head(network.norm(states)))
    return all_logits


def _layer(
    layer: nn.Module,
    embeddings: Tensor,
    states: Tensor,
    rotation: Rotation,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """Return the output [R, N, H] at the newest pair of every chain; append its keys and values."""
    attention, normed = layer.self_attn, layer.hidden_norm(states)
    pairs = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
    queries = attention.queries(pairs, rotation)  # [R, g * heads, N, D]
    own_keys, own_values = attention.keys_values(pairs, rotation)
    keys.append(own_keys)
    values.append(own_values)
    attended = attend_chains(queries, keys, values).transpose(1, 2).flatten(2)
    residual = (normed if layer.norm_before_residual else states) + attention.o_proj(attended)
    return residual + layer.mlp(layer.post_attention_layernorm(residual))


def attend_chains(queries: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attend chain i to pairs of the first step up to i, and to its own pair in every later step.

    Args:
        queries: [R, g * heads, N, D].
        keys: by step, [R, heads, N, D].
        values: by step, [R, heads, N, D].

    Returns:
        [R, g * heads, N, D].
    """
    groups, num_pairs = queries.shape[1] // keys[0].shape[1], queries.shape[2]
    keys, values = (
        [step_states.repeat_interleave(groups, dim=1) for step_states in by_step]
        for by_step in (keys, values)
    )
    hidden = torch.ones(num_pairs, num_pairs, dtype=torch.bool).triu(1)
    # [R, g * heads, N, N]
    scores = (queries @ keys[0].transpose(2, 3)).masked_fill(hidden, -torch.inf)
    later_scores = [(queries * step_states).sum(-1, keepdim=True) for step_states in keys[1:]]
    weights = (torch.cat([scores, *later_scores], dim=-1) / queries.shape[-1] ** 0.5).softmax(
        dim=-1
    )
    output = weights[..., :num_pairs] @ values[0]
    for step, step_states in enumerate(values[1:]):
        output = output + weights[..., num_pairs + step, None] * step_states
    return output
