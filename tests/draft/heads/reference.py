"""Draft heads without caches in float64: every draft step runs over the whole text from scratch.

Written from the formats' descriptions alone; shares no code with the package. One row at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.draft.heads.designs import Design

EPS = 1e-5


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


class Reference:
    """A head's distributions, recomputed from the whole text."""

    def __init__(self, design: Design, weights: dict[str, Tensor], table: Tensor, head: Tensor):
        self.design = design
        self.weights = {name: weight.double() for name, weight in weights.items() if weight.is_floating_point()}
        self.table, self.head = table.double(), head.double()

    def logits(self, text: list[int], states: Tensor, drafted: list[int], num: int) -> Tensor:
        """[num, Vd], what draft step k scores, given the tokens drafted before it."""
        match self.design.kind:
            case "eagle3":
                return self._chain(text, self._fused(states), drafted, num, self._eagle)
            case "mtp":
                return self._chain(text, states, drafted, num, self._mtp)
            case "peagle":
                return self._parallel(text, states, num)
            case _:
                return self._block(text, states, drafted, num)

    def _chain(
        self, text: list[int], states: Tensor, drafted: list[int], num: int, network: Callable[..., tuple]
    ) -> Tensor:
        own, scores = [], []
        for step in range(num):
            pairs = torch.cat([states, *own])
            logits, fed_back = network(text[1:] + drafted[:step], pairs)
            scores.append(logits[-1])
            own.append(fed_back[-1:])
        return torch.stack(scores)

    def _eagle(self, ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._eagle_layers(self._embedded(ids), states)
        normed = norm(outputs, self.weights["norm.weight"])
        return self._scored(normed), normed if self.design.options.get("norm_output") else outputs

    def _eagle_layers(self, embeddings: Tensor, states: Tensor) -> Tensor:
        weights = self._layer(0)
        normed = norm(states, weights["hidden_norm.weight"])
        joined = torch.cat([norm(embeddings, weights["input_layernorm.weight"]), normed], -1)
        residual = normed if self.design.options.get("norm_before_residual") else states
        positions = torch.arange(len(states))
        hidden = residual + self._attended(joined, joined, positions, positions, 0)
        hidden = hidden + self._mlp(norm(hidden, weights["post_attention_layernorm.weight"]), 0)
        for index in range(1, self.design.num_layers):
            hidden = self._ordinary(hidden, hidden[:0], positions, index)
        return hidden

    def _mtp(self, ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        weights = {name.removeprefix("mtp_layers.0."): weight for name, weight in self.weights.items()}
        embeddings = norm(self.table[torch.tensor(ids)], weights["token_layernorm.weight"])
        joined = torch.cat([embeddings, norm(states, weights["hidden_layernorm.weight"])], -1)
        hidden = self._ordinary(joined @ weights["input_proj.weight"].T, states[:0], torch.arange(len(states)), 0)
        normed = norm(hidden, weights["final_layernorm.weight"])
        return normed @ self.head.T, normed

    def _parallel(self, text: list[int], states: Tensor, num: int) -> Tensor:
        slots = self.weights["mask_hidden"][0].expand(num - 1, -1)
        ids = text[1:] + [self.design.options["mask_token_id"]] * (num - 1)
        outputs = self._eagle_layers(self._embedded(ids), self._fused(torch.cat([states, slots])))
        return self._scored(norm(outputs[-num:], self.weights["norm.weight"]))

    def _block(self, text: list[int], states: Tensor, drafted: list[int], num: int) -> Tensor:
        first = 0 if self.design.options.get("sample_from_anchor") else 1
        hidden = self._block_states(text, states)[first : first + num]
        logits = self._scored(hidden)
        if not self.design.options.get("markov_rank"):
            return logits
        return logits + self._markov_bias(hidden, [text[-1], *drafted[: num - 1]])

    def confidences(self, text: list[int], states: Tensor, drafted: list[int], num: int) -> Tensor:
        """[num], DSpark's estimates that the target keeps each drafted token."""
        features = self._block_states(text, states)[:num]
        if self.design.options["confidence_head_with_markov"]:
            previous = torch.tensor([text[-1], *drafted[: num - 1]])
            features = torch.cat([features, self.weights["markov_head.markov_w1.weight"][previous]], -1)
        weight, bias = self.weights["confidence_head.proj.weight"], self.weights["confidence_head.proj.bias"]
        return (features @ weight.T + bias)[:, 0].sigmoid()

    def _block_states(self, text: list[int], states: Tensor) -> Tensor:
        weights = self.weights
        context = norm(states @ weights["fc.weight"].T, weights["hidden_norm.weight"])
        ids = [text[-1]] + [self.design.options["mask_token_id"]] * (self.design.block_size - 1)
        hidden, positions = self._embedded(ids), torch.arange(len(states) + len(ids))
        for index in range(self.design.num_layers):
            hidden = self._ordinary(hidden, context, positions, index)
        return norm(hidden, weights["norm.weight"])

    def _markov_bias(self, hidden: Tensor, previous: list[int]) -> Tensor:
        weights, rows = self.weights, []
        memory = torch.zeros(self.design.options["markov_rank"], dtype=torch.float64)
        for state, token in zip(hidden, previous, strict=True):
            latent = weights["markov_head.markov_w1.weight"][token]
            match self.design.options.get("markov_head_type"):
                case "gated":
                    gate = weights["markov_head.gate_proj.weight"] @ torch.cat([state, latent])
                    latent = latent * (gate + weights["markov_head.gate_proj.bias"]).sigmoid()
                case "rnn":
                    joint = weights["markov_head.joint_proj.weight"] @ torch.cat([memory, latent, state])
                    gate, candidate, output = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
                    memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
                    latent = output.tanh()
            rows.append(weights["markov_head.markov_w2.weight"] @ latent)
        return torch.stack(rows)

    def _fused(self, states: Tensor) -> Tensor:
        options, weights = self.design.options, self.weights
        if options.get("norm_before_fc"):
            states = norm(states, weights["input_norm.weight"])
        if options.get("fc_norm"):
            parts = states.split(self.design.target_hidden_size, -1)
            states = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return states @ weights["fc.weight"].T if "fc.weight" in weights else states

    def _embedded(self, ids: list[int]) -> Tensor:
        return self.weights.get("embed_tokens.weight", self.table)[torch.tensor(ids)]

    def _scored(self, normed: Tensor) -> Tensor:
        logits = normed @ self.weights.get("lm_head.weight", self.head).T
        return logits * self.design.options.get("logit_scale", 1.0)

    def _layer(self, index: int) -> dict[str, Tensor]:
        prefix = "mtp_layers." if self.design.kind == "mtp" else "layers."
        return {name.removeprefix(f"{prefix}{index}."): weight for name, weight in self.weights.items()}

    def _ordinary(self, hidden: Tensor, context: Tensor, positions: Tensor, index: int) -> Tensor:
        """A pre-norm layer; keys and values of the context come first and are not normed."""
        weights = self._layer(index)
        normed = norm(hidden, weights["input_layernorm.weight"])
        read = torch.cat([context, normed])
        hidden = hidden + self._attended(normed, read, positions[len(context) :], positions, index)
        return hidden + self._mlp(norm(hidden, weights["post_attention_layernorm.weight"]), index)

    def _mlp(self, hidden: Tensor, index: int) -> Tensor:
        weights = self._layer(index)
        gate = hidden @ weights["mlp.gate_proj.weight"].T
        return (gate * gate.sigmoid() * (hidden @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T

    def _attended(self, asking: Tensor, read: Tensor, at: Tensor, of: Tensor, index: int) -> Tensor:
        design, weights = self.design, self._layer(index)
        queries, keys, values = (
            self._heads(source, name, index) for source, name in ((asking, "q"), (read, "k"), (read, "v"))
        )
        if design.has_head_norms:
            queries, keys = (
                norm(queries, weights["self_attn.q_norm.weight"]),
                norm(keys, weights["self_attn.k_norm.weight"]),
            )
        queries, keys = self._turned(queries, at), self._turned(keys, of)
        scores = torch.einsum("qhd,khd->hqk", queries, self._repeated(keys)) / design.head_dim**0.5
        scores = scores.masked_fill(~self._visible(at, of, index), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), self._repeated(values))
        return mixed.flatten(1) @ weights["self_attn.o_proj.weight"].T

    def _visible(self, at: Tensor, of: Tensor, index: int) -> Tensor:
        design, ahead = self.design, of - at[:, None]
        window = None
        if design.layer_types is not None and design.layer_types[index] == "sliding_attention":
            window = design.sliding_window
        is_block = design.kind in ("dflash", "dspark")
        is_causal = not is_block or (window is not None and not design.options.get("sliding_window_non_causal"))
        visible = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
        return visible if window is None else visible & (ahead.abs() < window)

    def _heads(self, states: Tensor, name: str, index: int) -> Tensor:
        weights = self._layer(index)
        heads = states @ weights[f"self_attn.{name}_proj.weight"].T
        bias = weights.get(f"self_attn.{name}_proj.bias")
        return (heads if bias is None else heads + bias).unflatten(-1, (-1, self.design.head_dim))

    def _repeated(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(self.design.num_heads // self.design.num_kv_heads, 1)

    def _turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding; angles in float32, as every implementation computes them."""
        design = self.design
        width = int(design.head_dim * design.rope.get("partial_rotary_factor", 1.0))
        frequencies = 1.0 / (design.rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        first, second = heads[..., : width // 2], heads[..., width // 2 : width]
        turned = [first * cos - second * sin, second * cos + first * sin, heads[..., width:]]
        return torch.cat(turned, -1)
