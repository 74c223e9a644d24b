"""Decodes one prompt after the other, for models and drafters whose rows cannot be refilled."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_speculate.errors import SpeculateError
from hf_speculate.generation.continuous import RowPrompt, RowResult, RowSource
from hf_speculate.stats import SpeculationStats

# An error of another class ends all requests.
_ERRORS = (SpeculateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class OneByOneDecoder:
    """Decodes prompts of a source with `generate()` of an enabled model."""

    model: PreTrainedModel
    arguments: Mapping[str, Any]  # of `generate()` for all prompts
    on_tokens: Callable[[RowPrompt, Sequence[int]], bool]  # as in `ContinuousDecoder`

    def decode(self, source: RowSource) -> Iterator[list[RowResult]]:
        """Decode until the source has no prompt; each result."""
        while (prompt := source.next()) is not None:
            yield [self._decode(prompt)]

    def _decode(self, prompt: RowPrompt) -> RowResult:
        stats, streamer = SpeculationStats(), _Streamer(prompt, self.on_tokens)
        input_ids = torch.tensor([prompt.token_ids], device=self.model.device)  # [1, T]
        seed = {} if prompt.seed is None else {"seed": prompt.seed}
        error: Exception | None = None
        try:
            self.model.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                **{**self.arguments, **prompt.arguments, **seed},
                streamer=streamer,
                speculation_stats=stats,
            )
        except _CancelledError:
            pass
        except _ERRORS as raised:
            error = raised
        return RowResult(prompt, streamer.ids, stats.num_rounds, stats.num_drafted, stats.num_accepted, error)


class _CancelledError(Exception):
    """The prompt's text is no longer wanted."""


class _Streamer(BaseStreamer):
    """Hands on the tokens so far after each round."""

    def __init__(self, prompt: RowPrompt, on_tokens: Callable[[RowPrompt, Sequence[int]], bool]):
        self.ids: list[int] = []
        self._prompt, self._on_tokens = prompt, on_tokens
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Add new tokens; the first call has the prompt."""
        if not self._is_prompt:
            self.ids += value.flatten().tolist()
        self._is_prompt = False
        if not self._on_tokens(self._prompt, self.ids):
            raise _CancelledError

    def end(self) -> None:
        """Does nothing: the result has all tokens."""
