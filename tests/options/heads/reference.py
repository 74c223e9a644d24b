"""Compute draft heads in float64 without caches: every draft step reads the whole text.

The code follows the descriptions of the formats and shares nothing with the package. It processes
one row at a time.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from tests.options.heads.designs import Design, make_weights, write_speculators
from tests.options.heads.rounds import states_of

EPS = 1e-5


class Reference:
    """Reference that recomputes the distributions of a head from the whole text."""

    def __init__(self, design: Design, weights: dict[str, Tensor], table: Tensor, head: Tensor):
        self.design, self.options = design, design.options
        named = {name.replace("mtp_layers.", "layers."): weight for name, weight in weights.items()}
        self.weights = {
            name: weight.double() for name, weight in named.items() if weight.is_floating_point()
        }
        self.table, self.head = table.double(), head.double()
        # Replacements for token embeddings, keyed by token number.
        self.merged: dict[int, Tensor] = {}
        # Positions [3, T] of the tokens in time, height and width; None for one axis.
        self.axes: Tensor | None = None

    def logits(self, text: list[int], states: Tensor, drafted: list[int], num: int) -> Tensor:
        """Return scores [num, Vd] for draft steps, given the previously drafted tokens."""
        match self.design.kind:
            case "eagle3":
                return self._chain(text, self._fused(states), drafted, num, self._eagle)
            case "mtp":
                return self._chain(text, states, drafted, num, self._mtp)
            case "peagle":
                slots = self.weights["mask_hidden"][0].expand(num - 1, -1)
                ids = text[1:] + [self.options["mask_token_id"]] * (num - 1)
                return self._eagle(ids, self._fused(torch.cat([states, slots])))[0][-num:]
            case _:
                first = 0 if self.options.get("sample_from_anchor") else 1
                hidden = self._block(text, states)[first : first + num]
                scores = self._scored(hidden)
                if self.design.kind == "dflash2":
                    return self._selected(scores, hidden, [text[-1], *drafted[: num - 1]])
                if not self.options.get("markov_rank"):
                    return scores
                bias = self._markov_bias(hidden, [text[-1], *drafted[: num - 1]])
                num_known = min(scores.shape[1], bias.shape[1])
                return scores[:, :num_known] + bias[:, :num_known]

    def _chain(
        self,
        text: list[int],
        states: Tensor,
        drafted: list[int],
        num: int,
        network: Callable[..., tuple],
    ) -> Tensor:
        own, scores = [], []
        for step in range(num):
            logits, fed_back = network(text[1:] + drafted[:step], torch.cat([states, *own]))
            scores.append(logits[-1])
            own.append(fed_back[-1:])
        return torch.stack(scores)

    def _following(self, ids: list[int]) -> Tensor:
        """Return the embeddings [T, H] of the tokens after the first."""
        rows = [
            self.merged.get(number, row) for number, row in enumerate(self._embedded(ids), start=1)
        ]
        return torch.stack(rows)

    def _eagle(self, ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        normed, positions = self._normed(states, "layers.0.hidden_norm"), torch.arange(len(states))
        joined = torch.cat(
            [self._normed(self._following(ids), "layers.0.input_layernorm"), normed], -1
        )
        residual = normed if self.options.get("norm_before_residual") else states
        hidden = self._finished(residual, joined, joined, positions, 0)
        for index in range(1, self.design.num_layers):
            hidden = self._ordinary(hidden, hidden[:0], positions, index)
        normed = self._normed(hidden, "norm")
        return self._scored(normed), normed if self.options.get("norm_output") else hidden

    def _mtp(self, ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self._normed(self._embedded(ids), "layers.0.token_layernorm")
        joined = torch.cat([embeddings, self._normed(states, "layers.0.hidden_layernorm")], -1)
        joined = self._linear(joined, "layers.0.input_proj")
        hidden = self._ordinary(joined, states[:0], torch.arange(len(states)), 0)
        normed = self._normed(hidden, "layers.0.final_layernorm")
        return self._scored(normed), normed

    def confidences(self, text: list[int], states: Tensor, drafted: list[int], num: int) -> Tensor:
        """Return DSpark's estimates [num] that the target will keep each drafted token."""
        features = self._block(text, states)[:num]
        if self.options["confidence_head_with_markov"]:
            previous = torch.tensor([text[-1], *drafted[: num - 1]])
            features = torch.cat(
                [features, self.weights["markov_head.markov_w1.weight"][previous]], -1
            )
        return self._linear(features, "confidence_head.proj")[:, 0].sigmoid()

    def _block(self, text: list[int], states: Tensor) -> Tensor:
        """Return the states [b, H] after the final norm."""
        context = self._normed(self._linear(states, "fc"), "hidden_norm")
        ids = [text[-1]] + [self.options["mask_token_id"]] * (self.design.block_size - 1)
        hidden, positions = self._embedded(ids), torch.arange(len(states) + len(ids))
        for index in range(self.design.num_layers):
            layer = self._convolved if self.design.kind == "dflash2" else self._ordinary
            hidden = layer(hidden, context, positions, index)
        return self._normed(hidden, "norm")

    def _convolved(self, hidden: Tensor, context: Tensor, positions: Tensor, index: int) -> Tensor:
        """Apply a DFlash 2 layer, which has a convolution on each side of its sublayers."""
        name = f"layers.{index}"
        normed = self._normed(hidden, f"{name}.input_layernorm")
        asking = self._convolution(normed, normed, f"{name}.attention_conv", 0)
        attended = self._attended(asking, torch.cat([context, asking]), positions, index)
        hidden = hidden + self._convolution(attended, normed, f"{name}.attention_conv", 1)
        normed = self._normed(hidden, f"{name}.post_attention_layernorm")
        fed = self._fed_forward(self._convolution(normed, normed, f"{name}.mlp_conv", 0), name)
        return hidden + self._convolution(fed, normed, f"{name}.mlp_conv", 1)

    def _convolution(self, states: Tensor, normed: Tensor, name: str, side: int) -> Tensor:
        base, projection = (
            self.weights[f"{name}.{part}"] for part in ("base_kernel", "kernel_projection.weight")
        )
        num_taps, width = base.shape[1:]
        channels, size = torch.arange(width), self.options["conv_group_size"]
        result = torch.zeros_like(states)
        for slot in range(len(states)):
            for tap in range(min(num_taps, slot + 1)):
                rows = (side * num_taps + tap) * (width // size) + channels // size
                result[slot] += (base[side, tap] + projection[rows] @ normed[slot]) * states[
                    slot - tap
                ]
        return result

    def _selected(self, scores: Tensor, hidden: Tensor, previous: list[int]) -> Tensor:
        """Return the scores of each slot's best tokens plus the previous token's bonus, or -inf."""
        prefix, rank = "candidate_selector.", self.options["selector_rank"]
        before, after = (
            self.weights[f"{prefix}{name}_codebook"] for name in ("predecessor", "successor")
        )
        features = self._linear(hidden, f"{prefix}hidden_projection")
        selected = torch.full_like(scores, -torch.inf)
        for slot, token in enumerate(previous):
            order = sorted(range(scores.shape[1]), key=lambda one: -float(scores[slot, one]))
            for one in order[: self.options["selector_top_k"]]:
                bonus = sum(
                    before[token, dim] * features[slot, dim] * after[one, dim]
                    for dim in range(rank)
                )
                selected[slot, one] = scores[slot, one] + bonus
        return selected

    def _markov_bias(self, hidden: Tensor, previous: list[int]) -> Tensor:
        rows, memory = [], torch.zeros(self.options["markov_rank"], dtype=torch.float64)
        for state, token in zip(hidden, previous, strict=True):
            latent = self.weights["markov_head.markov_w1.weight"][
                min(token, self.design.vocab_size - 1)
            ]
            match self.options.get("markov_head_type"):
                case "gated":
                    gate = self._linear(torch.cat([state, latent]), "markov_head.gate_proj")
                    latent = latent * gate.sigmoid()
                case "rnn":
                    joint = self._linear(
                        torch.cat([memory, latent, state]), "markov_head.joint_proj"
                    )
                    gate, candidate, output = joint.chunk(3)
                    memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
                    latent = output.tanh()
            rows.append(self._linear(latent, "markov_head.markov_w2"))
        return torch.stack(rows)

    def _fused(self, states: Tensor) -> Tensor:
        if self.options.get("norm_before_fc"):
            states = self._normed(states, "input_norm")
        if self.options.get("fc_norm"):
            parts = states.split(self.design.target_hidden_size, -1)
            states = torch.cat(
                [self._normed(part, f"fc_norm.{index}") for index, part in enumerate(parts)], -1
            )
        return self._linear(states, "fc") if "fc.weight" in self.weights else states

    def _embedded(self, ids: list[int]) -> Tensor:
        table = self.weights.get("embed_tokens.weight", self.table)
        return table[torch.tensor(ids).clamp_max(len(table) - 1)]

    def _scored(self, normed: Tensor) -> Tensor:
        logits = normed @ self.weights.get("lm_head.weight", self.head).T
        return logits * self.options.get("logit_scale", 1.0)

    def _ordinary(self, hidden: Tensor, context: Tensor, positions: Tensor, index: int) -> Tensor:
        """Apply a pre-norm layer; keys and values of the context come first and are not normed."""
        normed = self._normed(hidden, f"layers.{index}.input_layernorm")
        return self._finished(hidden, normed, torch.cat([context, normed]), positions, index)

    def _finished(
        self, residual: Tensor, asking: Tensor, read: Tensor, positions: Tensor, index: int
    ) -> Tensor:
        """Return the residual stream after the MLP and after attention from the last positions."""
        hidden = residual + self._attended(asking, read, positions, index)
        return hidden + self._fed_forward(
            self._normed(hidden, f"layers.{index}.post_attention_layernorm"), f"layers.{index}"
        )

    def _fed_forward(self, normed: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return self._linear(silu(gate) * up, f"{name}.mlp.down_proj")

    def _attended(self, asking: Tensor, read: Tensor, positions: Tensor, index: int) -> Tensor:
        """Return the attention output for the last positions, which attend to all positions."""
        design, name = self.design, f"layers.{index}"
        at = positions[len(read) - len(asking) :]
        queries, keys, values = (
            self._linear(source, f"{name}.self_attn.{part}_proj").unflatten(
                -1, (-1, design.head_dim)
            )
            for part, source in (("q", asking), ("k", read), ("v", read))
        )
        if design.has_head_norms:
            queries, keys = (
                self._normed(heads, f"{name}.self_attn.{part}_norm")
                for part, heads in (("q", queries), ("k", keys))
            )
        queries, keys = self._turned(queries, at), self._turned(keys, positions)
        queries, keys, values = (heads.transpose(0, 1) for heads in (queries, keys, values))
        visible = self._visible(at, positions, index)
        mixed = scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, enable_gqa=True
        )
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")

    def _visible(self, at: Tensor, of: Tensor, index: int) -> Tensor:
        design, ahead, window = self.design, of - at[:, None], None
        if design.layer_types is not None and design.layer_types[index] == "sliding_attention":
            window = design.sliding_window
        is_block, sees_ahead = (
            design.kind in ("dflash", "dflash2", "dspark"),
            design.kind == "dflash2",
        )
        sees_ahead = self.options.get("sliding_window_non_causal", sees_ahead)
        is_causal = not is_block or (window is not None and not sees_ahead)
        visible = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
        return visible if window is None else visible & (ahead.abs() < window)

    def _turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Apply the rotary embedding; angles are in float32, as in every implementation."""
        design = self.design
        width = int(design.head_dim * design.rope.get("partial_rotary_factor", 1.0))
        frequencies = 1.0 / (
            design.rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        )
        columns = [self._on_axis(positions, index) for index in range(len(frequencies))]
        angles = torch.stack(columns, dim=-1).float() * frequencies
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        first, second = heads[..., : width // 2], heads[..., width // 2 : width]
        return torch.cat(
            [first * cos - second * sin, second * cos + first * sin, heads[..., width:]], -1
        )

    def _on_axis(self, positions: Tensor, index: int) -> Tensor:
        """Return the positions along the axis that this frequency index belongs to."""
        if self.axes is None:
            return positions
        rope = self.design.rope["rope_scaling"]
        num_t, num_h, num_w = rope["mrope_section"]
        if rope.get("mrope_interleaved"):
            axis = (
                1
                if index % 3 == 1 and index < 3 * num_h
                else 2
                if index % 3 == 2 and index < 3 * num_w
                else 0
            )
        else:
            axis = 0 if index < num_t else 1 if index < num_t + num_h else 2
        return self.axes[axis, positions]

    def _normed(self, states: Tensor, name: str) -> Tensor:
        return rms_norm(states, states.shape[-1:], self.weights[f"{name}.weight"], EPS)

    def _linear(self, states: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(
            states, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )


RIDGE = 1e-4


@torch.no_grad()
def write_fitted(
    folder: Path,
    design: Design,
    target: PreTrainedModel,
    inputs: dict[str, Tensor],
    num_new: int,
    num_steps: int = 3,
) -> tuple[Path, dict[str, Tensor]]:
    """Write a head fitted to the target's greedy texts except some tokens; return both.

    Its `lm_head` is the ridge regression of the target's logits along the texts.
    """
    texts = target.generate(**inputs, max_new_tokens=num_new)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, num_new), value=1)
    weights, features, wanted = make_weights(design), [], []
    reference = Reference(
        design, weights, target.get_input_embeddings().weight, target.get_output_embeddings().weight
    )
    reference.weights["lm_head.weight"] = torch.eye(design.hidden_size, dtype=torch.float64)
    for text in (ids[own.argmax() :].tolist() for ids, own in zip(texts, mask, strict=True)):
        logits = target(torch.tensor([text])).logits[0].double()
        states = states_of(target, text, design.aux_layers)
        for num in range(2, len(text) - num_steps):
            features.append(reference.logits(text[:num], states[: num - 1], text[num:], num_steps))
            wanted.append(logits[num - 1 : num - 1 + num_steps])
    x, y = (
        torch.cat(features),
        torch.cat(wanted)[:, list(design.draft_ids or range(design.vocab_size))],
    )
    penalty = RIDGE * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    weights["lm_head.weight"] = torch.linalg.solve(x.T @ x + penalty, x.T @ y).T.float()
    return write_speculators(folder, design, weights), {"input_ids": texts, "attention_mask": mask}
