"""Collects what `generate()` returns, row by row and token by token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_speculate.types import Scored

LayerStates = tuple[Tensor, ...]
GenerateOutput = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput  # of plain decoding


@dataclass(frozen=True)
class Recorded:
    """Which outputs the call asked for."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False


class OutputRecorder:
    """Keeps each row's new tokens and what belongs to each of them.

    Args:
        batch_size: B rows, in the order of the output.
        recorded: what to keep beside the tokens.
    """

    def __init__(self, batch_size: int, recorded: Recorded):
        self.recorded = recorded
        self.new_ids: list[list[int]] = [[] for _ in range(batch_size)]
        self._scores: list[list[Tensor]] = [[] for _ in range(batch_size)]  # each [V] float32
        self._logits: list[list[Tensor]] = [[] for _ in range(batch_size)]  # each [V] float32
        self.hidden_states: list[LayerStates] = []  # one entry per token
        self.attentions: list[LayerStates] = []

    def add_row(self, row: int, token_ids: list[int], scores: Tensor | None, logits: Tensor | None) -> None:
        """Append a row's tokens.

        Args:
            row: the row's place in the output.
            token_ids: N ids.
            scores: [>= N, V] float32, processed logits of these positions; None where not recorded.
            logits: [>= N, V], the model's own; None where not recorded.
        """
        self.new_ids[row] += token_ids
        num = len(token_ids)
        if scores is not None:
            self._scores[row] += scores[:num].to(torch.float32, copy=True).unbind(0)
        if logits is not None:
            self._logits[row] += logits[:num].to(torch.float32, copy=True).unbind(0)

    def add_states(self, output: Scored, num_tokens: int, num_query: int, windows: list[int | None]) -> None:
        """Append one row's hidden states and attentions, token by token as plain `generate` gives them.

        Args:
            output: of a forward of `num_query` tokens; the last `num_tokens` or more of them chose the new tokens.
            num_tokens: how many positions, from `output`'s first scored one, to keep.
            num_query: Q; the prompt's own forward keeps all Q positions in one entry.
            windows: each layer's sliding window, None where it attends to everything.
        """
        for position in range(num_tokens):
            if self.recorded.hidden_states and output.hidden_states is not None:
                self.hidden_states.append(tuple(layer[:, position : position + 1] for layer in output.hidden_states))
            if self.recorded.attentions and output.attentions is not None:
                layers = zip(output.attentions, windows, strict=True)
                self.attentions.append(
                    tuple(_attention_row(layer, position, num_query, window) for layer, window in layers)
                )

    def add_prompt_states(self, output: Scored) -> None:
        """Append the prompt's own forward as one entry."""
        if self.recorded.hidden_states and output.hidden_states is not None:
            self.hidden_states.append(output.hidden_states)
        if self.recorded.attentions and output.attentions is not None:
            self.attentions.append(output.attentions)

    def truncate(self, num_new_tokens: int) -> None:
        """Keep at most so many new tokens of every row."""
        for kept in (self.new_ids, self._scores, self._logits):
            for row in kept:
                del row[num_new_tokens:]
        del self.hidden_states[num_new_tokens:], self.attentions[num_new_tokens:]

    def sequences(self, input_ids: Tensor, pad_token_id: int) -> Tensor:
        """[B, T + longest row] int64: the prompt and the new tokens, shorter rows padded on the right."""
        longest = max((len(row) for row in self.new_ids), default=0)
        rows = [row + [pad_token_id] * (longest - len(row)) for row in self.new_ids]
        new_ids = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)  # [B, N]
        return torch.cat([input_ids, new_ids], dim=1)

    def output(self, input_ids: Tensor, pad_token_id: int, cache: Cache) -> GenerateOutput:
        """All that was asked for, as plain `generate` returns it.

        Args:
            input_ids: [B, T] int64, the prompts.
            pad_token_id: what fills ended rows.
            cache: the target's.
        """
        parts: dict[str, Any] = {
            "sequences": self.sequences(input_ids, pad_token_id),
            "scores": self.scores(pad_token_id),
            "logits": self.logits(pad_token_id),
            "past_key_values": cache,
        }
        if isinstance(cache, EncoderDecoderCache):
            return GenerateEncoderDecoderOutput(**parts)
        return GenerateDecoderOnlyOutput(
            **parts,
            attentions=tuple(self.attentions) if self.recorded.attentions else None,  # type: ignore[arg-type]
            hidden_states=tuple(self.hidden_states) if self.recorded.hidden_states else None,  # type: ignore[arg-type]
        )

    def scores(self, pad_token_id: int) -> tuple[Tensor, ...] | None:
        """One [B, V] float32 per new token; an ended row holds 0 at the pad id and -inf elsewhere."""
        return _by_position(self._scores, pad_token_id) if self.recorded.scores else None

    def logits(self, pad_token_id: int) -> tuple[Tensor, ...] | None:
        """As `scores`, for the model's own logits."""
        return _by_position(self._logits, pad_token_id) if self.recorded.logits else None


def _by_position(rows: list[list[Tensor]], pad_token_id: int) -> tuple[Tensor, ...]:
    ended = torch.full_like(rows[0][0], -torch.inf)
    if pad_token_id < len(ended):  # a pad token may have been added without resizing the model
        ended[pad_token_id] = 0.0
    longest = max(len(row) for row in rows)
    return tuple(
        torch.stack([row[position] if position < len(row) else ended for row in rows]) for position in range(longest)
    )


def _attention_row(layer: Tensor, position: int, num_query: int, window: int | None) -> Tensor:
    """[1, H, 1, T]: what one query attended to, out of [1, H, Q, T + Q]."""
    end = layer.shape[-1] - num_query + position + 1
    start = 0 if window is None else max(end - window, 0)
    return layer[:, :, position : position + 1, start:end]


def recorded_of(generation_config: GenerationConfig) -> Recorded:
    """What a call wants recorded.

    Args:
        generation_config: with every default filled in.
    """
    if not generation_config.return_dict_in_generate:
        return Recorded()
    return Recorded(
        scores=bool(generation_config.output_scores),
        logits=bool(generation_config.output_logits),
        hidden_states=bool(generation_config.output_hidden_states),
        attentions=bool(generation_config.output_attentions),
    )
