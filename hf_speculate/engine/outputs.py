"""Output recorder: collect the outputs of `generate()` by row and by token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.layers import windows_of
from hf_speculate.compat import CACHE_NAME
from hf_speculate.engine.call import Recorded
from hf_speculate.engine.observers import Observer
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.stage_clock import Stage
from hf_speculate.types import RoundRecord

LayerStates = tuple[Tensor, ...]
# outputs of plain decoding
GenerateOutput = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput


class OutputRecorder(Observer):
    """Observer that collects the outputs of `generate()`.

    It stores each row's new tokens with the requested scores and states.
    """

    stage = Stage.EMIT

    def __init__(
        self,
        row_ids: Sequence[int],
        recorded: Recorded,
        windows: Callable[[], Sequence[int | None]],
    ):
        self.recorded = recorded
        self.new_ids: dict[int, list[int]] = {row_id: [] for row_id in row_ids}
        self.hidden_states: list[LayerStates] = []  # one entry per token
        self.attentions: list[LayerStates] = []
        # each [V] float32
        self._scores: dict[int, list[Tensor]] = {row_id: [] for row_id in row_ids}
        # each [V] float32
        self._logits: dict[int, list[Tensor]] = {row_id: [] for row_id in row_ids}
        self._windows = windows  # return the sliding window of each layer, None for full attention

    @classmethod
    def of(cls, plan: Plan, kv_cache: KVCache) -> "OutputRecorder":
        """Make the recorder for a planned call; `kv_cache` is the target's."""
        text_config = plan.target.model.config.get_text_config(decoder=True)
        return cls(
            plan.call.row_ids, plan.call.recorded, lambda: windows_of(text_config, kv_cache.cache)
        )

    def on_round(self, record: RoundRecord) -> None:
        wants = self.recorded
        for row, num_emitted in enumerate(record.trimmed.num_emitted):
            row_id = record.row_ids[row]
            if record.was_live[row]:  # in lock step, finished rows continue with padding
                self.new_ids[row_id] += record.verified.new_ids[row][:num_emitted]
            if wants.scores and record.was_live[row]:
                self._scores[row_id] += record.verified.scores[row, :num_emitted].to(
                    torch.float32, copy=True
                )
            if wants.logits and record.was_live[row]:
                self._logits[row_id] += record.scored.logits[row, :num_emitted].to(
                    torch.float32, copy=True
                )
        if wants.hidden_states or wants.attentions:
            self._add_states(record)

    def join(self, other: "OutputRecorder") -> None:
        self.new_ids |= other.new_ids

    def take(self, row_id: int) -> list[int]:
        return self.new_ids.pop(row_id)

    def _add_states(self, record: RoundRecord) -> None:
        """Append the states of the prompt, or of the single row's emitted tokens."""
        hidden_states = record.scored.hidden_states if self.recorded.hidden_states else None
        attentions = record.scored.attentions if self.recorded.attentions else None
        if not record.num_round:
            self.hidden_states += [] if hidden_states is None else [hidden_states]
            self.attentions += [] if attentions is None else [attentions]
            return
        windows = self._windows() if attentions else []  # SDPA returns no attentions
        num_query = record.scored.logits.shape[1]
        for position in range(record.trimmed.num_emitted[0]):
            if hidden_states is not None:
                self.hidden_states.append(
                    tuple(layer.narrow(-2, position, 1) for layer in hidden_states)
                )
            if attentions is not None:
                layers = zip(attentions, windows, strict=True)
                self.attentions.append(
                    tuple(
                        _attention_row(layer, position, num_query, window)
                        for layer, window in layers
                    )
                )

    def truncate(self, num_new_tokens: int) -> None:
        rows: list[list[Any]] = [
            *self.new_ids.values(),
            *self._scores.values(),
            *self._logits.values(),
        ]
        for row in rows:
            del row[num_new_tokens:]
        del self.hidden_states[num_new_tokens:], self.attentions[num_new_tokens:]

    def sequences(self, input_ids: Tensor, pad_token_id: int) -> Tensor:
        """Return the prompts with the new tokens, [B, T + longest row] int64, right-padded."""
        longest = max((len(row) for row in self.new_ids.values()), default=0)
        rows = [row + [pad_token_id] * (longest - len(row)) for row in self.new_ids.values()]
        new_ids = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)  # [B, N]
        return torch.cat([input_ids, new_ids], dim=1)

    def output(
        self,
        input_ids: Tensor,
        pad_token_id: int,
        cache: Cache,
        encoder_hidden_states: LayerStates | None = None,
    ) -> GenerateOutput:
        wants = self.recorded
        parts: dict[str, Any] = {
            "sequences": self.sequences(input_ids, pad_token_id),
            "scores": _by_position(self._scores, pad_token_id) if wants.scores else None,
            "logits": _by_position(self._logits, pad_token_id) if wants.logits else None,
            CACHE_NAME: cache,
        }
        states: Any = tuple(self.hidden_states) if wants.hidden_states else None
        if isinstance(cache, EncoderDecoderCache):
            encoded: Any = encoder_hidden_states if wants.hidden_states else None
            return GenerateEncoderDecoderOutput(
                **parts, decoder_hidden_states=states, encoder_hidden_states=encoded
            )
        attentions: Any = tuple(self.attentions) if wants.attentions else None
        return GenerateDecoderOnlyOutput(**parts, attentions=attentions, hidden_states=states)


def _by_position(by_row: dict[int, list[Tensor]], pad_token_id: int) -> tuple[Tensor, ...]:
    """Stack the scores into one tensor [B, V] float32 per new token.

    The scores of finished rows are 0 at the pad id and -inf elsewhere.
    """
    rows = list(by_row.values())
    ended = torch.full_like(rows[0][0], -torch.inf)
    if 0 <= pad_token_id < len(ended):  # the user may have added a pad token without resizing V
        ended[pad_token_id] = 0.0
    longest = max(len(row) for row in rows)
    return tuple(
        torch.stack([row[position] if position < len(row) else ended for row in rows])
        for position in range(longest)
    )


def _attention_row(layer: Tensor, position: int, num_query: int, window: int | None) -> Tensor:
    """Slice one query's attention weights [1, H, 1, T] from [1, H, Q, T + Q]."""
    end = layer.shape[-1] - num_query + position + 1
    start = 0 if window is None else max(end - window, 0)
    return layer[:, :, position : position + 1, start:end]
