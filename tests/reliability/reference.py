"""Decodes token by token from the definitions: every row by itself, without padding, cache or drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_speculate.triton_kernels import row_seeds, sample
from hf_speculate.types import NoiseKeys, Stream

PAD = 0
Line = list[int]


@dataclass
class Request:
    """One call, in words that both decoders are told."""

    max_new_tokens: int
    min_new_tokens: int = 0
    eos_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    is_end: Callable[[Line], bool] | None = None  # of a criterion, asked about a row's line after each new token
    bias: Callable[[Line], Tensor] | None = None  # of a processor, [V] added to a row's scores
    ngram_size: int = 0
    seed: int | None = None  # None: greedy
    temperature: float = 1.0
    top_k: int = 0


@dataclass
class Reference:
    """The decoder."""

    model: Any
    letters: str
    _logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def decode(self, lines: Sequence[Line], pads: Sequence[int], request: Request) -> tuple[list[Line], list[int]]:
        """The rows' lines after the call, all of one length, and how many new tokens each row has that count."""
        rows = [list(line) for line in lines]
        prompt_len = len(rows[0])
        seeds = None if request.seed is None else row_seeds(request.seed, len(rows))
        ends: list[int | None] = [None] * len(rows)
        for num_new in range(1, request.max_new_tokens + 1):
            for number, row in enumerate(rows):
                if ends[number] is not None and request.eos_ids:
                    row.append(PAD)
                    continue
                scores = self._scores(row, pads[number], prompt_len, request)
                seed = None if seeds is None else seeds[number : number + 1]
                row.append(_choose(scores, seed, len(row) - pads[number]))
                if ends[number] is None and self._ends(row, request):
                    ends[number] = num_new
            if None not in ends:
                break
        return rows, [num_new if end is None or not request.eos_ids else end for end in ends]

    def _scores(self, row: Line, num_pads: int, prompt_len: int, request: Request) -> Tensor:
        """[V] float32, in the order in which transformers changes them."""
        scores = self._law(tuple(row[num_pads:])).float()
        size = request.ngram_size
        for at in range(len(row) - size + 1 if size else 0):
            if row[at : at + size - 1] == row[len(row) - size + 1 :]:
                scores[row[at + size - 1]] = -torch.inf
        if len(row) - prompt_len < request.min_new_tokens:
            scores[list(request.eos_ids)] = -torch.inf
        if request.bias is not None:
            scores = scores + request.bias(row)
        if request.seed is not None:
            scores = scores / request.temperature
            if request.top_k:
                scores[scores < scores.topk(request.top_k).values[-1]] = -torch.inf
        return scores

    def _law(self, ids: tuple[int, ...]) -> Tensor:
        if ids not in self._logits:
            with torch.no_grad():
                self._logits[ids] = self.model(torch.tensor([ids])).logits[0, -1]
        return self._logits[ids]

    def _ends(self, row: Line, request: Request) -> bool:
        text = "".join(self.letters[token_id] for token_id in row)
        is_stopped = any(text.endswith(string) for string in request.stop_strings)
        return is_stopped or row[-1] in request.eos_ids or (request.is_end is not None and request.is_end(row))


def _choose(scores: Tensor, seed: Tensor | None, position: int) -> int:
    if seed is None:
        return int(scores.argmax())
    keys = NoiseKeys(seed, torch.zeros(1, dtype=torch.int64), torch.tensor([position]))
    return int(sample(scores[None], keys=keys, stream=Stream.RACE).token_ids)
